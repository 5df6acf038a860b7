r"""The judge of mathematical results: equal as numbers, quantities, words, sets, tuples and intervals, else by
math-verify, else as text.

math-verify reads ``4 1/5``, ``1.5e3``, units and words as products, so that it is asked about the rest: expressions.
"""

import re
import threading
from dataclasses import replace
from fractions import Fraction
from importlib import metadata

from glm46.storage.prepare.result_sets import Several, bounds_of, several_of, without_variable
from glm46.storage.prepare.result_values import (
    LONGEST,
    TEXT,
    has_words,
    quantity_of,
    same_quantity,
    spelled,
    without_unit,
    words_of,
)
from glm46.storage.prepare.units import ratio_of

_LETTER = r"(?<![a-zA-Z\\]){}(?![a-zA-Z])"
_LETTERS = re.compile(r"(?<=\d) (?=[A-Za-z])")
"""Before letters that are a unit beside a result with one."""
_RELATION = re.compile(r"[=<>]|\\(?:to|rightarrow|le|ge|ne|neq)(?![a-z])")
_DETERMINANT = re.compile(
    r"\\begin\{vmatrix\}((?:(?!\\begin|\\\\).)*?)&((?:(?!&|\\begin).)*?)\\\\((?:(?!\\begin|\\\\).)*?)&((?:(?!&|\\begin|\\\\).)*?)\\end\{vmatrix\}"
)
_PART = re.compile(r"(?<![\d.,])\d*\.\d+(?![\d.,])")
_INTEGERS = re.compile(rf"(.+?),?\s*(?:{TEXT}?\s*(?:for|where)\s)?([a-z])\s*\\in\s*(\\mathbb\s*\{{?\s*[NZ]\s*\}}?)")
"""A result for each integer."""
_IGNORED = re.compile(
    r"'|(?<!matrix\})\^\s*\{?\s*(?:T|\*|\\top|\\prime)|\.\.|…|\\[lc]?dots|\d\s*_\s*\{?\s*(\w+)|\\[pb]?mod|\d(?:st|nd|rd|th)\b"
)
"""Primes, bases, dots and the like, which math-verify ignores: both results have them, or they differ."""
_TOO_LARGE = re.compile(r"\^\s*\{?\s*-?\d{4,}|\d{4,}\s*!|!\s*!|\^\s*\{[^{}]*\^|\d\s*\^\s*\{?\s*\{?\d+\s*\}?\s*\^")


def same_answer(one: str, other: str, seconds: int = 3) -> bool:
    """Return whether two results are equal, also as expressions.

    Args:
        seconds: for each of the three calls of math-verify. It stops itself by SIGALRM, so that its time is limited in
            the main thread only.
    """
    first, second = spelled(one), spelled(other)
    if not first or _tight(first) == _tight(second):
        return bool(first)
    if max(len(first), len(second)) > LONGEST:
        return False
    found = _compared(first, second)
    if found is not None:
        return found
    (first, unit), (second, other_unit) = without_unit(first), without_unit(second)
    ratio = ratio_of(unit, other_unit) if unit and other_unit else 1
    if not ratio or has_words(f"{first} {second}"):
        return False
    family, of_second = _INTEGERS.fullmatch(first), _INTEGERS.fullmatch(second)
    if family and of_second and family[3] == of_second[3]:
        second = re.sub(_LETTER.format(of_second[2]), family[2], of_second[1])
        first = family[1]
    if _IGNORED.findall(first) != _IGNORED.findall(second):
        return False
    # A statement about something is no result, though math-verify takes its right side.
    is_about = [bool(_RELATION.search(without_variable(text)[1])) for text in (first, second)]
    if is_about[0] != is_about[1] and not (_RELATION.search(first) and _RELATION.search(second)):
        return False
    first = first if ratio == 1 else rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}({first})"
    return bool(_verified(first, second, seconds))


def result_fault(result: str) -> str | None:
    """Return what is wrong with a known result that no answer could equal but by its characters; else None."""
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
    verify = load_math_verify()
    if verify is None or len(text) > LONGEST or _TOO_LARGE.search(text):
        return None
    found = verify[0](_expression(text), _limit(3))
    return None if any(not isinstance(part, str) for part in found) else "is no expression that can be read"


def _tight(text: str) -> str:
    """Without spaces that separate nothing."""
    return re.sub(r"(?<=[^\w,])\s+|\s+(?=\W)", "", " ".join(text.replace(TEXT, " ").split()))


