r"""Results with several parts: parse sets, lists, tuples, matrices, intervals and their unions."""

import re
from typing import NamedTuple

from glm46.storage.judge.result_values import TEXT, is_enclosed, quantity_of

_SET = re.compile(r"\\\{(.*)\\\}")

_VARIABLE = re.compile(
    r"(\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\([a-z]\))?|\([a-z](?:,\s*[a-z])+\))\s*(=|\\in(?![a-z])|\\approx(?![a-z]))\s*(.+)"
)
_CONDITION = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|:|\|)(.*)\\\}")
_MATRIX = re.compile(r"\\begin\{pmatrix\}((?:(?!\\begin).)*)\\end\{pmatrix\}")
_HOLE = re.compile(r"[a-z]\s*\\neq?(?![a-z])([^,=<>]+)|\\mathbb\{R\}\s*\\(?:setminus|backslash)\s*\\\{([^,]*)\\\}")
_BOUNDS = (
    re.compile(r"(?P<x>[a-zA-Z])\s*(?P<op><|>|\\le|\\ge)\s*(?P<right>[^<>]+)"),
    re.compile(r"(?P<left>[^<>]+?)\s*(?P<op><|>|\\le|\\ge)\s*(?P<x>[a-zA-Z])"),
    re.compile(r"(?P<left>[^<>]+?)\s*(?P<first><|\\le)\s*(?P<x>[a-zA-Z])\s*(?P<second><|\\le)\s*(?P<right>[^<>]+)"),
    re.compile(r"(?P<right>[^<>]+?)\s*(?P<second>>|\\ge)\s*(?P<x>[a-zA-Z])\s*(?P<first>>|\\ge)\s*(?P<left>[^<>]+)"),
)


class Several(NamedTuple):
    """Result with several parts."""

    brackets: str
    """Kind of the result. ``{}``: a set; empty: a list without brackets; else the brackets of a tuple or interval,
    ``∪`` or the shape of a matrix."""
    parts: list[str]


def without_variable(text: str) -> tuple[str, str]:
    """Split ``x = result``: return the variable, empty if there is none, and the result."""
    if match := re.fullmatch(r"([^=A-Za-z\\<>]*\d)\s*=\s*([a-zA-Z])", text):
        return match[2], match[1]
    if (match := _VARIABLE.fullmatch(text)) and "=" not in match[3]:
        return (match[1] if match[2] != r"\approx" else "", match[3].strip())
    left_side, sign, right_side = text.rpartition("=")
    # The result of a true equation of numbers is its right side.
    left_quantity = quantity_of(left_side.strip())
    right_quantity = quantity_of(right_side.strip())
    if left_quantity and right_quantity and left_quantity.value != right_quantity.value:
        return "", text
    return (
        "",
        right_side.strip() if sign and not re.search(r"[A-Za-z<>]", re.sub(r"\\[a-z]+", "", left_side)) else text,
    )


