"""Checks of the ranks, on one rank: numbers that are not finite, and folders that cannot be written."""

import math
from types import SimpleNamespace

import pytest
import torch

from glm46.operate.cluster import rank_checks, small_steps
from glm46.operate.cluster.rank_checks import products, shared_folder, states_folder
from glm46.operate.cluster.results import FAIL, PASS
from glm46.run.plan import resolve_plan


class OneHost:
    """A `RankGroup` of two ranks of one host, the second of which answers as the first."""

    process = SimpleNamespace(rank=0, device=torch.device("cpu"), world_size=2)
    local_ranks = 2
    hosts = ["host"]
    is_full = False
    is_gpu = False

    def gather(self, value):
        return [value, value]

    def by_host(self, values):
        return [("host", values)]

    def meet(self):
        pass

    def accelerator(self):
        return None

    def judge_speeds(self, *_):
        return []


def test_a_product_that_is_nan_is_wrong(monkeypatch):
    assert [result.verdict for result in products(OneHost())] == [PASS]
    monkeypatch.setattr(torch.Tensor, "double", lambda tensor: torch.full(tensor.shape, math.nan, dtype=torch.float64))
    [result] = products(OneHost())
    assert result.verdict == FAIL and "inf" in result.value


def test_a_folder_that_cannot_be_written_is_a_result(tmp_path, make_config):
    (tmp_path / "file").touch()
    [shared] = shared_folder(OneHost(), tmp_path / "file")
    assert shared.verdict == FAIL and "0 of 1 hosts' files seen; NotADirectoryError" in shared.value
    [states] = states_folder(OneHost(), resolve_plan(make_config(), 2), tmp_path / "none")
    assert states.verdict == FAIL and "FileNotFoundError" in states.value


@pytest.mark.parametrize(
    ("losses", "fault", "verdict"),
    [
        ([9.0, 8.9, 8.8], None, PASS),
        ([9.0, 9.0, 9.0], None, FAIL),
        ([9.0, math.nan, math.nan], None, FAIL),
        ([9.0, 8.9, 8.8], "loss or gradient norm is not finite", FAIL),
    ],
)
def test_small_steps_want_losses_that_fall_and_steps_that_are_not_skipped(losses, fault, verdict, monkeypatch):
    plan = small_steps.small_plan(None, 1)
    remaining = iter(losses)

    def step(*_, **options):
        objective = {"loss": torch.tensor(next(remaining))}
        return SimpleNamespace(main=SimpleNamespace(objective=objective), fault=fault)

    totals = SimpleNamespace(real=1, main={"targets": 1})
    monkeypatch.setattr(small_steps, "_SmallTask", lambda *_: None)
    monkeypatch.setattr(small_steps, "count_step", lambda *_: None)
    monkeypatch.setattr(small_steps, "sum_on_host", lambda _: SimpleNamespace(divided_by=lambda _: totals))
    monkeypatch.setattr(small_steps, "train_step", step)
    [result] = small_steps.small_steps(plan, None)
    assert result.verdict == verdict and (fault or "losses") in result.value


def test_the_largest_of_differences_with_nan_is_infinite():
    assert rank_checks._largest(torch.tensor([1.0, math.nan])) == math.inf
    assert rank_checks._largest(torch.tensor([1.0, -2.0])) == 2.0
