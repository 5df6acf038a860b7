"""The tasks for coding agents can be solved, and their checks refuse what is no answer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from tests.agent_tasks.check import CHECKS, fault_of

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "agent_tasks"
TASKS = {task["name"]: task["text"] for task in tomli.loads((FOLDER / "tasks.toml").read_text("utf-8"))["tasks"]}
ANSWERS = tomli.loads(Path(__file__).with_name("agent_answers.toml").read_text(encoding="utf-8"))
IN_THE_PACKAGE = [name for name, files in ANSWERS.items() if any(file.startswith("glm46/") for file in files)]


def test_every_task_has_a_check_and_an_answer():
    assert len(TASKS) == 10 and TASKS.keys() == CHECKS.keys() == ANSWERS.keys()
    for name, files in ANSWERS.items():
        stated = [file for file in files if not file.startswith("glm46/")]
        assert all(file in TASKS[name] for file in stated), name


@pytest.mark.parametrize("name", CHECKS)
def test_no_answer_does_not_pass(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    fault = fault_of(name, tmp_path)
    assert fault is not None and "\n" not in fault


def rows(names: list[str], quick: str) -> list:
    """The names as rows; all except one are thorough, because they plan, convert or load the package again."""
    first = sorted(names, key=lambda name: name != quick)
    return [pytest.param(name, marks=() if name == quick else pytest.mark.thorough) for name in first]


@pytest.mark.slow
@pytest.mark.parametrize("name", rows([name for name in CHECKS if name not in IN_THE_PACKAGE], "environment"))
def test_an_answer_in_files_passes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for file, answer in ANSWERS[name].items():
        text = answer.get("text", (FOLDER / "broken.toml").read_text(encoding="utf-8"))
        for old, new in answer.get("replace", ()):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert fault_of(name, tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", rows(IN_THE_PACKAGE, "loss"))
def test_an_answer_in_the_package_passes(name, tmp_path):
    shutil.copytree(ROOT / "glm46", tmp_path / "glm46", ignore=shutil.ignore_patterns("__pycache__"))
    ((file, answer),) = ANSWERS[name].items()
    text = (tmp_path / file).read_text(encoding="utf-8")
    before, line, rest = text.partition(answer["after"]) if "after" in answer else (text, "", "")
    (tmp_path / file).write_text(before + line + answer["text"] + rest, encoding="utf-8")
    command = [sys.executable, FOLDER / "check.py", name]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"{name}: solved\n"), run.stderr
