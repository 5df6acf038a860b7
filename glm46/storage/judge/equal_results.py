r"""Comparison of mathematical results: as numbers, quantities, words, sets, tuples and intervals, else by math-verify,
else as text.

math-verify parses ``4 1/5``, ``1.5e3``, units and words as products, so it compares only the rest: expressions.
"""

import re
import threading
from fractions import Fraction
from importlib import metadata
from typing import TYPE_CHECKING

from glm46.storage.judge.result_sets import Several, bounds_of, several_of, without_variable
from glm46.storage.judge.result_values import (
    LONGEST,
    TEXT,
    has_words,
    quantity_of,
    same_quantity,
    spelled,
    without_unit,
    words_of,
)
from glm46.storage.judge.units import ratio_of

if TYPE_CHECKING:
    from glm46.storage.judge.math_verify_calls import MathVerify

_LETTER = r"(?<![a-zA-Z\\]){}(?![a-zA-Z])"
_LETTERS = re.compile(r"(?<=\d) (?=[A-Za-z])")
"""Space before letters that count as a unit if the other result has a unit."""
_RELATION = re.compile(r"[=<>]|\\(?:to|rightarrow|le|ge|ne|neq)(?![a-z])")
_DETERMINANT = re.compile(
    r"\\begin\{vmatrix\}((?:(?!\\begin|\\\\).)*?)&((?:(?!&|\\begin).)*?)\\\\((?:(?!\\begin|\\\\).)*?)&((?:(?!&|\\begin|\\\\).)*?)\\end\{vmatrix\}"
)
_PART = re.compile(r"(?<![\d.,])\d*\.\d+(?![\d.,])")
_INTEGERS = re.compile(rf"(.+?),?\s*(?:{TEXT}?\s*(?:for|where)\s)?([a-z])\s*\\in\s*(\\mathbb\s*\{{?\s*[NZ]\s*\}}?)")
"""Family of results, one for each integer."""
_IGNORED = re.compile(
    r"'|(?<!matrix\})\^\s*\{?\s*(?:T|\*|\\top|\\prime)|\.\.|…|\\[lc]?dots|\d\s*_\s*\{?\s*(\w+)|\\[pb]?mod|\d(?:st|nd|rd|th)\b"
)
"""Primes, bases, dots and similar marks, which math-verify ignores: results differ unless both have the same."""
_TOO_LARGE = re.compile(r"\^\s*\{?\s*-?\d{4,}|\d{4,}\s*!|!\s*!|\^\s*\{[^{}]*\^|\d\s*\^\s*\{?\s*\{?\d+\s*\}?\s*\^")


def same_answer(result: str, other: str, seconds: int = 3) -> bool:
    """Return whether two results are equal, including as expressions.

    Args:
        seconds: time limit of each of the three calls of math-verify. It uses SIGALRM, so the limit works only in the
            main thread.
    """
    first = spelled(result)
    second = spelled(other)
    if not first or _tight(first) == _tight(second):
        return bool(first)
    if max(len(first), len(second)) > LONGEST:
        return False
    is_equal = _compared(first, second)
    if is_equal is not None:
        return is_equal
    first, unit = without_unit(first)
    second, other_unit = without_unit(second)
    ratio = ratio_of(unit, other_unit) if unit and other_unit else 1
    if not ratio or has_words(f"{first} {second}"):
        return False
    family = _INTEGERS.fullmatch(first)
    other_family = _INTEGERS.fullmatch(second)
    if family and other_family and family[3] == other_family[3]:
        second = re.sub(_LETTER.format(other_family[2]), family[2], other_family[1])
        first = family[1]
    if _IGNORED.findall(first) != _IGNORED.findall(second):
        return False
    # A relation is not a result, although math-verify would take its right side.
    is_about = [bool(_RELATION.search(without_variable(text)[1])) for text in (first, second)]
    if is_about[0] != is_about[1] and not (_RELATION.search(first) and _RELATION.search(second)):
        return False
    first = first if ratio == 1 else rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}({first})"
    return bool(_verified(first, second, seconds))


def result_fault(result: str) -> str | None:
    """Return the fault of a reference answer that could only match as identical text; None if there is no fault."""
    text = spelled(result)
    if not re.search(r"\w|\\emptyset|\\infty", text):
        return "states nothing"
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            break
    if depth:
        return "its braces do not match"
    if quantity_of(text) or several_of(text) or has_words(text) or len(text) == 1:
        return None
    library = load_math_verify()
    if library is None or len(text) > LONGEST or _TOO_LARGE.search(text):
        return None
    parsed = library.parse(_expression(text), _limit(3))
    return None if any(not isinstance(part, str) for part in parsed) else "is no expression that can be read"


