"""The rehearsal of recovery: runs of the small model, and a run that cannot begin."""

from dataclasses import replace

import pytest

from glm46.operate.cluster import recovery
from glm46.operate.cluster.results import FAIL, PASS, SKIP, Subject
from glm46.operate.estimate.machine import detect_machine

HERE = Subject(machine=detect_machine(), processes=2, is_full=True)


def test_it_is_rehearsed_on_the_first_host_and_by_full_alone():
    assert [result.verdict for result in recovery.recovery(replace(HERE, is_full=False))] == [SKIP]
    assert list(recovery.recovery(replace(HERE, node=1))) == []


@pytest.mark.long
def test_a_stopped_run_that_loses_a_rank_has_the_losses_of_an_undisturbed_one():
    (result,) = recovery.recovery(HERE)
    assert result.verdict == PASS and "16 losses within 0e+00" in result.value, result


@pytest.mark.slow
def test_a_run_that_cannot_begin_is_a_failure_with_its_message(monkeypatch):
    monkeypatch.setattr(recovery, "_CONFIG", recovery._CONFIG.replace("seq_len = 64", "seq_len = 0"))
    (result,) = recovery.recovery(HERE)
    assert result.verdict == FAIL and "exit code 2, expected 0" in result.value and "training.seq_len" in result.value
