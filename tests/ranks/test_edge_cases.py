"""Extreme routing, padding, windows and compiled layers on two processes compute what one process does."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process, join, leave
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.context import take_part
from glm46.compute.parallelize.plan import initialise, parallelize
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.run.plan import resolve_plan
from tests.harness import differences
from tests.ranks.sharded_layouts import loss_of_step, may_compile

SHAPE = PRESETS["debug"].model_copy(
    update=dict(
        num_hidden_layers=2, hidden_size=32, vocab_size=128, intermediate_size=48, moe_intermediate_size=24,
        n_routed_experts=4, num_experts_per_tok=1, num_nextn_predict_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )
)  # fmt: skip
OPTIONS = RoutingOptions(balance_loss=True, z_loss=True)
STEPS = 4
"""The first one compiles, the second learns that sizes change, from then on nothing may be compiled again."""


class Case(NamedTuple):
    """Layout, batch and routing of one case."""

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

    @property
    def name(self) -> str:
        """All that is not the default, for example "ep2-favourite3-full_ac"."""
        degrees = [f"{key}2" for key, degree in (("cp", self.context), ("ep", self.experts_over)) if degree > 1]
        return "-".join([
            *(degrees or ["fsdp"]),
            *([f"favourite{self.favourite}"] if self.favourite is not None else []),
            *([f"rows{self.rows}"] if self.rows != 4 else []),
            *([f"padding{self.padding_rows}"] if self.padding_rows else []),
            *([f"window{self.window}"] if self.window else []),
            *([] if self.documents else ["no_documents"]),
            *([f"{self.checkpointing}_ac"] if self.checkpointing != "none" else []),
            *(["compiled"] if self.compiled else []),
        ])  # fmt: skip


_CASES = [
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
    Case(compiled=True, context=2, window=5),
    Case(compiled=True, experts_over=2, checkpointing="selective"),
]
CASES = {case.name: case for case in _CASES}


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
        loss_of = loss_of_step(batch)
        if not case.documents:
            del batch["document_ids"]
        with may_compile(not case.compiled or step < 2, case.context):
            sums = model(**take(batch), options=OPTIONS)
            loss_of(sums).backward()
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
                "parallelism": {"expert_parallel_degree": case.experts_over, "context_parallel_degree": case.context},
            }
        )
    )
    plan = resolve_plan(config, process.world_size)
    cluster = build_cluster(plan, process)
    parallelize(model, plan, cluster)
    prepare(case, model)

    def take(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if cluster.meshes.sequence is not None:
            ids = batch.get("document_ids")
            rows = {name: rows for name, rows in batch.items() if name != "document_ids"}
            rows |= {} if ids is None else {"is_real": ids >= 0}
            return take_part(rows, ids, case.window, cluster.meshes.sequence)
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
        "name": case.name,
        "loss_error": (abs(loss.item() / loss0.item() - 1.0), f"{loss.item()!r} instead of {loss0.item()!r}"),
        "counts_equal": torch.equal(counted, counted0),
        "assignments": counted.sum(1).tolist(),
        "busiest": counted.amax(1).tolist(),
        "gradient_error": max((error, name) for name, error in errors.items()),
    }


def without_compiler(names: list[str], ranks: int, folder: Path) -> None:
    """Tracing, graph breaks and guards are the same with this back end; what it leaves out is a C++ compiler."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def compare_cases(names: list[str], shared: None) -> Iterator[dict]:
    """On each rank."""
    process = join(300)
    for name in names:
        yield compare(process, CASES[name])
    leave()


def test_no_two_cases_have_one_name():
    assert len(CASES) == 17


@pytest.mark.parametrize("case", CASES)
def test_a_case_equals_one_process(case_row, case):
    # Five at once: the last cases, which compile, are in both halves. A compilation after the second step is an error.
    row = case_row(compare_cases, 2, case=case, prepare=without_compiler, at_once=5)
    if CASES[case].favourite is not None:
        assert row["busiest"] == row["assignments"], "the case must be as extreme as its name says"
    assert row["counts_equal"]
    # FP32 sums in another order, over the gradients of three steps.
    assert differences(row, {"loss_error": 1e-6, "gradient_error": 1e-5}) == []
