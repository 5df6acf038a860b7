"""Adapters in FP32 on a base in BF16: they begin as their base to the bit, and only they are reduced."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.process import Process, join, leave
from glm46.config.run_config import RunConfig
from glm46.engine.training.network import build_frozen_network
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.builders import with_shape
from tests.harness import start
from tests.ranks.sharded_layouts import (
    Job,
    Layout,
    begin_adapters,
    build_job,
    make_batch,
    make_config,
    micro_batches,
    whole,
)
from tests.ranks.test_traffic import Traffic

LAYOUTS = {
    f"{kind}-{name}": layout._replace(adapter=kind)
    for kind in ("lora", "dora")
    for name, layout in {
        "fsdp": Layout(checkpointing="full"), "expert": Layout(experts_over=2), "tensor": Layout(tensor=2),
    }.items()
}  # fmt: skip


class Run(NamedTuple):
    """Of a step, and of what the adapters make of their base before it."""

    loss_of_base: float
    loss_of_new_adapters: float
    gradients: dict[str, Tensor]
    """Whole."""
    row: dict


def config_of(layout: Layout, dtype: str) -> RunConfig:
    """`make_config` in this type, without clipping, with widths that grouped products take in BF16."""
    config = with_shape(make_config(layout), hidden_size=72, moe_intermediate_size=40)
    training = config.training.model_copy(update={"mixed_precision_param": dtype, "max_norm": 1e9})
    return config.model_copy(update={"training": training})


def loss_of(job: Job, trainable: bool) -> float:
    """Of this rank's rows; without adapters by a network of its own."""
    network = job.network if trainable else build_frozen_network(job.plan, job.cluster)
    readers = job.plan.layout.dp_degree
    share = slice(*(len(make_batch(0)["labels"]) // readers * (job.cluster.dp_rank + end) for end in (0, 1)))
    output = network.evaluate({name: tensor[share] for name, tensor in make_batch(0).items()})
    network.release()
    return output.loss.item()


def measure(process: Process, layout: Layout, dtype: str) -> Run:
    """One step; collective."""
    job = build_job(config_of(layout, dtype), process)
    network = job.network
    of_base = loss_of(job, trainable=False)
    network.loaded(new_adapters=True)
    of_new = loss_of(job, trainable=True)
    begin_adapters(network.parameters)
    network.loaded(new_adapters=False)
    totals = count_step(job, [make_batch(0)])
    with Traffic() as traffic:
        train_step(job, micro_batches(job, 0, layout.micro_batches), totals, 0, 1.0)
    row = {
        "reduce_scatter": traffic.bytes["reduce_scatter"],
        "types": sorted({str(p.dtype) for p in network.parameters.values()}),
        "frozen_types": sorted({str(p.dtype) for p in network.frozen.values()}),
        "base": sum(local_tensor(p).numel() for p in network.frozen.values()),
        "padded_adapters": sum(padded(n, p, layout) for n, p in network.parameters.items()),
    }
    return Run(of_base, of_new, {name: whole(p.grad) for name, p in network.parameters.items()}, row)


def padded(name: str, parameter: Tensor, layout: Layout) -> int:
    """Elements that FSDP2 reduces over two ranks, with the padding of uneven shards; 0 if it has one shard."""
    if layout.tensor == 2 or (".experts." in name and layout.experts_over == 2):
        return 0
    rows = parameter.shape[0]
    return parameter.numel() // rows * (rows + rows % 2)


def compare_types(names: list[str]) -> dict[str, dict]:
    """On each rank: a row for each case."""
    process, rows = join(300), {}
    for name in names:
        layout = LAYOUTS[name]
        run, exact = (measure(process, layout, dtype) for dtype in ("bfloat16", "float32"))
        apart, size = (
            sum((a - b).double().square().sum() for a, b in zip(one.values(), other.values(), strict=True)) ** 0.5
            for one, other in (
                (run.gradients, exact.gradients),
                (exact.gradients, {n: torch.zeros_like(g) for n, g in exact.gradients.items()}),
            )
        )
        equal = [run.loss_of_base == run.loss_of_new_adapters, exact.loss_of_base == exact.loss_of_new_adapters]
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, equal)
        rows[name] = {"distance": (apart / size).item(), "equal": ranks, **run.row}
    leave()
    return rows


FP32, MICRO_BATCHES = 4, 2


@pytest.fixture(scope="module")
def figures():
    names = list(LAYOUTS)
    halves = [start(compare_types, half, ranks=2) for half in (names[::2], names[1::2])]
    return {name: row for half in halves for name, row in half.result()[0].items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_adapters_change_no_bit_of_the_loss(figures, layout):
    """In BF16 and in FP32, on both ranks."""
    assert figures[layout]["equal"] == [[True, True], [True, True]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_fp32_but_for_the_rounding_of_the_base(figures, layout):
    row = figures[layout]
    assert row["types"] == ["torch.float32"] and row["frozen_types"] == ["torch.bfloat16"]
    assert 1e-3 < row["distance"] < 0.1  # some tokens go to another expert than in FP32


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "tensor" not in name])
def test_only_adapters_are_reduced(figures, layout):
    """In each micro-batch; those of experts that a rank holds whole are not."""
    row = figures[layout]
    assert row["reduce_scatter"] == MICRO_BATCHES * FP32 * row["padded_adapters"]
    assert 0 < row["padded_adapters"] < row["base"]
