"""Tests, scripts and the package read no file outside the checkout: a clone holds every proof."""

import ast
from pathlib import Path

import pytest

from tests.architecture import outside

ROOT = Path(__file__).parents[2]
FOLDERS = ("glm46", "scripts", "tests", "deploy")


def test_no_file_reads_outside_the_checkout():
    faults = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            place = file.relative_to(ROOT)
            faults += outside.reads_outside(ast.parse(file.read_text(encoding="utf-8")), place)
    assert faults == []


HEAD = "from pathlib import Path\n"


@pytest.mark.parametrize(
    "source",
    [
        'DATA = Path(__file__).parents[3] / "cases"',
        'DATA = Path(__file__).resolve().parents[2].parent / "shared" / "cases"',
        'ROOT = Path(__file__).parents[2]\nDATA = ROOT.parent / "cases"',
        'ROOT = Path(__file__).parents[2]\nDATA = ROOT / ".." / "cases"',
        'ROOT = Path(__file__).parents[2]\nDATA = ROOT / "../cases"',
        'ROOT = Path(__file__).parents[2]\nDATA = ROOT / "shared" / "cases"',
        'def read():\n    return (Path(__file__).parent.parent.parent.parent / "cases").read_text()',
    ],
)
def test_a_reading_outside_is_found(source):
    (fault,) = outside.reads_outside(ast.parse(HEAD + source), Path("tests/unit/test_rope.py"))
    assert fault.startswith("tests/unit/test_rope.py:")


@pytest.mark.parametrize(
    "source",
    [
        'DATA = Path(__file__).with_name("cases.json")',
        'ROOT = Path(__file__).resolve().parents[2]\nDATA = ROOT / "docs" / "rl.md"',
        'ROOT = Path(__file__).parents[2]\nDATA = ROOT / "docs" / ".." / "README.md"',
        'DATA = Path(__file__).parent / "shared"',
        'def test(tmp_path):\n    return tmp_path.parent / "shared"',
    ],
)
def test_a_reading_inside_is_allowed(source):
    assert outside.reads_outside(ast.parse(HEAD + source), Path("tests/unit/test_rope.py")) == []
