"""The types of the package are checked, and the rooms that are not may only become fewer."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import house

ROOT = Path(__file__).parents[2]
MOST_EXCEPTIONS = 1
"""Rooms whose errors of type are not shown. It may only fall."""
CHECKED = {*house.COURT, "config", "files", "compat", "operate/estimate"} | {
    room for room in house.LAYERS if "compute/" in room
}


def exceptions() -> list[str]:
    """Rooms that [tool.mypy] in pyproject.toml leaves out."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (left_out,) = re.findall(
        r"^\[\[tool.mypy.overrides\]\]\nmodule = \[\n(.*?)\]\nignore_errors = true\n", text, re.M | re.S
    )
    patterns = re.findall(r'"(.*?)"', left_out)
    return [pattern.removeprefix("glm46.").removesuffix(".*").replace(".", "/") for pattern in patterns]


def test_fewer_and_fewer_rooms_are_left_out():
    rooms = exceptions()
    assert len(rooms) <= MOST_EXCEPTIONS and set(rooms) <= house.LAYERS.keys(), "a room is one line, and none is added"
    # `compute` in the list would leave out `compute/model` too.
    parts = {part for room in CHECKED for part in (room, room.partition("/")[0])}
    assert not parts & set(rooms), "the trainer is checked as a whole"


def test_a_checker_that_is_told_to_look_away_says_why():
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted((ROOT / "glm46").rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if "# type: ignore" in line
    ]
    bare = [
        line for line in lines if "# type: ignore[" not in line or "]  # " not in line.rpartition("# type: ignore")[2]
    ]
    assert not bare, "name the error and the reason: # type: ignore[code]  # reason"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_finds_no_error(tmp_path):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
