"""Finds paths that lead out of the checkout."""

import ast
from pathlib import Path, PurePosixPath

_SAME_PLACE = {"resolve", "absolute"}
_UNTRACKED = "shared"
"""A folder at the top that lies next to some checkouts and is no part of the project."""


def reads_outside(tree: ast.Module, file: Path) -> list[str]:
    """Lines of a source file with a path outside the checkout; ``file`` is relative to its top."""
    names: dict[str, list[str] | None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = _place(node.value, file, names)
    lines: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and _is_outside(_place(node, file, names)):
            lines.setdefault(node.lineno, f"{file}:{node.lineno}: a path outside the checkout")
    return list(lines.values())


def _is_outside(place: list[str] | None) -> bool:
    return place is not None and place[:1] in ([".."], [_UNTRACKED])


def _place(node: ast.expr, file: Path, names: dict[str, list[str] | None]) -> list[str] | None:
    """The parts of a path that starts at ``__file__``, relative to the top; None for any other expression. The first
    part is ``..`` if it is outside."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Call):
        return _place_of_call(node, file, names)
    if isinstance(node, ast.Attribute) and node.attr == "parent":
        return _climb(_place(node.value, file, names), 1)
    if isinstance(node, ast.Subscript):
        return _place_of_parents(node, file, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        place = _place(node.left, file, names)
        if place is not None and isinstance(node.right, ast.Constant) and isinstance(node.right.value, str):
            return _descend(place, node.right.value)
    return None


def _place_of_parents(node: ast.Subscript, file: Path, names: dict[str, list[str] | None]) -> list[str] | None:
    """The place of ``path.parents[number]``."""
    is_parents = isinstance(node.value, ast.Attribute) and node.value.attr == "parents"
    if not (is_parents and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)):
        return None
    return _climb(_place(node.value.value, file, names), node.slice.value + 1)


def _place_of_call(node: ast.Call, file: Path, names: dict[str, list[str] | None]) -> list[str] | None:
    """The place of ``Path(__file__)``, or of a method that changes no folder."""
    if isinstance(node.func, ast.Name) and node.func.id == "Path" and node.args:
        argument = node.args[0]
        is_file = isinstance(argument, ast.Name) and argument.id == "__file__"
        return list(file.parts) if is_file else None
    if isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_PLACE:
        return _place(node.func.value, file, names)
    return None


def _climb(place: list[str] | None, levels: int) -> list[str] | None:
    """The folder that many levels up."""
    for _ in range(levels if place is not None else 0):
        place = place[:-1] if place and place[-1] != ".." else ["..", *place]
    return place


def _descend(place: list[str], path: str) -> list[str]:
    """A path below a folder."""
    for part in PurePosixPath(path).parts:
        place = (_climb(place, 1) or []) if part == ".." else [*place, part]
    return place
