r"""The judge of mathematical results: equal as numbers, quantities, words, sets, tuples and intervals, else by
math-verify, else as text.

Results are brought to one spelling first, and no character with a meaning is dropped: a unit is compared with a unit, a
space between digits separates a mixed number. math-verify reads ``4 1/5``, ``1.5e3``, units and words as products, so
that it is asked about the rest: expressions.
"""

import re
import threading
from dataclasses import replace
from fractions import Fraction
from importlib import metadata
from typing import NamedTuple

from glm46.storage.prepare.units import UNITS, is_bare, measured, ratio_of, unit_name

_TEXT = "\ue000"
"""Stands before what was in a command for text."""
_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ",
    "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "⁄": "/", "％": "%", "∧": r"\land ", "µ": "μ",
    "，": ", ", "：": ":", "（": "(", "）": ")", "＝": "=", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **{character: rf"\frac{{{up}}}{{{down}}}" for character, up, down in zip(
        "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True
    )},
})  # fmt: skip
_RAISED, _LOWERED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n"), str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\w))"
_COMMAND = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|bf|rm)\s*"


def _repeating(match: re.Match) -> str:
    """A repeating decimal as a fraction."""
    before = f"0{match[1]}{match[2]}"
    return rf"\frac{{{int(before + match[3]) - int(before)}}}{{{10 ** len(match[2]) * (10 ** len(match[3]) - 1)}}}"


