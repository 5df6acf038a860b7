"""On each rank: one MoE layer whose tokens travel by a fake of DeepEP, beside the all-to-all and beside one process.

Prints one JSON object per case: the largest errors, the gradients that are not equal bit for bit, and DeepEP's calls.
"""

from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.process import Process
from glm46.compute.model.moe import MoE
from glm46.compute.parallelize.deepep import DeepEPDispatcher
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from tests.ranks.fake_deep_ep import ElasticBuffer
from tests.ranks.forked_ranks import print_figures
from tests.ranks.two_levels import CHOSEN, TOKENS, WIDTH, Case, error, example, run, split


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


def main() -> None:
    """Measure all cases of this world size."""
    print_figures(CASES, measure)
