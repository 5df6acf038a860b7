"""Tasks of a validation: refused before training where the text has no rows for them, and divided among ranks."""

import json
import sys

import pytest

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.tasks.pretrain.task import train


def test_tasks_that_the_text_cannot_serve_are_refused_at_once_before_the_first_step(make_config, tmp_path):
    tasks = [{"kind": "position", "lengths": [1000]}, {"kind": "needle", "lengths": [20]}]
    with pytest.raises(UserError) as error:
        train(make_config(validation={"enable": True, "tasks": tasks}))
    first, second = error.value.faults
    assert first.startswith("validation.tasks[0].lengths: position: a length of 1000") and "92 tokens" in first
    assert second.startswith("validation.tasks[1].lengths: needle: a length of 20") and "at least" in second
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.slow
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


STANDARD = ["glm46_next_line", "glm46_documentation", "glm46_rest_of_line"]


@pytest.mark.slow
def test_standard_tasks_are_those_of_evaluate_on_the_step_and_need_no_network(make_config, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = [{"kind": "standard", "names": STANDARD, "samples": 3, "freq": 2}]
    config = make_config(validation={"enable": True, "freq": 1, "steps": 1, "tasks": tasks}, training={"steps": 3})
    assert train(config) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    start = "validation_task/"
    found = {row["step"]: {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
             for row in rows if "validation_loss" in row}  # fmt: skip
    assert [bool(found[step]) for step in range(4)] == [True, False, True, True]
    assert found[0]["glm46_documentation/bits_per_byte"] > found[3]["glm46_documentation/bits_per_byte"]
    step, output = tmp_path / "out" / "checkpoint" / "step-000003", tmp_path / "judged"
    options = ["--tasks", ",".join(STANDARD), "--limit", "3", "--dtype", "float32", "--output", str(output)]
    assert main(["evaluate", "--checkpoint", str(step), *options]) == 0
    wanted = json.loads((output / "evaluation.json").read_text())["results"]["standard"]["columns"]
    assert found[3] == pytest.approx(wanted, rel=1e-5)  # FP32 sums in another order


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"names": ["glm46_nextline"]}, ("validation.tasks[0].names glm46_nextline", "did you mean glm46_next_line?")),
        ({"names": ["nowhere/task.yaml"]}, ("validation.tasks[0].names nowhere/task.yaml", "correct the path")),
        ({"names": ["glm46_next_line"], "fewshot": 0}, ("validation.tasks[0].names glm46_next_line", "300 positions")),
    ],
)
@pytest.mark.usefixtures("small_task_index")
def test_bad_standard_tasks_are_refused_before_the_first_step(make_config, tmp_path, keys, said):
    pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
    tasks = [{"kind": "standard", **keys}]
    with pytest.raises(UserError) as error:
        train(make_config(validation={"enable": True, "tasks": tasks}, model={"max_position_embeddings": 300}))
    (fault,) = error.value.faults
    assert all(part in fault for part in said), fault
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_lm_eval_that_is_not_installed_is_said_before_the_first_step(make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    tasks = [{"kind": "standard", "names": ["gsm8k"]}]
    with pytest.raises(UserError, match=r"validation.tasks\[0\].names gsm8k: .*pip install '.\[eval\]'"):
        train(make_config(validation={"enable": True, "tasks": tasks}))