def _tight(text: str) -> str:
    """Remove spaces that do not separate words or numbers."""
    return re.sub(r"(?<=[^\w,])\s+|\s+(?=\W)", "", " ".join(text.replace(TEXT, " ").split()))


def _compared(result: str, other: str) -> bool | None:
    """Compare two normalised results; None if undecided (math-verify decides)."""
    x, result = without_variable(result)
    y, other = without_variable(other)
    x = x or _variable_of_bounds(result)
    y = y or _variable_of_bounds(other)
    if x and y and x != y:
        return None if _has_variable(y, result) and _has_variable(x, other) else False
    if result == other:
        return True
    first = quantity_of(result)
    second = quantity_of(other)
    if first and second is None and first.unit:
        second = quantity_of(_LETTERS.sub(rf" {TEXT}", other))
    if second and first is None and second.unit:
        first = quantity_of(_LETTERS.sub(rf" {TEXT}", result))
    if first is not None and second is not None:
        return same_quantity(first, second)
    words = [words_of(result), words_of(other)]
    if None not in words:
        return words[0] == words[1]
    several = several_of(result)
    other_several = several_of(other)
    if several and other_several:
        return _same_several(several, other_several)
    if part := several or other_several:
        single = other if several else result
        if words_of(single) is None and quantity_of(single) is None:
            return None
        return part.brackets in ("", "{}") and all(_compared(result, single) for result in part.parts)
    if any(words) and (first or second):
        return False
    return None


def _variable_of_bounds(text: str) -> str:
    bounds = bounds_of(text)
    return "" if bounds is None else bounds[0]


def _has_variable(variable: str, text: str) -> bool:
    return re.search(_LETTER.format(re.escape(variable)), text) is not None


def _same_several(first: Several, second: Several) -> bool | None:
    kinds = {first.brackets, second.brackets}
    if kinds <= {"", "{}"} or kinds == {"∪"}:
        pairs = [[_compared(a, b) for b in second.parts] for a in first.parts]
        if all(any(row) for row in pairs) and all(any(column) for column in zip(*pairs, strict=True)):
            return True
        return None if any(is_equal is None for row in pairs for is_equal in row) else False
    if kinds == {"", "()"}:
        first = _without_variables(first)
        second = _without_variables(second)
    elif len(kinds) > 1:
        return False if "" not in kinds and "{}" not in kinds else None
    if len(first.parts) != len(second.parts):
        return False
    are_equal = [_compared(*pair) for pair in zip(first.parts, second.parts, strict=True)]
    if all(are_equal):
        return True
    return None if False not in are_equal else False


def _without_variables(several: Several) -> Several:
    return several._replace(parts=[without_variable(part)[1] for part in several.parts])


def _expression(text: str) -> str:
    """Return a normalised result as input for math-verify: numbers as fractions, because it rounds decimals, and
    several results as a set."""
    quantity = quantity_of(text)
    if quantity is not None and not quantity.unit:
        value = quantity.value
        return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    several = several_of(text)
    if several is not None and several.brackets in ("", "{}"):
        return rf"\{{{', '.join(several.parts)}\}}"
    text = _DETERMINANT.sub(r"((\1)\\cdot(\4)-(\2)\\cdot(\3))", text.replace(TEXT, " "))
    return _PART.sub(lambda match: "{{\\frac{{{}}}{{{}}}}}".format(*Fraction(match[0]).as_integer_ratio()), text)


def _verified(result: str, other: str, seconds: int) -> bool | None:
    """Return True if math-verify reports two results as equal; None if it is not installed or cannot parse one of
    them."""
    library = load_math_verify()
    if library is None or _TOO_LARGE.search(f"{result} | {other}"):
        return None
    return library.are_equal(_expression(result), _expression(other), _limit(seconds))


def math_verify_version() -> str | None:
    """Return the version of math-verify; None where it is not installed."""
    try:
        return metadata.version("math-verify")
    except metadata.PackageNotFoundError:
        return None


def load_math_verify() -> "MathVerify | None":
    """Return the library; None where it is not installed. The first call may take seconds."""
    try:
        from glm46.storage.judge.math_verify_calls import MathVerify  # optional: the extra [rl]
    except ImportError:
        return None
    return MathVerify()


def _limit(seconds: int) -> int | None:
    return seconds if threading.current_thread() is threading.main_thread() else None
