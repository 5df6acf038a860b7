"""Run under torchrun: compare every FSDP2 and HSDP layout of this world size with one process, and print the figures.

Prints one JSON object per layout from rank 0. The launch is the slow part, so one process group serves all layouts.
"""

import json

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glm46.config.presets import PRESETS
from glm46.config.run import Run
from glm46.distributed.grad_norm import global_grad_norm, scale_gradients
from glm46.distributed.mesh import build_mesh
from glm46.distributed.process import Process, join, leave
from glm46.model.router import RoutingOptions
from glm46.model.transformer import LossSums, Transformer
from glm46.optim.optimizers import build_optimizers
from glm46.parallelize.plan import initialise, parallelize
from glm46.planner.layout import resolve_layout
from glm46.training.loss import LossWeights, TokenCounts, count_tokens, objective

# Small and uneven on purpose: 6 experts on 4 ranks are sharded inside each expert, 515 rows leave unequal shards.
SHAPE = PRESETS["debug"].model_copy(
    update=dict(
        num_hidden_layers=3, hidden_size=68, vocab_size=515, intermediate_size=100, moe_intermediate_size=36,
        n_routed_experts=6, num_experts_per_tok=2, num_nextn_predict_layers=2,
    )
)  # fmt: skip
ROWS, SEQ_LEN, MICRO_BATCHES = 8, 24, 2
WEIGHTS = LossWeights(mtp=0.3, balance=0.01, z=0.001)
OPTIONS = RoutingOptions(balance_loss=True, z_loss=True)
STEPS = 3


def make_batch(step: int) -> dict[str, Tensor]:
    """All rows of one step; documents of unequal length, some labels missing, so that ranks see unequal counts."""
    generator = torch.Generator().manual_seed(step)
    depth = SHAPE.num_nextn_predict_layers

    def tokens(*size: int) -> Tensor:
        return torch.randint(0, SHAPE.vocab_size, size, generator=generator)

    lengths = torch.randint(3, 20, (ROWS, SEQ_LEN), generator=generator)
    ends = lengths.cumsum(1)
    document_ids = (torch.arange(SEQ_LEN).view(1, -1, 1) >= ends.unsqueeze(1)).sum(-1)
    positions = torch.arange(SEQ_LEN) - torch.where(
        document_ids > 0, ends.gather(1, (document_ids - 1).clamp(min=0)), torch.zeros_like(document_ids)
    )
    missing = torch.rand(ROWS, SEQ_LEN, generator=generator) < torch.linspace(0.0, 0.7, ROWS).unsqueeze(1)
    return {
        "input_ids": tokens(ROWS, SEQ_LEN),
        "positions": positions,
        "document_ids": document_ids,
        "labels": tokens(ROWS, SEQ_LEN).masked_fill(missing, -100),
        "mtp_input_ids": tokens(ROWS, depth, SEQ_LEN),
        "mtp_labels": tokens(ROWS, depth, SEQ_LEN).masked_fill(missing.unsqueeze(1), -100),
    }


def forward_backward(model: nn.Module, batch: dict[str, Tensor], rows: list[slice], counts: TokenCounts) -> LossSums:
    """Gradients of the given rows, one micro-batch per slice; returns loss and token counts summed over them."""
    total = None
    for part in rows:
        sums = model(**{name: tensor[part] for name, tensor in batch.items()}, options=OPTIONS)
        objective(sums, counts, WEIGHTS).backward()
        figures = (sums.loss.detach().double(), sums.tokens_per_expert)
        total = figures if total is None else (total[0] + figures[0], total[1] + figures[1])
    return total