_PLAIN_FUNCTIONS = r"sin|cos|tan|cot|csc|log|ln|exp|arcsin|arccos|arctan|sinh|cosh|tanh|gcd|lcm|det"
_SPELLINGS = [(re.compile(pattern), spelling) for pattern, spelling in (
    (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}"),
    (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}"),
    (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\(?:displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
    (r"\{,\}", ","), (r"\\!", ""), (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
    (r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{matrix}"), (r"\\end\{array\}", r"\\end{matrix}"),
    (r"\|\s*\\begin\{matrix\}((?:(?!\\begin|\\end).)*)\\end\{matrix\}\s*\|", r"\\begin{vmatrix}\1\\end{vmatrix}"),
    (r"\\begin\{(?:bmatrix|Bmatrix|[pb]?smallmatrix)\}|[(\[]\s*\\begin\{matrix\}", r"\\begin{pmatrix}"),
    (r"\\end\{(?:bmatrix|Bmatrix|[pb]?smallmatrix)\}|\\end\{matrix\}\s*[)\]]", r"\\end{pmatrix}"),
    (r"\\langle(?![a-z])", "("), (r"\\rangle(?![a-z])", ")"),
    (r"\\\\(?!.*\\end\{)", " "), (r"(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{?(\d{1,30})\}?", _repeating),
    (r"^(?:negative|minus)\s+(?=[\d\\.])", "-"),
    (r"\\([$%#&])", r"\1"), (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (rf"\\frac{_ARGUMENT}{_ARGUMENT}", r"\\frac{\1\2}{\3\4}"),
    (rf"√{_ARGUMENT}|√\(([^()]*)\)", r"\\sqrt{\1\2\3}"), (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (rf"(?<=\d)\s*(?:{_COMMAND}\{{\s*E\s*\}}|(?:{_COMMAND}\{{\s*e\s*\}}|[eE])(?=\s*\{{))\s*\{{?\s*([-+]?\d+)\s*\}}?"
     rf"|(?<=\d)\s*{_COMMAND}\{{\s*[eE]\s*([-+]?\d+)\s*\}}", r"\\times 10^{\1\2}"),
    (rf"{_COMMAND}\{{([^{{}}a-zA-Z]*)\}}", r"\1"), (r"\\(?:mathrm|operatorname\*?)\s*\{([eidj])\}", r"\1"),
    (rf"(?:\\operatorname\*?\s*\{{|{_COMMAND}\{{|(?<![A-Za-z\\]))({_PLAIN_FUNCTIONS})(?:\}}|(?=[\s(_^\d]))", r"\\\1 "),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "), (r"^(\w+)\s*\\choose\s*(\w+)$", r"\\binom{\1}{\2}"),
    (r"\bper ?cent\b", "%"), (rf"{_COMMAND}\{{([^{{}}]*)\}}", rf" {_TEXT}\1 "),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])", "° "), (r"<=|\\leq?q?(?:slant)?(?![a-z])", r"\\le "),
    (r">=|\\geq?q?(?:slant)?(?![a-z])", r"\\ge "), (r"\\lt(?![a-z])", "<"), (r"\\gt(?![a-z])", ">"),
    (r"\\(?:varnothing|\{\s*\\\})", r"\\emptyset"), (r"(?<![a-z\\])infinity", r"\\infty"),
    (r"^\s*(?:\\(?:approx|simeq|sim)(?![a-z])|approximately|about|roughly)\s*", ""), (r"\s+", " "),
)]  # fmt: skip
_WRAPPERS = re.compile(
    r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|`+([^`]*)`+|[\"“]([^\"“”]*)[\"”]", re.DOTALL
)
_SET = re.compile(r"\\\{(.*)\\\}")

_DECIMAL = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}"
    r"|\d{1,3}(?: \d{3})+(?!\d| ?/)(?:\.\d+)?|\d{1,3}(?:'\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
)
_SIGNED = rf"[+-]?\s*{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+)(?:\s*\\frac\{{\s*(?P<up>\d+)\s*\}}\{{\s*(?P<down>\d+)\s*\}}|\s+(?P<up2>\d+)\s*/\s*(?P<down2>\d+))"
    rf"|\\frac\{{\s*(?P<top>{_SIGNED})\s*\}}\{{\s*(?P<bottom>{_SIGNED})\s*\}}"
    rf"|(?P<base>\d+)\s*\^\s*(?:\{{\s*(?P<power>-?\d{{1,3}})\s*\}}|(?P<digit>\d))(?!\d)"
    rf"|(?P<mantissa>{_DECIMAL})(?:(?:[eE]|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^)\s*\{{?\s*(?P<tens>[+-]?\d{{1,3}})\s*\}}?)"
    rf"|(?P<one>{_DECIMAL})(?:\s*/\s*(?P<other>{_SIGNED}))?)(?![\d^!])"
)  # fmt: skip
_CURRENCIES = "$€£¥"
_LETTER = r"(?<![a-zA-Z\\]){}(?![a-zA-Z])"
_LETTERS = re.compile(r"(?<=\d) (?=[A-Za-z])")
"""Before letters that are a unit beside a result with one."""
_SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    **{name: Fraction(1, number) for number, name in enumerate(
        ["half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], start=2
    )},
    "hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000), "millionth": Fraction(1, 10**6),
}  # fmt: skip
_LARGEST_BASE = 10**30
_POWERS = {"squared": 2, "cubed": 3}
_UNIT = re.compile(rf"({_TEXT}?)\s*([A-Za-z°%μ](?:[A-Za-z°%$μ./\s{_TEXT}-]|\\cdot |\^\{{?-?\d\}}?)*)")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "max", "min", "mod", "gcd", "lcm", "det", "dim")
    + ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt", "frac", "binom", "pi", "theta", "alpha", "beta")
)
_JOINS = frozenset((
    "or", "and", "if", "where", "when", "for", "with", "over", "times", "plus",
    "minus", "choose", "factorial", "below", "above", "most", "least", "less", "raised",
    "divided", "multiplied", "maybe", "perhaps", "not", "to", "modulo", "am", "pm",
))  # fmt: skip
"""Words after a number that are not units."""
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b")
_VARIABLE = re.compile(
    r"(\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\([a-z]\))?|\([a-z](?:,\s*[a-z])+\))\s*(=|\\in(?![a-z])|\\approx(?![a-z]))\s*(.+)"
)
_RELATION = re.compile(r"[=<>]|\\(?:to|rightarrow|le|ge|ne|neq)(?![a-z])")
_CONDITION = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|:|\|)(.*)\\\}")
_DETERMINANT = re.compile(
    r"\\begin\{vmatrix\}((?:(?!\\begin|\\\\).)*?)&((?:(?!&|\\begin).)*?)\\\\((?:(?!\\begin|\\\\).)*?)&((?:(?!&|\\begin|\\\\).)*?)\\end\{vmatrix\}"
)
_PART = re.compile(r"(?<![\d.,])\d*\.\d+(?![\d.,])")
_INTEGERS = re.compile(rf"(.+?),?\s*(?:{_TEXT}?\s*(?:for|where)\s)?([a-z])\s*\\in\s*(\\mathbb\s*\{{?\s*[NZ]\s*\}}?)")
"""A result for each integer."""
_MATRIX = re.compile(r"\\begin\{pmatrix\}((?:(?!\\begin).)*)\\end\{pmatrix\}")
_HOLE = re.compile(r"[a-z]\s*\\neq?(?![a-z])([^,=<>]+)|\\mathbb\{R\}\s*\\(?:setminus|backslash)\s*\\\{([^,]*)\\\}")
_BOUNDS = (
    re.compile(r"(?P<x>[a-zA-Z])\s*(?P<op><|>|\\le|\\ge)\s*(?P<right>[^<>]+)"),
    re.compile(r"(?P<left>[^<>]+?)\s*(?P<op><|>|\\le|\\ge)\s*(?P<x>[a-zA-Z])"),
    re.compile(r"(?P<left>[^<>]+?)\s*(?P<first><|\\le)\s*(?P<x>[a-zA-Z])\s*(?P<second><|\\le)\s*(?P<right>[^<>]+)"),
    re.compile(r"(?P<right>[^<>]+?)\s*(?P<second>>|\\ge)\s*(?P<x>[a-zA-Z])\s*(?P<first>>|\\ge)\s*(?P<left>[^<>]+)"),
)
_IGNORED = re.compile(
    r"'|(?<!matrix\})\^\s*\{?\s*(?:T|\*|\\top|\\prime)|\.\.|…|\\[lc]?dots|\d\s*_\s*\{?\s*(\w+)|\\[pb]?mod|\d(?:st|nd|rd|th)\b"
)
"""Primes, bases, dots and the like, which math-verify ignores: both results have them, or they differ."""
_TOO_LARGE = re.compile(r"\^\s*\{?\s*-?\d{4,}|\d{4,}\s*!|!\s*!|\^\s*\{[^{}]*\^|\d\s*\^\s*\{?\s*\{?\d+\s*\}?\s*\^")
_LONGEST = 1_000
"""Longer results are compared as text."""


class _Quantity(NamedTuple):
    value: Fraction
    unit: str
    """Empty: none."""


class _Several(NamedTuple):
    """Several results."""

    brackets: str
    """``{}``: a set; empty: a list without brackets; else those of a tuple or interval."""
    parts: list[str]


def same_answer(one: str, other: str, seconds: int = 3) -> bool:
    """Return whether two results are equal, also as expressions.

    Args:
        seconds: for each of the three calls of math-verify. It stops itself by SIGALRM, so that its time is limited in
            the main thread only.
    """
    first, second = spelled(one), spelled(other)
    if not first or _tight(first) == _tight(second):
        return bool(first)
    if max(len(first), len(second)) > _LONGEST:
        return False
    found = _compared(first, second)
    if found is not None:
        return found
    (first, unit), (second, other_unit) = _without_unit(first), _without_unit(second)
    ratio = ratio_of(unit, other_unit) if unit and other_unit else 1
    if not ratio or has_words(f"{first} {second}"):
        return False
    families = [_INTEGERS.fullmatch(text) for text in (first, second)]
    if all(families) and families[0][3] == families[1][3]:
        second = re.sub(_LETTER.format(families[1][2]), families[0][2], families[1][1])
        first = families[0][1]
    if _IGNORED.findall(first) != _IGNORED.findall(second):
        return False
    # A statement about something is no result, though math-verify takes its right side.
    is_about = [bool(_RELATION.search(_without_variable(text)[1])) for text in (first, second)]
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
    if _quantity(text) or _several(text) or has_words(text) or len(text) == 1:
        return None
    verify = load_math_verify()
    if verify is None or len(text) > _LONGEST or _TOO_LARGE.search(text):
        return None
    found = verify[0](_expression(text), _limit(3))
    return None if any(not isinstance(part, str) for part in found) else "is no expression that can be read"


def spelled(result: str) -> str:
    """A result in one spelling: LaTeX without sizes and delimiters."""
    text, before = result.translate(_CHARACTERS), None
    while text != before:
        before = text
        text = re.sub(r"(?<!\.)\.$|[。,;]$", "", text.strip())
        if (match := _WRAPPERS.fullmatch(text)) is not None:
            text = next(group for group in match.groups() if group is not None)
    for pattern, spelling in _SPELLINGS if len(text) <= 10 * _LONGEST else ():
        text = pattern.sub(spelling, text)
    return text.strip()


def number_of(text: str) -> Fraction | None:
    """The number that a result is, with or without a unit; None for anything else."""
    found = _quantity(spelled(text))
    return None if found is None else found.value


def _tight(text: str) -> str:
    """Without spaces that separate nothing."""
    return re.sub(r"(?<=[^\w,])\s+|\s+(?=\W)", "", " ".join(text.replace(_TEXT, " ").split()))


def _compared(one: str, other: str) -> bool | None:
    """True if two spelled results are equal; None: math-verify is to say."""
    (x, one), (y, other) = _without_variable(one), _without_variable(other)
    x, y = (name or (_bounds(text) or ("",))[0] for name, text in ((x, one), (y, other)))
    if x and y and x != y:
        return None if _has_variable(y, one) and _has_variable(x, other) else False
    if one == other:
        return True
    first, second = _quantity(one), _quantity(other)
    if first and second is None and first.unit:
        second = _quantity(_LETTERS.sub(rf" {_TEXT}", other))
    if second and first is None and second.unit:
        first = _quantity(_LETTERS.sub(rf" {_TEXT}", one))
    if first is not None and second is not None:
        return _same_quantity(first, second)
    words = [_words(one), _words(other)]
    if None not in words:
        return words[0] == words[1]
    several = _several(one), _several(other)
    if all(several):
        return _same_several(*several)
    if any(several):
        (part,), rest = filter(None, several), other if several[0] else one
        if _words(rest) is None and _quantity(rest) is None:
            return None
        return part.brackets in ("", "{}") and all(_compared_part(one, rest) for one in part.parts)
    if any(words) and (first or second):
        return False
    return None


def _has_variable(variable: str, text: str) -> bool:
    return re.search(_LETTER.format(re.escape(variable)), text) is not None


def _same_quantity(one: _Quantity, other: _Quantity) -> bool:
    if one.unit == other.unit:
        return one.value == other.value
    if "%" in (one.unit, other.unit):
        share, plain = (one, other) if one.unit == "%" else (other, one)
        return not plain.unit and plain.value in (share.value, share.value / 100)
    ratio = ratio_of(one.unit, other.unit) if one.unit and other.unit else 1
    return bool(ratio) and one.value * ratio == other.value


def _same_several(one: _Several, other: _Several) -> bool | None:
    kinds = {one.brackets, other.brackets}
    if kinds <= {"", "{}"} or kinds == {"∪"}:
        pairs = [[_compared_part(a, b) for b in other.parts] for a in one.parts]
        if all(any(row) for row in pairs) and all(any(column) for column in zip(*pairs, strict=True)):
            return True
        return None if any(found is None for row in pairs for found in row) else False
    if kinds == {"", "()"}:
        one, other = (x._replace(parts=[_without_variable(part)[1] for part in x.parts]) for x in (one, other))
    elif len(kinds) > 1:
        return False if "" not in kinds and "{}" not in kinds else None
    if len(one.parts) != len(other.parts):
        return False
    found = [_compared_part(*pair) for pair in zip(one.parts, other.parts, strict=True)]
    return True if all(found) else None if None in found and False not in found else False


def _compared_part(one: str, other: str) -> bool | None:
    return one == other or _compared(one, other)


def _without_variable(text: str) -> tuple[str, str]:
    """The variable that a result is given for, empty if there is none, and the result."""
    if match := re.fullmatch(r"([^=A-Za-z\\<>]*\d)\s*=\s*([a-zA-Z])", text):
        return match[2], match[1]
    if (match := _VARIABLE.fullmatch(text)) and "=" not in match[3]:
        return (match[1] if match[2] != r"\approx" else "", match[3].strip())
    left, sign, right = text.rpartition("=")
    # A right equation of numbers states its right side.
    sides = _quantity(left.strip()), _quantity(right.strip())
    if all(sides) and sides[0].value != sides[1].value:
        return "", text
    return ("", right.strip() if sign and not re.search(r"[A-Za-z<>]", re.sub(r"\\[a-z]+", "", left)) else text)


def _without_unit(text: str) -> tuple[str, str]:
    """An expression, and the unit behind it, in a command for text or known; empty without one."""
    if match := re.fullmatch(rf"([^{_TEXT}]+?)\s*{_TEXT}\s*([^{_TEXT}]+)", text):
        return (match[1], unit_name(match[2])) if _UNIT.fullmatch(match[2]) else (text, "")
    match = re.fullmatch(r"(.*[\d)}])\s+([A-Za-z]+)((?:\^\{?\d\}?)?)", text)
    # One letter is a factor beside other letters.
    if (
        match
        and is_bare(match[2])
        and (len(match[2]) > 1 or not re.search("[A-Za-z]", re.sub(r"\\[a-zA-Z]+", "", match[1])))
    ):
        return match[1], unit_name(match[2] + match[3])
    return text, ""


def _quantity(text: str) -> _Quantity | None:
    text, unit = text.replace(_TEXT + " ", _TEXT), ""
    if text[:1] == "(" and "," not in text and _is_enclosed(text):
        text = text[1:-1].strip()
    if text[:1] and text[0] in _CURRENCIES:
        text, unit = text[1:].strip(), text[0]
    elif text[:2] in {f"-{sign}" for sign in _CURRENCIES}:
        text, unit = "-" + text[2:].strip(), text[1]
    pieces = re.split(rf"(?<=[A-Za-z]),? (?:{_TEXT}?and )?(?=\d)", text) if not unit else [text]
    if len(pieces) > 1 and (whole := _sum([_quantity(piece) for piece in pieces])):
        return whole
    match = _NUMBER.match(text)
    value = None if match is None else _value(match)
    if value is None:
        return None
    rest = text[match.end() :].strip()
    while word := re.match(rf"{_TEXT}?\s*([a-z]+?)(s?)\b(?!\^)\s*", rest):
        if word[1] in _SCALES or word[1] == "halve":
            value *= _SCALES.get(word[1], Fraction(1, 2))
        elif (power := word[0].strip(f"{_TEXT} ")) in _POWERS and value.numerator < _LARGEST_BASE:
            value **= _POWERS[power]
        else:
            break
        rest = (_TEXT if rest[0] == _TEXT and word.end() < len(rest) else "") + rest[word.end() :]
    if not rest:
        return _Quantity(value, unit)
    if rest in _CURRENCIES and not unit:
        return _Quantity(value, rest)
    of = _UNIT.fullmatch(rest)
    if of is None or unit and not of[1] and not re.match(r"per\b|/", rest):
        return None
    named = of[2].replace(_TEXT, " ").replace(r"\cdot ", " ")
    names = re.findall(r"[A-Za-z]+", named)
    # A letter behind a number is a factor, and so are letters without a space.
    is_apart = bool(of[1]) or text[match.end()].isspace()
    known = all(map(is_bare, names))
    is_unit = (
        of[1] or named[0] == "°" or (len(named) > 1 or named in "°%" or is_apart and known) and (is_apart or known)
    )
    if not is_unit or any(name in {*_FUNCTIONS, *_JOINS} and name not in UNITS for name in map(str.casefold, names)):
        return None
    return _Quantity(value, unit_name(named if not unit or unit_name(named) == unit else f"{unit} {named}"))


def _sum(parts: list[_Quantity | None]) -> _Quantity | None:
    """The quantity that is said in several units, from the largest to the smallest, such as 1 hour 30 minutes."""
    if not all(parts) or parts[0].value < 0:
        return None
    whole, limit = Fraction(0), None
    for part in parts:
        ratio = ratio_of(part.unit, parts[0].unit) if measured(part.unit)[0] else None
        if ratio is None or limit is not None and not 0 <= part.value * ratio < limit:
            return None
        whole, limit = whole + part.value * ratio, ratio
    return _Quantity(whole, parts[0].unit)


def _value(match: re.Match) -> Fraction | None:
    part = match.groupdict()
    if part["whole"]:
        up, down = int(part["up"] or part["up2"]), int(part["down"] or part["down2"])
        value = int(part["whole"]) + Fraction(up, down) if 0 < up < down else None
    elif part["top"]:
        value = _quotient(part["top"], part["bottom"])
    elif part["base"]:
        power = int(part["power"] or part["digit"])
        value = Fraction(int(part["base"])) ** power if int(part["base"]) or power > 0 else None
    elif part["mantissa"]:
        value = _decimal(part["mantissa"]) * Fraction(10) ** int(part["tens"])
    else:
        value = _quotient(part["one"], part["other"] or "1")
    return -value if value is not None and match["sign"] == "-" else value


def _quotient(top: str, bottom: str) -> Fraction | None:
    divisor = _decimal(bottom)
    return _decimal(top) / divisor if divisor else None


def _decimal(text: str) -> Fraction:
    text = re.sub(r"[ ']", "", text)
    if re.fullmatch(r"[+-]?\d{1,3}(?:\.\d{3})+,\d+|[+-]?\d{1,3}(?:\.\d{3}){2,}", text):
        text = text.replace(".", "").replace(",", ".")
    return Fraction(text.replace(",", ""))


def has_words(text: str) -> bool:
    """True if there is text, whose letters are not factors."""
    words = [word.casefold() for word in _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}", " ", text))]
    return _TEXT in text or any(
        word in ("no", "on") or len(word) > 2 and word not in _FUNCTIONS and re.search("[aeiouy]", word)
        for word in words
    )


def _words(text: str) -> str | None:
    """The words that a result is, in lower case; of a letter in parentheses the letter."""
    plain = " ".join(text.replace(_TEXT, " ").split())
    if match := re.fullmatch(r"\(\s*([A-Za-z])\s*\)", plain):
        plain = match[1]
    is_text = re.fullmatch(r"[^\W\d_][^\d\\=<>{}^_+*/]*", plain) and (len(plain) == 1 or has_words(text))
    return re.sub(r"(?<=\w{3})s\b", "", plain.casefold()) if is_text else None


def _several(text: str) -> _Several | None:
    plain = " ".join(text.replace(_TEXT, " ").split())
    if match := _CONDITION.fullmatch(plain):
        plain = match[1].strip()
    if match := _SET.fullmatch(plain):
        return _Several("{}", _split(match[1]))
    if match := _MATRIX.fullmatch(plain):
        rows = [row.split("&") for row in match[1].split(r"\\") if row.strip()]
        return _Several(f"matrix {[len(row) for row in rows]}", [cell.strip() for row in rows for cell in row])
    if match := _HOLE.fullmatch(plain):
        bound = (match[1] or match[2]).strip()
        return _Several("∪", [rf"(-\infty, {bound})", rf"({bound}, \infty)"])
    pieces = [part.strip() for part in re.split(r"\\cup(?![a-z])|(?<![A-Za-z])or(?![A-Za-z])", plain)]
    is_union = r"\cup" in plain or any(map(_bounds, pieces))
    if (
        is_union
        and len(pieces) > 1
        and all(_bounds(one) or re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", one) for one in pieces)
    ):
        return _Several("∪", pieces)
    if bounds := _bounds(plain):
        return bounds[1]
    if plain[:1] in ("(", "[") and plain[-1:] in (")", "]") and _is_enclosed(plain):
        parts = _split(plain[1:-1])
        rows = [_split(part[1:-1]) for part in parts if re.fullmatch(r"\[[^\[\]]*\]", part)] if plain[0] == "[" else []
        if rows and len(rows) == len(parts):
            return _Several(f"matrix {[len(row) for row in rows]}", [cell for row in rows for cell in row])
        return _Several(plain[0] + plain[-1], parts) if len(parts) > 1 else None
    parts = _split(plain)
    if len(parts) < 2:
        return None
    variables = {_without_variable(part)[0] for part in parts}
    return _Several("", [_without_variable(part)[1] for part in parts] if len(variables) == 1 else parts)


def _bounds(text: str) -> tuple[str, _Several] | None:
    """A variable and the interval that its bounds leave, given alone, on two sides, or joined by "and" or a comma."""
    bounds, variables = [], set()
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
    ends = [_tightest(*side) for side in zip(sides, (1, -1), (r"-\infty", r"\infty"), strict=True)]
    if len(variables) > 1 or not all(ends):
        return None
    (lower, is_open), (upper, is_below) = ends
    numbers = _quantity(lower), _quantity(upper)
    if all(numbers) and numbers[0].value > numbers[1].value:
        return None
    return variables.pop(), _Several(("(" if is_open else "[") + (")" if is_below else "]"), [lower, upper])


def _tightest(bounds: list[tuple[str, bool]], sign: int, infinity: str) -> tuple[str, bool] | None:
    """Of several bounds the one from which the others follow, and whether it is open; None if that cannot be said.

    Args:
        sign: 1 for lower bounds, -1 for upper ones.
        infinity: the bound where there is none.
    """
    if len(bounds) < 2:
        return bounds[0] if bounds else (infinity, True)
    numbers = [_quantity(bound) for bound, _ in bounds]
    tightest = (
        max(range(len(bounds)), key=lambda place: (sign * numbers[place].value, bounds[place][1]))
        if all(numbers)
        else None
    )
    return None if tightest is None else bounds[tightest]


def _is_enclosed(text: str) -> bool:
    """True if the first bracket is closed by the last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if not depth:
            return place == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """The parts between commas, "or" and "and" outside of all brackets, and both parts of a double sign. Where a comma
    has a space behind it, those without one are of numbers."""
    comma = r",\s" if re.search(r",\s", text) else ","
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"\\?[(\[{{]|\\?[)\]}}]|{comma}|;|(?<![A-Za-z])(?:or|and)(?![A-Za-z])", text):
        if match[0][-1] in "([{":
            depth += 1
        elif match[0][-1] in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    both = [part.replace(r"\pm", sign).strip() for part in (*parts, text[start:]) for sign in "+-"]
    return [part for part in dict.fromkeys(both) if part]


def _expression(text: str) -> str:
    """A spelled result for math-verify: a number as a fraction, since it rounds decimals, and several as a set."""
    found = _quantity(text)
    if found is not None and not found.unit:
        value = found.value
        return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    several = _several(text)
    if several is not None and several.brackets in ("", "{}"):
        return rf"\{{{', '.join(several.parts)}\}}"
    text = _DETERMINANT.sub(r"((\1)\\cdot(\4)-(\2)\\cdot(\3))", text.replace(_TEXT, " "))
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