def several_of(text: str) -> Several | None:
    """Return the parts of a normalised result; None for a single result."""
    plain = " ".join(text.replace(TEXT, " ").split())
    if match := _CONDITION.fullmatch(plain):
        plain = match[1].strip()
    if match := _SET.fullmatch(plain):
        return Several("{}", _split(match[1]))
    if match := _MATRIX.fullmatch(plain):
        rows = [row.split("&") for row in match[1].split(r"\\") if row.strip()]
        return Several(f"matrix {[len(row) for row in rows]}", [cell.strip() for row in rows for cell in row])
    if match := _HOLE.fullmatch(plain):
        bound = (match[1] or match[2]).strip()
        return Several("∪", [rf"(-\infty, {bound})", rf"({bound}, \infty)"])
    pieces = [part.strip() for part in re.split(r"\\cup(?![a-z])|(?<![A-Za-z])or(?![A-Za-z])", plain)]
    is_union = r"\cup" in plain or any(map(bounds_of, pieces))
    if (
        is_union
        and len(pieces) > 1
        and all(bounds_of(piece) or re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", piece) for piece in pieces)
    ):
        return Several("∪", pieces)
    if bounds := bounds_of(plain):
        return bounds[1]
    if plain[:1] in ("(", "[") and plain[-1:] in (")", "]") and is_enclosed(plain):
        parts = _split(plain[1:-1])
        rows = [_split(part[1:-1]) for part in parts if re.fullmatch(r"\[[^\[\]]*\]", part)] if plain[0] == "[" else []
        if rows and len(rows) == len(parts):
            return Several(f"matrix {[len(row) for row in rows]}", [cell for row in rows for cell in row])
        return Several(plain[0] + plain[-1], parts) if len(parts) > 1 else None
    parts = _split(plain)
    if len(parts) < 2:
        return None
    variables = {without_variable(part)[0] for part in parts}
    return Several("", [without_variable(part)[1] for part in parts] if len(variables) == 1 else parts)


def bounds_of(text: str) -> tuple[str, Several] | None:
    """Return a variable and the interval within its bounds, which may be one bound, two-sided, or joined by "and" or a
    comma."""
    bounds = []
    variables = set()
    for piece in re.split(r",(?=[^,]*(?:[<>]|\\[lg]e))|;|\\land(?![a-z])|(?<![A-Za-z])and(?![A-Za-z])", text):
        for form in _BOUNDS:
            if match := form.fullmatch(piece.strip()):
                break
        else:
            return None
        part = match.groupdict()
        variables.add(part["x"])
        if "first" in part:
            bounds += [(True, part["left"], part["first"]), (False, part["right"], part["second"])]
        else:
            is_upper = (part["op"] in ("<", r"\le")) == ("right" in part)
            bounds.append((not is_upper, part.get("right") or part.get("left"), part["op"]))
    sides = [
        [(bound.strip(), sign in "<>") for is_lower, bound, sign in bounds if is_lower is side]
        for side in (True, False)
    ]
    lowest = _tightest(sides[0], 1, r"-\infty")
    highest = _tightest(sides[1], -1, r"\infty")
    if len(variables) > 1 or lowest is None or highest is None:
        return None
    lower, is_open = lowest
    upper, is_below = highest
    minimum = quantity_of(lower)
    maximum = quantity_of(upper)
    if minimum and maximum and minimum.value > maximum.value:
        return None
    return variables.pop(), Several(("(" if is_open else "[") + (")" if is_below else "]"), [lower, upper])


def _tightest(bounds: list[tuple[str, bool]], sign: int, infinity: str) -> tuple[str, bool] | None:
    """Return the tightest of several bounds, and whether it is open; None if they cannot be compared.

    Args:
        sign: 1 for lower bounds, -1 for upper ones.
        infinity: result if there is no bound.
    """
    if len(bounds) < 2:
        return bounds[0] if bounds else (infinity, True)
    numbers = [number for bound, _ in bounds if (number := quantity_of(bound))]
    if len(numbers) < len(bounds):
        return None
    return max(zip(numbers, bounds, strict=True), key=lambda pair: (sign * pair[0].value, pair[1][1]))[1]


def _split(text: str) -> list[str]:
    """Return the parts between commas, "or" and "and" outside of all brackets, and both values of a double sign. If
    some comma is followed by a space, commas without one belong to numbers."""
    comma = r",\s" if re.search(r",\s", text) else ","
    parts = []
    depth = 0
    start = 0
    for match in re.finditer(rf"\\?[(\[{{]|\\?[)\]}}]|{comma}|;|(?<![A-Za-z])(?:or|and)(?![A-Za-z])", text):
        if match[0][-1] in "([{":
            depth += 1
        elif match[0][-1] in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    alternatives = [part.replace(r"\pm", sign).strip() for part in (*parts, text[start:]) for sign in "+-"]
    return [part for part in dict.fromkeys(alternatives) if part]
