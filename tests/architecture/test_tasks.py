"""The engine and the devices know no task: what differs is a trait of `Task` or an argument."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "glm46"
OF_TASKS = {"rl", "rollout", "finetune", "preference"}


@pytest.mark.parametrize("package", ["engine/training", "engine/reliability", "engine/observe", "compute"])
def test_a_package_below_the_tasks_asks_for_none(package):
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in OF_TASKS and ast.unparse(node.value).endswith("config")
    ]
    assert found == []


def test_the_sections_of_tasks_are_those_of_the_config():
    tree = ast.parse((PACKAGE / "config" / "run_config.py").read_text(encoding="utf-8"))
    nodes = [node for owner in tree.body if isinstance(owner, ast.ClassDef) and owner.name == "RunConfig"
             for node in owner.body]  # fmt: skip
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert fields | {node.name for node in nodes if isinstance(node, ast.FunctionDef)} >= OF_TASKS
