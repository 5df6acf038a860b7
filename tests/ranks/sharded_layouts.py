"""Run under torchrun: compare every layout of this world size with one process, and print the figures.

Prints one JSON object per layout from rank 0. The launch is the slow part, so one process group serves all layouts.
"""

import faulthandler
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glm46.config.presets import PRESETS
from glm46.config.run import Run
from glm46.distributed.grad_norm import global_grad_norm, scale_gradients
from glm46.distributed.mesh import build_meshes
from glm46.distributed.process import Process, join, leave
from glm46.model.router import RoutingOptions
from glm46.model.transformer import LossSums, Transformer
from glm46.optim.optimizers import build_optimizers
from glm46.parallelize.plan import initialise, parallelize
from glm46.planner.layout import resolve_layout
from glm46.training.loss import LossWeights, TokenCounts, count_tokens, objective

# Small and uneven on purpose: 515 rows leave unequal shards.
SHAPE = PRESETS["debug"].model_copy(
    update=dict(
        num_hidden_layers=3, hidden_size=68, vocab_size=516, intermediate_size=100, moe_intermediate_size=36,
        num_experts_per_tok=2, num_attention_heads=8, num_key_value_heads=4, head_dim=16, num_nextn_predict_layers=2,
    )
)  # fmt: skip


class Layout(NamedTuple):
    """One way to lay out the run."""

    replicate: int = 1
    experts_over: int = 1
    num_experts: int = 6
    context: int = 1
    tensor: int = 1
    reshard: str = "default"
    checkpointing: str = "none"


# 6 experts on 4 ranks are sharded inside each expert, 12 in whole ones; 6 over 2 ranks again inside each.
LAYOUTS = {
    1: [Layout(), Layout(reshard="never"), Layout(checkpointing="full"), Layout(checkpointing="selective")],
    2: [
        Layout(), Layout(replicate=2), Layout(reshard="never"), Layout(checkpointing="full"),
        Layout(experts_over=2), Layout(experts_over=2, checkpointing="full"), Layout(experts_over=2, reshard="never"),
        Layout(experts_over=2, checkpointing="selective"), Layout(context=2, checkpointing="selective"),
        Layout(context=2), Layout(context=2, checkpointing="full"), Layout(context=2, experts_over=2),
        Layout(tensor=2), Layout(tensor=2, experts_over=2), Layout(tensor=2, checkpointing="full"),
    ],
    4: [
        Layout(), Layout(num_experts=12), Layout(replicate=2), Layout(replicate=4), Layout(checkpointing="full"),
        Layout(experts_over=2), Layout(experts_over=4, num_experts=12), Layout(experts_over=2, num_experts=12),
        Layout(context=2), Layout(context=4), Layout(context=2, replicate=2), Layout(context=2, experts_over=2),
        Layout(context=2, experts_over=4, num_experts=12), Layout(context=2, replicate=2, experts_over=2),
        Layout(context=2, experts_over=2, checkpointing="selective", reshard="never"),
        Layout(tensor=2), Layout(tensor=4, experts_over=2), Layout(tensor=2, replicate=2), Layout(tensor=2, context=2),
        Layout(tensor=2, experts_over=4, num_experts=12), Layout(tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(tensor=2, replicate=2, experts_over=2), Layout(tensor=2, num_experts=12, reshard="never"),
        Layout(replicate=2, experts_over=2), Layout(experts_over=4, num_experts=12, checkpointing="full"),
    ],
}  # fmt: skip
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


def train(model: nn.Module, name_to_parameter: dict, rows: list[slice], take: Callable | None):
    """Losses, token counts and first gradients of a few optimizer steps; `take` is None on one process."""
    optimizer = build_optimizers(list(name_to_parameter.items()), RUN.optimizer)
    losses, loads, gradients, norms = [], [], None, []
    for step in range(STEPS):
        batch = make_batch(step)
        optimizer.zero_grad()
        counts = count_tokens([batch])
        if take:
            batch = {name: take(tensor) for name, tensor in batch.items()}
        loss, load = forward_backward(model, batch, rows, counts)
        if take:
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
            "optimizer": {"lr": 1e-3, "ns_dtype": "float32"},
        }
    )
)


