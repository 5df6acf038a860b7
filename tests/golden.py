"""Golden files: what a program prints, stored whole under tests/golden and compared line by line.

    ./scripts/run_tests.sh tests/unit/commands --update-golden

writes them anew; the difference is then read in `git diff`. A test replaces what differs between machines (paths,
times, versions) before it compares.
"""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares a text with the golden file of this name, such as ``"plan/debug"``."""

    def compare(name: str, text: str) -> None:
        file = FOLDER / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        stored = file.read_text() if file.exists() else ""
        if text == stored:
            return
        label = os.path.relpath(file, FOLDER.parent.parent)
        difference = difflib.unified_diff(stored.splitlines(), text.splitlines(), label, "now", lineterm="")
        pytest.fail("\n".join([*difference, "Run with --update-golden if this is meant."]), pytrace=False)

    return compare
