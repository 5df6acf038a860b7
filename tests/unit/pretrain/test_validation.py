"""Tasks of a validation: refused before training where the text has no rows for them, and divided among ranks."""

import json

import pytest

from glm46.config.errors import UserError
from glm46.pretrain.task import train


def test_tasks_that_the_text_cannot_serve_are_refused_at_once_before_the_first_step(make_config, tmp_path):
    tasks = [{"kind": "position", "lengths": [1000]}, {"kind": "needle", "lengths": [20]}]
    with pytest.raises(UserError) as error:
        train(make_config(validation={"enable": True, "tasks": tasks}))
    first, second = error.value.faults
    assert first.startswith("validation.tasks[0].lengths: position: a length of 1000") and "92 tokens" in first
    assert second.startswith("validation.tasks[1].lengths: needle: a length of 20") and "at least" in second
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_task_is_measured_at_its_own_frequency_and_at_both_ends(make_config, tmp_path):
    tasks = [
        {"kind": "position", "lengths": [30], "samples": 2},
        {"kind": "needle", "lengths": [60], "samples": 1, "freq": 2},
    ]
    validation = {"enable": True, "freq": 1, "steps": 1, "tasks": tasks}
    assert train(make_config(validation=validation, training={"steps": 3})) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "validation_loss" in row]
    assert [(row["step"], "validation_position" in row, "validation_needle" in row) for row in rows] == [
        (0, True, True), (1, True, False), (2, True, True), (3, True, True),
    ]  # fmt: skip
