"""Run under torchrun: compare every layout of this world size with one process, and print the figures.

Prints one JSON object per layout from rank 0. The launch is the slow part, so one process group serves all layouts.
"""

import faulthandler
import json
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm46.config.presets import resolve_shape
from glm46.config.run import Run
from glm46.distributed.grad_norm import global_grad_norm, scale_gradients
from glm46.distributed.process import Process, join, leave
from glm46.model.router import RoutingOptions
from glm46.model.transformer import Transformer
from glm46.optim.optimizers import build_optimizers
from glm46.parallelize.plan import initialise
from glm46.training.build import Parts, assemble
from glm46.training.loss import LossWeights, count_tokens, objective
from glm46.training.step import train_step

# Small and uneven on purpose: 68 columns and 516 rows leave unequal shards.
SHAPE = {
    "flavor": "debug", "num_hidden_layers": 5, "hidden_size": 68, "vocab_size": 516, "intermediate_size": 100,
    "moe_intermediate_size": 36, "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_nextn_predict_layers": 2,
}  # fmt: skip
DEPTHS, VOCABULARY = SHAPE["num_nextn_predict_layers"], SHAPE["vocab_size"]


class Layout(NamedTuple):
    """One way to lay out the run."""

    replicate: int = 1
    experts_over: int = 1
    num_experts: int = 6
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1F1B"
    reshard: str = "default"
    checkpointing: str = "none"
    micro_batches: int = 2