def train(model: nn.Module, name_to_parameter: dict, rows: list[slice], is_sharded: bool):
    """Losses, token counts and first gradients of a few optimizer steps."""
    optimizer = build_optimizers(list(name_to_parameter.items()), RUN.optimizer)
    losses, loads, gradients, norms = [], [], None, []
    for step in range(STEPS):
        batch = make_batch(step)
        optimizer.zero_grad()
        loss, load = forward_backward(model, batch, rows, count_tokens([batch]))
        if is_sharded:
            dist.all_reduce(loss)
            dist.all_reduce(load)
        losses.append(loss.item())
        loads.append(load)
        if gradients is None:
            gradients = {name: whole(p.grad).clone() for name, p in name_to_parameter.items()}
        norm = global_grad_norm(name_to_parameter.values())
        norms.append(norm.item())
        scale_gradients(name_to_parameter.values(), (1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step(1.0)
    return losses, loads, gradients, norms


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


RUN = Run.model_validate_json(
    json.dumps(
        {
            "model": {"flavor": "debug"},
            "training": {"mixed_precision_param": "float32"},
            "optimizer": {"name": "AdamW", "lr": 1e-3, "ns_dtype": "float32"},
        }
    )
)


def run_layout(process: Process, replicate: int, reshard: str, checkpointing: str) -> tuple:
    """Train on one layout and return what `train` gives, with the initial weights."""
    run = RUN.model_copy(
        update={
            "parallelism": RUN.parallelism.model_copy(
                update={"data_parallel_replicate_degree": replicate, "fsdp_reshard_after_forward": reshard}
            ),
            "activation_checkpoint": RUN.activation_checkpoint.model_copy(update={"mode": checkpointing}),
        }
    )
    with torch.device("meta"):
        model = Transformer(SHAPE)
    parallelize(model, build_mesh(resolve_layout(run.parallelism, process.world_size), "cpu"), run, process.device)
    parameters = dict(model.named_parameters())
    initial = {name: whole(p).clone() for name, p in parameters.items()}
    per_rank = ROWS // process.world_size // MICRO_BATCHES
    first = [m * (ROWS // MICRO_BATCHES) + process.rank * per_rank for m in range(MICRO_BATCHES)]
    result = train(model, parameters, [slice(f, f + per_rank) for f in first], is_sharded=True)
    return initial, result, {name: whole(p) for name, p in parameters.items()}


def main() -> None:
    """Compare all layouts of this world size with one process."""
    torch.set_num_threads(1)
    process = join(60)
    with torch.device("meta"):
        reference = Transformer(SHAPE)
    reference.to_empty(device="cpu")
    initialise(reference, RUN.debug.seed)
    parameters = dict(reference.named_parameters())
    initial0 = {name: p.detach().clone() for name, p in parameters.items()}
    losses0, loads0, gradients0, norms0 = train(reference, parameters, [slice(0, ROWS)], is_sharded=False)
    total = sum(g.square().sum() for g in gradients0.values()).sqrt()
    update = {name: (p.detach() - initial0[name]) for name, p in parameters.items()}

    world = process.world_size
    layouts = [(r, "default", "none") for r in (1, 2, 4) if world % r == 0]
    layouts += [(1, "never", "none"), (1, "default", "full"), (world, "always", "full")]
    for replicate, reshard, checkpointing in layouts:
        initial, (losses, loads, gradients, norms), final = run_layout(process, replicate, reshard, checkpointing)
        # Gradients that are zero in exact arithmetic (key biases) are pure rounding: a floor of 1e-4 of the whole norm.
        errors = {n: ((gradients[n] - g).norm() / (g.norm() + 1e-4 * total)).item() for n, g in gradients0.items()}
        moved = {n: ((final[n] - initial0[n] - u).norm() / (u.norm() + 1e-12)).item() for n, u in update.items()}
        worst, worst_update = max(errors, key=errors.get), max(moved, key=moved.get)
        if process.is_main:
            figures = {
                "layout": [replicate, world // replicate, reshard, checkpointing],
                "initial_weights_equal": all(torch.equal(initial[n], w) for n, w in initial0.items()),
                "loss_error": max(abs(a / b - 1.0) for a, b in zip(losses, losses0, strict=True)),
                "norm_error": max(abs(a / b - 1.0) for a, b in zip(norms, norms0, strict=True)),
                "counts_equal": all(torch.equal(a, b) for a, b in zip(loads, loads0, strict=True)),
                "gradient_error": [worst, errors[worst]],
                "update_error": [worst_update, moved[worst_update]],
            }
            print(json.dumps(figures), flush=True)
    leave()


if __name__ == "__main__":
    main()
