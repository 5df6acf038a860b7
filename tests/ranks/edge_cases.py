"""On each of two ranks: extreme routing, windows and compiled layers against one process.

Prints one JSON object per case from rank 0.
"""

import functools
import json
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.distributed.mesh import build_meshes
from glm46.distributed.process import Process, join, leave
from glm46.model.router import RoutingOptions
from glm46.model.transformer import Transformer
from glm46.parallelize.plan import initialise, parallelize
from glm46.planner.layout import resolve_layout
from glm46.training.loss import LossWeights, count_tokens, objective

SHAPE = PRESETS["debug"].model_copy(
    update=dict(
        num_hidden_layers=2, hidden_size=32, vocab_size=128, intermediate_size=48, moe_intermediate_size=24,
        n_routed_experts=4, num_experts_per_tok=1, num_nextn_predict_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )
)  # fmt: skip
OPTIONS = RoutingOptions(balance_loss=True, z_loss=True)
WEIGHTS = LossWeights(mtp=0.3, balance=0.01, z=0.001)
STEPS = 4


class Case(NamedTuple):
    """What is extreme about it."""

    experts_over: int = 1
    context: int = 1
    favourite: int | None = None
    """Expert that every token goes to."""
    rows: int = 4
    padding_rows: int = 0
    """Last rows that are padding alone."""
    window: int | None = None
    documents: bool = True
    compiled: bool = False
    checkpointing: str = "none"


CASES = [
    Case(experts_over=2, favourite=0),  # all tokens to rank 0, none to rank 1
    Case(experts_over=2, favourite=3, checkpointing="selective"),
    Case(experts_over=2, favourite=3, checkpointing="full"),
    Case(experts_over=2, rows=2, padding_rows=1),  # a batch of one per rank, and rank 1 has only padding
    Case(experts_over=2, rows=2, padding_rows=1, favourite=0),  # rank 1 sends nothing and receives nothing
    Case(experts_over=2, rows=2, favourite=1),
    Case(rows=2, padding_rows=1),
    Case(context=2, rows=1),
    Case(context=2, rows=1, window=5),
    Case(context=2, window=5, documents=False),
    Case(context=2, documents=False),
    Case(context=2, experts_over=2, rows=2, padding_rows=1),
    Case(compiled=True),
    Case(compiled=True, experts_over=2),
    Case(compiled=True, context=2),
    Case(compiled=True, experts_over=2, checkpointing="selective"),
]


def make_batch(case: Case, step: int) -> dict[str, Tensor]:
    """Rows of three documents and some padding."""
    generator = torch.Generator().manual_seed(step)

    def tokens(*size: int) -> Tensor:
        return torch.randint(0, SHAPE.vocab_size, size, generator=generator)

    lengths = [3 + step, 9, 10 - step, 2]
    document_ids = torch.tensor([0, 1, 2, -1]).repeat_interleave(torch.tensor(lengths)).repeat(case.rows, 1)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(case.rows, 1)
    if case.padding_rows:
        document_ids[-case.padding_rows :] = -1
    labels = tokens(*document_ids.shape).masked_fill(document_ids < 0, -100)
    if not case.documents:
        positions = torch.arange(document_ids.shape[1]).repeat(case.rows, 1)
    return {
        "input_ids": tokens(*document_ids.shape),
        "positions": positions,
        "document_ids": document_ids,
        "labels": labels,
        "mtp_input_ids": tokens(case.rows, 1, document_ids.shape[1]),
        "mtp_labels": labels.unsqueeze(1),
    }


def prepare(case: Case, model: nn.Module) -> None:
    """What the case asks of the initial weights."""
    if case.favourite is not None:
        for router in model.routers().values():
            router.e_score_correction_bias[case.favourite] = 10.0


def train(case: Case, model: nn.Module, take) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Loss, tokens per expert and gradients summed over some steps, of this rank's share of each batch."""
    loss, counted = torch.zeros((), dtype=torch.float64), 0
    for step in range(STEPS):
        batch = make_batch(case, step)
        counts = count_tokens([batch])
        if not case.documents:
            del batch["document_ids"]
        # The first step compiles, the second learns that sizes change; from then on nothing may be compiled again.
        with torch.compiler.set_stance("fail_on_recompile" if case.compiled and step >= 2 else "default"):
            sums = model(**take(batch), options=OPTIONS)
            objective(sums, counts, WEIGHTS).backward()
        loss, counted = loss + sums.loss.detach(), counted + sums.tokens_per_expert
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss, counted, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def run_case(process: Process, case: Case, model: nn.Module) -> tuple:
    """`train` on both ranks; the sums are over them."""
    config = RunConfig.model_validate_json(
        json.dumps(
            {
                "model": {"flavor": "debug"},
                "training": {"mixed_precision_param": "float32"},
                "activation_checkpoint": {"mode": case.checkpointing},
                "compile": {"enable": case.compiled},
                "parallelism": {
                    "expert_parallel_degree": case.experts_over,
                    "context_parallel_degree": case.context,
                },
            }
        )
    )
    meshes = build_meshes(resolve_layout(config.parallelism, process.world_size), "cpu")
    parallelize(model, meshes, config, process.device)
    prepare(case, model)

    def take(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if meshes.sequence is not None:
            return meshes.sequence.cut(batch, case.window)
        half = case.rows // process.world_size
        return {name: rows[process.rank * half : (process.rank + 1) * half] for name, rows in batch.items()}

    loss, counted, gradients = train(case, model, take)
    dist.all_reduce(loss)
    dist.all_reduce(counted)
    return loss, counted, gradients


def compare(process: Process, case: Case) -> dict:
    """Differences between two processes and one."""
    shape = SHAPE.model_copy(update={"sliding_window": case.window})
    with torch.device("meta"):
        models = [Transformer(shape), Transformer(shape)]
    reference = models[0].to_empty(device="cpu")
    initialise(reference, 0)
    prepare(case, reference)
    loss0, counted0, gradients0 = train(case._replace(compiled=False), reference, lambda batch: batch)
    torch.compiler.reset()
    loss, counted, gradients = run_case(process, case, models[1])
    total = sum(gradient.square().sum() for gradient in gradients0.values()).sqrt()
    # Gradients that are zero in exact arithmetic (key biases) are pure rounding: a floor of 1e-4 of the whole norm.
    errors = {n: ((gradients[n] - g).norm() / (g.norm() + 1e-4 * total)).item() for n, g in gradients0.items()}
    return {
        "case": case._asdict(),
        "loss_error": abs(loss.item() / loss0.item() - 1.0),
        "counts_equal": torch.equal(counted, counted0),
        "assignments": counted.sum(1).tolist(),
        "busiest": counted.amax(1).tolist(),
        "gradient_error": max((error, name) for name, error in errors.items()),
    }


def main() -> None:
    """Compare all cases."""
    torch.set_num_threads(1)
    # Tracing, graph breaks and guards are the same with this back end; what it leaves out is a C++ compiler.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    process = join(60)
    for case in CASES:
        figures = compare(process, case)
        if process.is_main:
            print(json.dumps(figures), flush=True)
    leave()
