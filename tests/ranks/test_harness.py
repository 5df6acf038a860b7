"""The harness of ranks: values, errors, hangs, variables, cases."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from glm46.compute.distributed.process import join, leave
from tests.harness import Cases, Ranks, call, in_halves, run_ranks, start, this_rank


def sum_of(tensor: torch.Tensor) -> dict:
    """The sum over ranks of a tensor of the test."""
    process = join(300)
    summed = tensor * (process.rank + 1)
    dist.all_reduce(summed)
    leave()
    return {"rank": this_rank(), "sum": summed, "threads": torch.get_num_threads(), "pid": os.getpid()}


def fail_on_one(rank: int) -> None:
    join(300)
    if this_rank() == rank:
        raise ValueError("the planted fault")
    dist.barrier()


def hang_on_one(rank: int) -> None:
    if this_rank() == rank:
        time.sleep(1000)


def exit_with(code: int | str) -> None:
    raise SystemExit(code)


def change_all() -> None:
    """What would disturb the next function of a process that both share."""
    os.environ["OF_THE_FIRST_FUNCTION"] = "1"
    torch.set_default_dtype(torch.float64)
    join(300)


def state() -> tuple:
    return os.environ.get("OF_THE_FIRST_FUNCTION"), os.environ.get("OF_THE_TEST"), torch.get_default_dtype()


def kill_and_start_again() -> list:
    """A program that starts ranks twice."""
    killed = Ranks(2, time.sleep, 1000)
    os.kill(killed.pids[1], signal.SIGKILL)
    codes = killed.wait(patience=0.0)
    return [codes, Ranks(2, this_rank).results(), in_halves(range(5), lambda item: Ranks(1, lambda: item).results())]


def square(names: list[str], offset: int):
    process = join(300)
    for name in names:
        assert name != "bad", "of a case"
        yield offset + process.world_size * int(name) ** 2
    leave()


def offset_of(names: list[str], world_size: int, folder) -> int:
    assert not list(folder.iterdir())
    return 100 * len(names)


def test_each_rank_returns_its_value():
    rows = run_ranks(sum_of, 2, torch.arange(3))
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(torch.equal(row["sum"], 3 * torch.arange(3)) for row in rows)
    assert [row["threads"] for row in rows] == [1, 1]
    assert len({os.getpid(), *(row["pid"] for row in rows)}) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_the_traceback_of_the_rank_that_failed_comes_first(rank):
    with pytest.raises(AssertionError) as raised:
        run_ranks(fail_on_one, 2, rank)
    text = str(raised.value)
    assert "in fail_on_one" in text and text.index(f"rank {rank}:") < text.index("ValueError: the planted fault")
    assert text.index("ValueError: the planted fault") < text.index(f"rank {1 - rank}:")


def test_a_hang_ends_at_the_deadline_with_its_stack():
    with pytest.raises(AssertionError, match="no end of ranks") as raised:
        run_ranks(hang_on_one, 2, 1, deadline=4.0)
    assert "in hang_on_one" in str(raised.value)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (7, 7), ("a message", 1)])
def test_an_exit_code_is_that_of_the_program(code, expected):
    program = start(exit_with, code)
    assert program.wait() == expected
    assert ("a message" in program.output.read_text()) == (code == "a message")


def test_nothing_leaks_into_the_next_function(monkeypatch):
    monkeypatch.setenv("OF_THE_TEST", "2")
    run_ranks(change_all, 2)
    assert run_ranks(state, 2) == [(None, "2", torch.float32)] * 2
    assert call(state, environment={"OF_THE_TEST": "3"}) == (None, "3", torch.float32)
    monkeypatch.delenv("OF_THE_TEST")
    assert call(state) == (None, None, torch.float32)
    assert "OF_THE_FIRST_FUNCTION" not in os.environ


def test_a_program_kills_ranks_and_starts_others():
    assert call(kill_and_start_again) == [[-9, -9], [0, 1], [[0], [1], [2], [3], [4]]]


def test_a_case_that_fails_does_not_end_the_others():
    cases = Cases(square, 2, ["1", "2", "bad", "3"], offset_of, at_once=4)
    assert [cases.row(name) for name in ("3", "2", "1")] == [418, 408, 402]
    with pytest.raises(AssertionError, match="AssertionError: of a case"):
        cases.row("bad")
    cases.close()
