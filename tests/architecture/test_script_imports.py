"""Scripts, programs of deploy/ and notebooks name what the package has: many of them run in no other test."""

import ast
import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("scripts", "deploy", "notebooks") for path in sorted((ROOT / folder).rglob("*"))]
PROGRAMS = [path for path in FILES if path.suffix in (".py", ".ipynb")]


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
