"""The types of the whole package are checked: no package is excluded."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_room_is_left_out():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (rules,) = re.findall(r"^\[tool\.mypy\]\n(.*?)^\[", text, re.M | re.S)
    assert 'packages = ["glm46"]' in rules and "strict = true" in rules
    rules = rules.replace('untyped_calls_exclude = ["torch"]', "")  # calls of torch, whose types are not ours
    looser = re.findall(r"exclude|ignore_errors|follow_imports|disable_error_code|= false", rules)
    assert not looser and "tool.mypy.overrides" not in text, "each package is checked, and by the same rules"
    files = [str(file) for file in (ROOT / "glm46").rglob("*.py") if "# mypy:" in file.read_text(encoding="utf-8")]
    assert not files, "no file has rules of its own"


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
