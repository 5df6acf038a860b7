"""The rehearsal of recovery: runs of the small model, and a run that cannot begin."""

import pytest

from glm46.operate.cluster import recovery
from glm46.operate.cluster.results import FAIL, PASS


@pytest.mark.long
def test_a_run_that_loses_a_rank_has_the_losses_of_an_undisturbed_one():
    result = recovery.recovery(2, has_gpu=False)
    assert result.status == PASS and "16 losses within 0e+00" in result.value, result


@pytest.mark.slow
def test_a_run_that_cannot_begin_is_a_failure_with_its_message(monkeypatch):
    monkeypatch.setattr(recovery, "_CONFIG", recovery._CONFIG.replace("seq_len = 64", "seq_len = 0"))
    result = recovery.recovery(2, has_gpu=False)
    assert result.status == FAIL and "exit code 2" in result.value and "training.seq_len" in result.value


@pytest.mark.parametrize(
    ("losses", "status"),
    [({1: 9.0, 16: 8.0}, FAIL), ({step: 9.0 for step in range(1, 17)}, PASS)],
    ids=["steps are missing", "equal"],
)
def test_all_losses_must_be_there_and_equal(losses, status, monkeypatch):
    expected = {step: 9.0 for step in range(1, 17)}
    monkeypatch.setattr(recovery, "_train", lambda _, name, __, killed_at=None: losses if killed_at else expected)
    assert recovery.recovery(2, has_gpu=False).status == status
    changed = expected | {16: float("nan")}
    monkeypatch.setattr(recovery, "_train", lambda _, name, __, killed_at=None: changed if killed_at else expected)
    assert recovery.recovery(2, has_gpu=True).status == FAIL