def _compared(one: str, other: str) -> bool | None:
    """True if two spelled results are equal; None: math-verify is to say."""
    (x, one), (y, other) = without_variable(one), without_variable(other)
    x, y = (name or (bounds_of(text) or ("",))[0] for name, text in ((x, one), (y, other)))
    if x and y and x != y:
        return None if _has_variable(y, one) and _has_variable(x, other) else False
    if one == other:
        return True
    first, second = quantity_of(one), quantity_of(other)
    if first and second is None and first.unit:
        second = quantity_of(_LETTERS.sub(rf" {TEXT}", other))
    if second and first is None and second.unit:
        first = quantity_of(_LETTERS.sub(rf" {TEXT}", one))
    if first is not None and second is not None:
        return same_quantity(first, second)
    words = [words_of(one), words_of(other)]
    if None not in words:
        return words[0] == words[1]
    several, of_other = several_of(one), several_of(other)
    if several and of_other:
        return _same_several(several, of_other)
    if part := several or of_other:
        rest = other if several else one
        if words_of(rest) is None and quantity_of(rest) is None:
            return None
        return part.brackets in ("", "{}") and all(_compared(one, rest) for one in part.parts)
    if any(words) and (first or second):
        return False
    return None


def _has_variable(variable: str, text: str) -> bool:
    return re.search(_LETTER.format(re.escape(variable)), text) is not None


def _same_several(one: Several, other: Several) -> bool | None:
    kinds = {one.brackets, other.brackets}
    if kinds <= {"", "{}"} or kinds == {"∪"}:
        pairs = [[_compared(a, b) for b in other.parts] for a in one.parts]
        if all(any(row) for row in pairs) and all(any(column) for column in zip(*pairs, strict=True)):
            return True
        return None if any(found is None for row in pairs for found in row) else False
    if kinds == {"", "()"}:
        one, other = (x._replace(parts=[without_variable(part)[1] for part in x.parts]) for x in (one, other))
    elif len(kinds) > 1:
        return False if "" not in kinds and "{}" not in kinds else None
    if len(one.parts) != len(other.parts):
        return False
    found = [_compared(*pair) for pair in zip(one.parts, other.parts, strict=True)]
    return True if all(found) else None if None in found and False not in found else False


def _expression(text: str) -> str:
    """A spelled result for math-verify: a number as a fraction, since it rounds decimals, and several as a set."""
    found = quantity_of(text)
    if found is not None and not found.unit:
        value = found.value
        return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    several = several_of(text)
    if several is not None and several.brackets in ("", "{}"):
        return rf"\{{{', '.join(several.parts)}\}}"
    text = _DETERMINANT.sub(r"((\1)\\cdot(\4)-(\2)\\cdot(\3))", text.replace(TEXT, " "))
    return _PART.sub(lambda match: "{{\\frac{{{}}}{{{}}}}}".format(*Fraction(match[0]).as_integer_ratio()), text)


def _verified(one: str, other: str, seconds: int) -> bool | None:
    """True if math-verify finds results equal; None where it is absent or cannot read one."""
    verify = load_math_verify()
    if verify is None or _TOO_LARGE.search(f"{one} | {other}"):
        return None
    limit = _limit(seconds)
    first, second = ([_with_imaginary(part) for part in verify[0](_expression(text), limit)] for text in (one, other))
    if not first or not second:
        return None
    return bool(verify[1](second, first, timeout_seconds=limit))


def _with_imaginary(part):
    """A result of math-verify, with the imaginary unit for a letter i that is free in it."""
    from sympy import Expr, I

    letters = {one: I for one in part.free_symbols if one.name == "i"} if isinstance(part, Expr) else {}
    return part.subs(letters) if letters else part


def math_verify_version() -> str | None:
    """Return the version of math-verify; None where it is not installed."""
    try:
        return metadata.version("math-verify")
    except metadata.PackageNotFoundError:
        return None


def load_math_verify():
    """Return a function from text and seconds to the results of math-verify, and its verify; None where it is not
    installed. The first call may take seconds."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        return None
    # It would remove letters at the end of an expression that could be units, such as the t of 3t.
    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    return lambda text, seconds: parse(f"\\boxed{{{text}}}", [config], parsing_timeout=seconds), verify


def _limit(seconds: int) -> int | None:
    return seconds if threading.current_thread() is threading.main_thread() else None