# 6 experts on 4 ranks are sharded inside each expert, 12 in whole ones; 6 over 2 ranks again inside each.
LAYOUTS = {
    1: [Layout(), Layout(reshard="never"), Layout(checkpointing="full"), Layout(checkpointing="selective")],
    2: [
        Layout(), Layout(replicate=2), Layout(reshard="never"), Layout(checkpointing="full"),
        Layout(experts_over=2), Layout(experts_over=2, reshard="never"),
        Layout(experts_over=2, checkpointing="selective"), Layout(context=2, checkpointing="selective"),
        Layout(context=2), Layout(context=2, experts_over=2),
        Layout(tensor=2), Layout(tensor=2, experts_over=2),
        Layout(tensor=2, checkpointing="selective"), Layout(pipeline=2), Layout(pipeline=2, reshard="always"),
        Layout(pipeline=2, schedule="GPipe", micro_batches=4),
        Layout(pipeline=2, schedule="Interleaved1F1B", micro_batches=4, checkpointing="full"),
        Layout(pipeline=2, schedule="InterleavedZeroBubble", micro_batches=4),
        Layout(pipeline=2, schedule="ZBVZeroBubble", micro_batches=4),
        Layout(pipeline=2, schedule="ZBVZeroBubble", micro_batches=8, checkpointing="full"),
        Layout(pipeline=2, schedule="DualPipeV", micro_batches=4),
        Layout(pipeline=2, schedule="Interleaved1F1B", micro_batches=4, checkpointing="selective"),
    ],
    4: [
        Layout(), Layout(num_experts=12), Layout(replicate=2),
        Layout(experts_over=2), Layout(experts_over=4, num_experts=12),
        Layout(context=2), Layout(context=4), Layout(context=2, replicate=2), Layout(context=2, experts_over=2),
        Layout(context=2, experts_over=4, num_experts=12), Layout(context=2, replicate=2, experts_over=2),
        Layout(context=2, experts_over=2, checkpointing="selective", reshard="never"),
        Layout(tensor=2), Layout(tensor=4, experts_over=2), Layout(tensor=2, replicate=2), Layout(tensor=2, context=2),
        Layout(tensor=2, experts_over=4, num_experts=12), Layout(tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(tensor=2, replicate=2, experts_over=2),
        Layout(replicate=2, experts_over=2),
        Layout(pipeline=2, micro_batches=4), Layout(pipeline=2, replicate=2), Layout(pipeline=4, micro_batches=4),
        Layout(pipeline=2, context=2, schedule="ZBVZeroBubble", micro_batches=4),
        Layout(pipeline=2, tensor=2, schedule="InterleavedZeroBubble", micro_batches=4),
        Layout(pipeline=2, experts_over=2, schedule="DualPipeV", micro_batches=4),
        Layout(pipeline=2, tensor=2, experts_over=2, schedule="DualPipeV", micro_batches=4),
    ],
    8: [
        Layout(pipeline=2, tensor=2, experts_over=4, num_experts=12, schedule="ZBVZeroBubble", micro_batches=4),
        Layout(pipeline=2, tensor=2, context=2, experts_over=2),
        Layout(pipeline=2, replicate=2, tensor=2, experts_over=2, schedule="Interleaved1F1B", micro_batches=4),
        Layout(pipeline=2, replicate=2, context=2, micro_batches=4, schedule="InterleavedZeroBubble"),
        Layout(pipeline=2, context=2, experts_over=4, num_experts=12, schedule="DualPipeV", micro_batches=4),
        Layout(pipeline=4, tensor=2, micro_batches=4, checkpointing="full"),
        Layout(replicate=2, tensor=2, context=2, experts_over=4, num_experts=12),
        Layout(tensor=4, context=2, experts_over=8, num_experts=16),
        Layout(replicate=2, context=2, experts_over=4, num_experts=12), Layout(num_experts=16, micro_batches=1),
    ],
}  # fmt: skip
ROWS, SEQ_LEN = 8, 24
WEIGHTS = LossWeights(mtp=0.3, balance=0.01, z=0.001)
OPTIONS = RoutingOptions(balance_loss=True, z_loss=True)
STEPS = 3


def make_batch(step: int) -> dict[str, Tensor]:
    """All rows of one step; documents of unequal length, some labels missing, so that ranks see unequal counts."""
    generator = torch.Generator().manual_seed(step)
    depth = DEPTHS

    def tokens(*size: int) -> Tensor:
        return torch.randint(0, VOCABULARY, size, generator=generator)

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


def run_reference(run: Run) -> tuple:
    """Losses, counts, norms, first gradients and weights of one process, in a plain loop without any transform."""
    with torch.device("meta"):
        model = Transformer(resolve_shape(run.model))
    model.to_empty(device="cpu")
    initialise(model, run.debug.seed)
    parameters = dict(model.named_parameters())
    initial = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = build_optimizers(list(parameters.items()), run.optimizer)
    figures, gradients = [], {}
    for step in range(STEPS):
        batch = make_batch(step)
        optimizer.zero_grad()
        sums = model(**batch, options=OPTIONS)
        objective(sums, count_tokens([batch]), WEIGHTS).backward()
        norm = global_grad_norm(parameters.values())
        scale_gradients(parameters.values(), (run.training.max_norm / (norm + 1e-6)).clamp(max=1.0))
        gradients = gradients or {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step(1.0)
        figures.append((sums.loss.item(), sums.tokens_per_expert, norm.item()))
    return initial, figures, gradients, {name: p.detach() for name, p in parameters.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_run(layout: Layout) -> Run:
    return Run.model_validate_json(
        json.dumps(
            {
                "model": SHAPE | {"n_routed_experts": layout.num_experts},
                "training": {"mixed_precision_param": "float32", "seq_len": SEQ_LEN},
                "optimizer": {"lr": 1e-3, "ns_dtype": "float32"},
                "moe": {"balance": "none", "sequence_aux_loss_weight": WEIGHTS.balance, "z_loss_weight": WEIGHTS.z},
                "mtp": {"loss_weight": WEIGHTS.mtp},
                "data": {"document_mask": True},
                "activation_checkpoint": {"mode": layout.checkpointing},
                "parallelism": {
                    "data_parallel_replicate_degree": layout.replicate,
                    "expert_parallel_degree": layout.experts_over,
                    "context_parallel_degree": layout.context,
                    "tensor_parallel_degree": layout.tensor,
                    "pipeline_parallel_degree": layout.pipeline,
                    "pipeline_parallel_schedule": layout.schedule,
                    "fsdp_reshard_after_forward": layout.reshard,
                },
            }
        )
    )


def micro_batches(parts: Parts, step: int, count: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of a step: each is a block of rows, of which each reader takes its share."""
    batch, readers = make_batch(step), parts.layout.batch_ranks
    share = ROWS // count // readers
    first = [micro * (ROWS // count) + parts.batch_rank * share for micro in range(count)]
    return [{name: tensor[start : start + share] for name, tensor in batch.items()} for start in first]


def run_layout(process: Process, layout: Layout) -> tuple:
    """The same as `run_reference`, by the trainer's own step, of the parameters that are here."""
    parts = assemble(make_run(layout), process, None, {})
    initial = {name: whole(p).clone() for name, p in parts.parameters.items()}
    figures, gradients = [], {}
    for step in range(STEPS):
        counts = count_tokens([make_batch(step)])
        outcome = train_step(parts, micro_batches(parts, step, layout.micro_batches), counts, 0, 1.0)
        gradients = gradients or {name: whole(p.grad).clone() for name, p in parts.parameters.items()}
        figures.append((outcome.loss_sum.item(), outcome.tokens_per_expert, outcome.grad_norm.item()))
    return initial, figures, gradients, {name: whole(p) for name, p in parts.parameters.items()}


def compare(layout: Layout, found: tuple, reference: tuple) -> dict:
    """Relative differences between a layout and one process; collective, because ranks hold different layers."""
    initial, figures, gradients, final = found
    initial0, figures0, gradients0, final0 = reference
    total = sum(g.square().sum() for g in gradients0.values()).sqrt()
    # Gradients that are zero in exact arithmetic (key biases) are pure rounding: a floor of 1e-4 of the whole norm.
    errors = {
        n: ((g - gradients0[n]).norm() / (gradients0[n].norm() + 1e-4 * total)).item() for n, g in gradients.items()
    }
    moved = {
        n: ((w - final0[n]).norm() / (final0[n] - initial0[n]).norm()).item()
        for n, w in final.items()
        if not n.endswith("k_proj.bias")
    }
    apart = {n: ((w - final0[n]).norm() / final0[n].norm()).item() for n, w in final.items() if not n.endswith("bias")}
    here = (
        all(torch.equal(w, initial0[n]) for n, w in initial.items()),
        max((error, name) for name, error in errors.items()),
        max((error, name) for name, error in moved.items()),
        max((error, name) for name, error in apart.items()),
        set(initial),
    )
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, here)
    equal, gradient_errors, update_errors, weight_errors, names = zip(*ranks, strict=True)
    return {
        "layout": layout._asdict(),
        "initial_weights_equal": all(equal) and set.union(*names) == set(initial0),
        "loss_error": max(abs(a[0] / b[0] - 1.0) for a, b in zip(figures, figures0, strict=True)),
        "norm_error": max(abs(a[2] / b[2] - 1.0) for a, b in zip(figures, figures0, strict=True)),
        "counts_equal": all(torch.equal(a[1], b[1]) for a, b in zip(figures, figures0, strict=True)),
        "gradient_error": max(gradient_errors),
        "update_error": max(update_errors),
        "weight_error": max(weight_errors),
    }


def main() -> None:
    """Compare all layouts of this world size with one process."""
    torch.set_num_threads(1)
    faulthandler.enable()
    process = join(60)
    references: dict[int, tuple] = {}
    for layout in LAYOUTS[process.world_size]:
        if layout.num_experts not in references:
            references[layout.num_experts] = run_reference(make_run(layout))
        figures = compare(layout, run_layout(process, layout), references[layout.num_experts])
        if process.is_main:
            print(json.dumps(figures), flush=True)
    leave()


if __name__ == "__main__":
    main()
