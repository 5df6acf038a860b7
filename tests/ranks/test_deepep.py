"""Tokens that DeepEP sends give the result and gradients of the all-to-all, by calls that keep its contract: those of a
fake, which is strict. No GPU has run it."""

from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.process import Process
from glm46.compute.model.moe import MoE
from glm46.compute.parallelize.deepep import DeepEPDispatcher
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from tests.harness import measure_cases, run_ranks
from tests.ranks.fake_deep_ep import ElasticBuffer
from tests.ranks.test_two_levels import CHOSEN, TOKENS, WIDTH, Case, error, example, run, split


def cases(ranks: int) -> list[Case]:
    """Of this number of ranks, in BF16."""
    special = [
        {}, {"checkpointing": "full"}, {"checkpointing": "selective"}, {"capacity": 0.5, "checkpointing": "full"},
        {"favourites": 8, "silent": True, "checkpointing": "selective"}, {"multiple": 16}, {"router": "routes"},
        {"multiple": 32, "favourites": 8, "silent": True, "capacity": 1.5},
    ]  # fmt: skip
    return [Case(1, ranks, dtype="bfloat16", way="deepep", **each) for each in special]


CASES = {ranks: cases(ranks) for ranks in (2, 4)}


def measure(process: Process, case: Case) -> dict:
    """One case on all ranks."""
    ranks, rank, dtype = process.world_size, process.rank, torch.bfloat16
    whole, xs, ups, real, routes = example(case, ranks)
    buffer = ElasticBuffer(dist.group.WORLD, None, 0, TOKENS, WIDTH, CHOSEN, deterministic=True)
    found = []
    for dispatcher in (AllToAllDispatcher(dist.group.WORLD), DeepEPDispatcher(dist.group.WORLD, buffer)):
        dispatcher.multiple = case.multiple
        moe = split(whole, dispatcher, rank, ranks, dtype)
        with only_arrived(moe):
            found.append(run(moe, case, xs[rank], ups[rank], real[rank], routes[rank]))
    (y, x, of_parameters), (y_here, x_here, of_parameters_here) = found
    errors = {"y": error(y_here, y), "x": error(x_here, x)}
    errors |= {name: error(grad, of_parameters[name]) for name, grad in of_parameters_here.items()}
    equal = {name: torch.equal(grad, of_parameters[name]) for name, grad in of_parameters_here.items()}
    everything: list = [None] * ranks
    dist.all_gather_object(everything, (errors, equal, buffer.calls))
    return {
        "case": case._asdict(),
        "errors": {name: max(each[0][name] for each in everything) for name in errors},
        "differ": sorted({name for each in everything for name, is_same in each[1].items() if not is_same}),
        "calls": sorted({" ".join(each[2]) for each in everything}),
    }


def only_arrived(moe: MoE) -> AbstractContextManager:
    """Where experts read what has not arrived, this finds it: their rows and weights are finite."""
    forward = moe.experts.forward

    def checked(x: Tensor, weights: Tensor, *others) -> Tensor:
        assert x.isfinite().all() and weights.isfinite().all(), "rows that have not arrived"
        return forward(x, weights, *others)

    return mock.patch.object(moe.experts, "forward", checked)


BOUND = 1e-2
"""Of the norm: a rank rounds the sum of what its experts compute of a token to BF16, and then the sum of all ranks."""
CALLS = {
    "none": "dispatch+ combine cached combine+",
    # A recomputation sends tokens by the handle of the first run, and no results.
    "full": "dispatch+ combine cached cached combine+",
    # It has kept the rows.
    "selective": "dispatch+ combine cached combine+",
}
"""By checkpointing: a forward and a backward of a layer."""


@pytest.fixture(scope="module", params=[2, 4])
def figures(request) -> list[dict]:
    """The row of each case of a world size."""
    rows = run_ranks(measure_cases, request.param, measure, CASES[request.param])[0]
    assert len(rows) == len(CASES[request.param])
    return rows


def test_results_and_gradients_are_those_of_the_all_to_all(figures):
    for row in figures:
        wrong = {name: error for name, error in row["errors"].items() if not error < BOUND}
        assert not wrong, row["case"]


def test_experts_and_router_get_the_bits_of_the_all_to_all(figures):
    for row in figures:
        assert row["differ"] == [], row["case"]


def test_a_recomputation_sends_only_what_it_must(figures):
    for row in figures:
        assert row["calls"] == [CALLS[row["case"]["checkpointing"]]], row["case"]
