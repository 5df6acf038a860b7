"""Tests, scripts and the package read no file outside the checkout: a clone holds every proof.

Scripts, programs of deploy/ and notebooks name what the package has: many of them run in no other test.
"""

import ast
import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
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


FILES = [path for folder in ("scripts", "deploy", "notebooks") for path in sorted((ROOT / folder).rglob("*"))]
PROGRAMS = [path for path in FILES if path.suffix in (".py", ".ipynb")]
SCRIPTS = [path for path in PROGRAMS if path.suffix == ".py"]


def sources(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield text
        return
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":  # without commands of the shell
            yield "".join(line for line in cell["source"] if not line.startswith(("!", "%")))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_package_exist(path):
    for node in (node for text in sources(path) for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "glm46":
            module = import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), (node.module, name.name)


def named_paths(path: Path) -> dict[str, Path]:
    """Paths that a script builds from its own file, by their expressions: its root, and those that it knows before it
    runs."""
    known: dict[str, Path] = {}
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_insert = isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.path.insert"
        if not (is_insert or isinstance(node, ast.Assign | ast.BinOp)):
            continue
        value = node.args[1] if is_insert else node.value if isinstance(node, ast.Assign) else node
        names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
        calls = {ast.unparse(part.func).split(".")[-1] for part in ast.walk(value) if isinstance(part, ast.Call)}
        is_from_file = names & {"__file__", *known} and names <= {"__file__", "Path", "str", *known}
        if not is_from_file or not calls <= {"Path", "resolve", "str"}:
            continue
        built = eval(ast.unparse(value), {"Path": Path, "__file__": str(path), **known})
        if isinstance(built, Path | str):  # no list of arguments
            found[ast.unparse(node)] = Path(built)
            known |= {ast.unparse(node.targets[0]): Path(built)} if isinstance(node, ast.Assign) else {}
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_from_a_script_lead_to_the_root_and_to_files(path):
    """A script that moved to another folder has another way to the root."""
    for expression, built in named_paths(path).items():
        if expression.startswith(("ROOT = ", "sys.path.insert")):
            assert built == ROOT, expression
        inside = built.relative_to(ROOT)  # raises for a path outside the project
        is_there = built.exists() or any(built.parent.glob(f"{built.name}.*"))  # some names have no ending yet
        assert is_there or inside.parts[0] == "outputs", expression


def test_paths_of_scripts_are_found():
    found = [named_paths(path) for path in SCRIPTS]
    roots = [name for paths in found for name in paths if name.startswith(("ROOT = ", "sys.path.insert"))]
    assert len(roots) > 20 and sum(map(len, found)) > len(roots) + 10
