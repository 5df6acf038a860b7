r"""Normalisation of mathematical results, and their values: numbers, quantities or words.

No character with a meaning is dropped: a unit is compared with a unit, a space between digits separates a mixed number.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from glm46.storage.judge.units import UNITS, is_bare, measured, ratio_of, unit_name

TEXT = "\ue000"
"""Marks the beginning of what was inside a LaTeX command for text."""
_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "﹣": "-",
        "－": "-",
        "＋": "+",
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "⁄": "/",
        "％": "%",
        "∧": r"\land ",
        "µ": "μ",
        "，": ", ",
        "：": ":",
        "（": "(",
        "）": ")",
        "＝": "=",
        "’": "'",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{
            character: rf"\frac{{{up}}}{{{down}}}"
            for character, up, down in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True)
        },
    }
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\w))"
_COMMAND = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|bf|rm)\s*"


def _repeating(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    before = f"0{match[1]}{match[2]}"
    return rf"\frac{{{int(before + match[3]) - int(before)}}}{{{10 ** len(match[2]) * (10 ** len(match[3]) - 1)}}}"


_PLAIN_FUNCTIONS = r"sin|cos|tan|cot|csc|log|ln|exp|arcsin|arccos|arctan|sinh|cosh|tanh|gcd|lcm|det"
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}"),
        (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}"),
        (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\(?:displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
        (r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{matrix}"),
        (r"\\end\{array\}", r"\\end{matrix}"),
        (r"\|\s*\\begin\{matrix\}((?:(?!\\begin|\\end).)*)\\end\{matrix\}\s*\|", r"\\begin{vmatrix}\1\\end{vmatrix}"),
        (r"\\begin\{(?:bmatrix|Bmatrix|[pb]?smallmatrix)\}|[(\[]\s*\\begin\{matrix\}", r"\\begin{pmatrix}"),
        (r"\\end\{(?:bmatrix|Bmatrix|[pb]?smallmatrix)\}|\\end\{matrix\}\s*[)\]]", r"\\end{pmatrix}"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\\\\(?!.*\\end\{)", " "),
        (r"(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{?(\d{1,30})\}?", _repeating),
        (r"^(?:negative|minus)\s+(?=[\d\\.])", "-"),
        (r"\\([$%#&])", r"\1"),
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (rf"\\frac{_ARGUMENT}{_ARGUMENT}", r"\\frac{\1\2}{\3\4}"),
        # Unlike the LaTeX command, the character applies to a whole number.
        (rf"√\s*(\d+(?:\.\d+)?)|√{_ARGUMENT}|√\(([^()]*)\)", r"\\sqrt{\1\2\3\4}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (
            rf"(?<=\d)\s*(?:{_COMMAND}\{{\s*E\s*\}}|(?:{_COMMAND}\{{\s*e\s*\}}|[eE])(?=\s*\{{))\s*\{{?\s*([-+]?\d+)\s*\}}?"
            rf"|(?<=\d)\s*{_COMMAND}\{{\s*[eE]\s*([-+]?\d+)\s*\}}",
            r"\\times 10^{\1\2}",
        ),
        (rf"{_COMMAND}\{{([^{{}}a-zA-Z]*)\}}", r"\1"),
        (r"\\(?:mathrm|operatorname\*?)\s*\{([eidj])\}", r"\1"),
        (
            rf"(?:\\operatorname\*?\s*\{{|{_COMMAND}\{{|(?<![A-Za-z\\]))({_PLAIN_FUNCTIONS})(?:\}}|(?=[\s(_^\d]))",
            r"\\\1 ",
        ),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"^(\w+)\s*\\choose\s*(\w+)$", r"\\binom{\1}{\2}"),
        (r"\bper ?cent\b", "%"),
        (rf"{_COMMAND}\{{([^{{}}]*)\}}", rf" {TEXT}\1 "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])", "° "),
        (r"<=|\\leq?q?(?:slant)?(?![a-z])", r"\\le "),
        (r">=|\\geq?q?(?:slant)?(?![a-z])", r"\\ge "),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"\\(?:varnothing|\{\s*\\\})", r"\\emptyset"),
        (r"(?<![a-z\\])infinity", r"\\infty"),
        (r"^\s*(?:\\(?:approx|simeq|sim)(?![a-z])|approximately|about|roughly)\s*", ""),
        (r"\s+", " "),
    )
]
_WRAPPERS = re.compile(
    r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|`+([^`]*)`+|[\"“]([^\"“”]*)[\"”]", re.DOTALL
)
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
)
_CURRENCIES = "$€£¥"
_SCALES: dict[str, int | Fraction] = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    **{
        name: Fraction(1, number)
        for number, name in enumerate(
            ["half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], start=2
        )
    },
    "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
    "millionth": Fraction(1, 10**6),
}
_LARGEST_BASE = 10**30
_POWERS = {"squared": 2, "cubed": 3}
_UNIT = re.compile(rf"({TEXT}?)\s*([A-Za-z°%μ](?:[A-Za-z°%$μ./\s{TEXT}-]|\\cdot |\^\{{?-?\d\}}?)*)")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "max", "min", "mod", "gcd", "lcm", "det", "dim")
    + ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt", "frac", "binom", "pi", "theta", "alpha", "beta")
)
_JOINS = frozenset(
    (
        "or",
        "and",
        "if",
        "where",
        "when",
        "for",
        "with",
        "over",
        "times",
        "plus",
        "minus",
        "choose",
        "factorial",
        "below",
        "above",
        "most",
        "least",
        "less",
        "raised",
        "divided",
        "multiplied",
        "maybe",
        "perhaps",
        "not",
        "to",
        "modulo",
        "am",
        "pm",
    )
)
"""Words after a number that are not units."""
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b")
LONGEST = 1_000
"""Longer results are compared as text."""


class Quantity(NamedTuple):
    """A number and its unit."""

    value: Fraction
    unit: str
    """Unit; empty if there is none."""


def spelled(result: str) -> str:
    """Normalise a result: LaTeX without sizes and delimiters."""
    text = result.translate(_CHARACTERS)
    before = None
    while text != before:
        before = text
        text = re.sub(r"(?<!\.)\.$|[。,;]$", "", text.strip())
        if (match := _WRAPPERS.fullmatch(text)) is not None:
            text = next(group for group in match.groups() if group is not None)
    for pattern, spelling in _SPELLINGS if len(text) <= 10 * LONGEST else ():
        text = pattern.sub(spelling, text)
    return text.strip()


def number_of(text: str) -> Fraction | None:
    """Return the value of a result that is a number, with or without a unit; None for anything else."""
    quantity = quantity_of(spelled(text))
    return None if quantity is None else quantity.value


def same_quantity(quantity: Quantity, other: Quantity) -> bool:
    """Return True if two quantities with units of the same kind are equal; a share may be in per cent or a number."""
    if quantity.unit == other.unit:
        return quantity.value == other.value
    if "%" in (quantity.unit, other.unit):
        share, plain = (quantity, other) if quantity.unit == "%" else (other, quantity)
        return not plain.unit and plain.value in (share.value, share.value / 100)
    ratio = ratio_of(quantity.unit, other.unit) if quantity.unit and other.unit else 1
    return ratio is not None and quantity.value * ratio == other.value


def without_unit(text: str) -> tuple[str, str]:
    """Split off a unit after an expression, if it is in a command for text or a known unit; the unit is empty
    otherwise."""
    if match := re.fullmatch(rf"([^{TEXT}]+?)\s*{TEXT}\s*([^{TEXT}]+)", text):
        return (match[1], unit_name(match[2])) if _UNIT.fullmatch(match[2]) else (text, "")
    match = re.fullmatch(r"(.*[\d)}])\s+([A-Za-z]+)((?:\^\{?\d\}?)?)", text)
    # A single letter is a factor if the expression has other letters.
    if (
        match
        and is_bare(match[2])
        and (len(match[2]) > 1 or not re.search("[A-Za-z]", re.sub(r"\\[a-zA-Z]+", "", match[1])))
    ):
        return match[1], unit_name(match[2] + match[3])
    return text, ""


def quantity_of(text: str) -> Quantity | None:
    """Return the number and unit of a normalised result; None for anything else."""
    text = text.replace(TEXT + " ", TEXT)
    if text[:1] == "(" and "," not in text and is_enclosed(text):
        text = text[1:-1].strip()
    currency, text = _without_currency(text)
    if not currency:
        pieces = re.split(rf"(?<=[A-Za-z]),? (?:{TEXT}?and )?(?=\d)", text)
        if len(pieces) > 1 and (total := _sum([quantity_of(piece) for piece in pieces])):
            return total
    match = _NUMBER.match(text)
    number = None if match is None else _value(match)
    if match is None or number is None:
        return None
    rest = text[match.end() :]
    value, words = _times_words(number, rest.strip())
    if not words:
        return Quantity(value, currency)
    if words in _CURRENCIES and not currency:
        return Quantity(value, words)
    unit = _unit_after_number(words, currency, is_apart=rest[0].isspace())
    return None if unit is None else Quantity(value, unit)


def _without_currency(text: str) -> tuple[str, str]:
    """Split off the sign of a currency before a number, which may be negative; the sign is empty otherwise."""
    if text[:1] and text[0] in _CURRENCIES:
        return text[0], text[1:].strip()
    if text[:1] == "-" and text[1:2] and text[1] in _CURRENCIES:
        return text[1], "-" + text[2:].strip()
    return "", text


def _times_words(value: Fraction, text: str) -> tuple[Fraction, str]:
    """Apply the words after a number that change its value, such as "million" and "squared". Returns the value and the
    rest of the text."""
    while word := re.match(rf"{TEXT}?\s*([a-z]+?)(s?)\b(?!\^)\s*", text):
        power = _POWERS.get(word[0].strip(f"{TEXT} "))
        if word[1] in _SCALES or word[1] == "halve":
            value *= _SCALES.get(word[1], Fraction(1, 2))
        elif power is not None and value.numerator < _LARGEST_BASE:
            value **= power
        else:
            break
        # The command for text holds for the words after this one, too.
        mark = TEXT if text[0] == TEXT and word.end() < len(text) else ""
        text = mark + text[word.end() :]
    return value, text


def _unit_after_number(text: str, currency: str, *, is_apart: bool) -> str | None:
    """Return the unit that follows a number; None if the text is something else.

    Args:
        currency: the sign before the number; empty if there is none.
        is_apart: there is a space between the number and the text.
    """
    match = _UNIT.fullmatch(text)
    if match is None or (currency and not match[1] and not re.match(r"per\b|/", text)):
        return None
    unit_text = match[2].replace(TEXT, " ").replace(r"\cdot ", " ")
    names = re.findall(r"[A-Za-z]+", unit_text)
    if any(name in {*_FUNCTIONS, *_JOINS} and name not in UNITS for name in map(str.casefold, names)):
        return None
    if not match[1] and unit_text[0] != "°":
        # A letter after a number is a factor, and so are letters without a space before them.
        are_units = all(map(is_bare, names))
        may_be_unit = len(unit_text) > 1 or unit_text in "°%" or (is_apart and are_units)
        if not (may_be_unit and (is_apart or are_units)):
            return None
    is_currency_again = not currency or unit_name(unit_text) == currency
    return unit_name(unit_text if is_currency_again else f"{currency} {unit_text}")


def _sum(parts: list[Quantity | None]) -> Quantity | None:
    """Return the sum of a quantity in several units, from the largest to the smallest, such as 1 hour 30 minutes."""
    total = Fraction(0)
    limit = None
    first = parts[0]
    for part in parts:
        if first is None or part is None or first.value < 0:
            return None
        ratio = ratio_of(part.unit, first.unit) if measured(part.unit)[0] else None
        if ratio is None or limit is not None and not 0 <= part.value * ratio < limit:
            return None
        total = total + part.value * ratio
        limit = ratio
    return None if first is None else Quantity(total, first.unit)


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    if part["whole"]:
        up = int(part["up"] or part["up2"])
        down = int(part["down"] or part["down2"])
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
    """Return True if a result contains words, whose letters are not factors."""
    words = [word.casefold() for word in _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}", " ", text))]
    return TEXT in text or any(
        word in ("no", "on") or len(word) > 2 and word not in _FUNCTIONS and re.search("[aeiouy]", word)
        for word in words
    )


def words_of(text: str) -> str | None:
    """Return a result that consists of words, in lower case; for a letter in parentheses, the letter. None for anything
    else."""
    plain = " ".join(text.replace(TEXT, " ").split())
    if match := re.fullmatch(r"\(\s*([A-Za-z])\s*\)", plain):
        plain = match[1]
    is_text = re.fullmatch(r"[^\W\d_][^\d\\=<>{}^_+*/]*", plain) and (len(plain) == 1 or has_words(text))
    return re.sub(r"(?<=\w{3})s\b", "", plain.casefold()) if is_text else None


def is_enclosed(text: str) -> bool:
    """Return True if the last character closes the first bracket."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if not depth:
            return place == len(text) - 1
    return False
