"""Ranks that agree: the same numbers on all of them, and an end within the timeout while one of them is away."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from glm46.compute.distributed.agreement import awaited, combine_on_host
from glm46.engine.observe.rank_spread import spread_over_ranks
from glm46.engine.training.rank_sums import sum_on_host
from tests.harness import run_ranks, this_rank
from tests.processes import HANG_SECONDS, wait_until

RANKS, VICTIM, TIMEOUT = 6, 5, 30.0
"""The victim is a child of rank 4, which is one of rank 0."""
FAULTS = ("dead", pytest.param("late", marks=pytest.mark.thorough))  # the latter waits for the timeout
NAMES = ["a", "b", "c"]


def values(rank: int) -> dict[str, float]:
    """Of a rank; one name that only some ranks have, and one that none has."""
    return {"a": float(rank % 4)} | ({"b": -rank / 3} if rank in (1, 4) else {})


def agree(fault: str, folder: Path) -> dict:
    """On each rank: agree once with all ranks, and once more while the victim is away."""
    rank = this_rank()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT))
    found = {"sums": sum_on_host({"x": [rank, 1]})}
    found["spread"] = spread_over_ranks(values(rank), NAMES)
    if rank == VICTIM:
        if fault == "dead":
            os._exit(0)
        others = [folder / f"{fault} {other}" for other in range(RANKS) if other != VICTIM]
        wait_until(lambda: all(file.exists() for file in others))
    began = time.monotonic()
    try:
        combine_on_host(torch.zeros(1))
    except RuntimeError as error:
        found |= {"error": str(error), "awaited": list(awaited)}
    seconds = time.monotonic() - began
    folder.joinpath(f"{fault} {rank}").touch()
    return found | {"seconds": seconds}  # its connections are not closed in order


@pytest.fixture(scope="module", params=FAULTS)
def fault(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(fault, tmp_path_factory) -> list[dict]:
    """What the ranks found that returned; all of them must end with 0."""
    results = run_ranks(agree, RANKS, fault, tmp_path_factory.mktemp("agreements"))
    return [row for row in results if row is not None]


def test_sums_and_spreads_are_those_of_all_ranks(rows):
    spread = {}
    for name in NAMES:
        of_ranks = {rank: values(rank)[name] for rank in range(RANKS) if name in values(rank)}
        if of_ranks:
            least, most = min(of_ranks.values()), max(of_ranks.values())
            spread |= {
                f"{name}/min": least,
                f"{name}/mean": sum(of_ranks.values()) / len(of_ranks),
                f"{name}/max": most,
            }
            for part, extreme in (("min", least), ("max", most)):
                last = max(rank for rank, value in of_ranks.items() if value == extreme)
                spread[f"extreme_rank/{name}/{part}"] = last
    assert len(rows) >= RANKS - 1
    for row in rows:
        assert row["sums"] == {"x": [sum(range(RANKS)), RANKS]}
        assert row["spread"].keys() == spread.keys()
        assert row["spread"] == pytest.approx(spread, rel=1e-15)


def test_a_rank_that_is_away_ends_the_others_within_the_timeout(rows, fault):
    waiting = [row for row in rows if "error" in row]
    assert len(waiting) >= RANKS - 1
    assert all(row["seconds"] < HANG_SECONDS for row in waiting)  # without a timeout they wait for half an hour
    assert waiting[4]["awaited"] == [VICTIM]
    if fault == "late":
        assert "Timed out waiting" in waiting[4]["error"]