def run_layout(process: Process, layout: Layout) -> tuple:
    """Train on one layout; returns the initial weights, what `train` gives, and the final weights."""
    parallelism = {
        "data_parallel_replicate_degree": layout.replicate,
        "expert_parallel_degree": layout.experts_over,
        "context_parallel_degree": layout.context,
        "tensor_parallel_degree": layout.tensor,
        "fsdp_reshard_after_forward": layout.reshard,
    }
    run = RUN.model_copy(
        update={
            "parallelism": RUN.parallelism.model_copy(update=parallelism),
            "activation_checkpoint": RUN.activation_checkpoint.model_copy(update={"mode": layout.checkpointing}),
        }
    )
    with torch.device("meta"):
        model = Transformer(SHAPE.model_copy(update={"n_routed_experts": layout.num_experts}))
    degrees = resolve_layout(run.parallelism, process.world_size)
    meshes = build_meshes(degrees, "cpu")
    parallelize(model, meshes, run, process.device)
    parameters = dict(model.named_parameters())
    initial = {name: whole(p).clone() for name, p in parameters.items()}
    per_rank = ROWS // degrees.batch_ranks // MICRO_BATCHES
    first = [
        m * (ROWS // MICRO_BATCHES) + degrees.batch_rank(process.rank) * per_rank for m in range(MICRO_BATCHES)
    ]
    take = meshes.sequence.take if meshes.sequence else lambda x: x
    result = train(model, parameters, [slice(f, f + per_rank) for f in first], take)
    return initial, result, {name: whole(p) for name, p in parameters.items()}


def run_reference(num_experts: int) -> tuple:
    """The same on one process without any transform."""
    with torch.device("meta"):
        model = Transformer(SHAPE.model_copy(update={"n_routed_experts": num_experts}))
    model.to_empty(device="cpu")
    initialise(model, RUN.debug.seed)
    parameters = dict(model.named_parameters())
    initial = {name: p.detach().clone() for name, p in parameters.items()}
    result = train(model, parameters, [slice(0, ROWS)], None)
    return initial, result, {name: p.detach() for name, p in parameters.items()}


def compare(layout: Layout, found: tuple, reference: tuple) -> dict:
    """Relative differences between a layout and one process."""
    initial, (losses, loads, gradients, norms), final = found
    initial0, (losses0, loads0, gradients0, norms0), final0 = reference
    total = sum(g.square().sum() for g in gradients0.values()).sqrt()
    # Gradients that are zero in exact arithmetic (key biases) are pure rounding: a floor of 1e-4 of the whole norm.
    errors = {n: ((gradients[n] - g).norm() / (g.norm() + 1e-4 * total)).item() for n, g in gradients0.items()}
    moved = {n: ((final[n] - w).norm() / (w - initial0[n]).norm()).item() for n, w in final0.items()}
    return {
        "layout": layout._asdict(),
        "initial_weights_equal": all(torch.equal(initial[n], w) for n, w in initial0.items()),
        "loss_error": max(abs(a / b - 1.0) for a, b in zip(losses, losses0, strict=True)),
        "norm_error": max(abs(a / b - 1.0) for a, b in zip(norms, norms0, strict=True)),
        "counts_equal": all(torch.equal(a, b) for a, b in zip(loads, loads0, strict=True)),
        "gradient_error": max((error, name) for name, error in errors.items()),
        "update_error": max((error, name) for name, error in moved.items() if not name.endswith("k_proj.bias")),
    }


def main() -> None:
    """Compare all layouts of this world size with one process."""
    torch.set_num_threads(1)
    faulthandler.enable()
    process = join(60)
    references: dict[int, tuple] = {}
    for layout in LAYOUTS[process.world_size]:
        if layout.num_experts not in references:
            references[layout.num_experts] = run_reference(layout.num_experts)
        figures = compare(layout, run_layout(process, layout), references[layout.num_experts])
        if process.is_main:
            print(json.dumps(figures), flush=True)
    leave()


if __name__ == "__main__":
    main()
