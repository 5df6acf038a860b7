"""Whether a worked answer ends in the right result. Nothing is evaluated: results are compared as numbers or text."""

import re
from fractions import Fraction

_MARKS = re.compile(r"####\s*(.+)|(?:the|final)\s+answer\s*(?:is|:)\s*(.+)", re.IGNORECASE)
_DIGITS = r"(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)({_DIGITS})(?:/({_DIGITS}))?")

# Spacing, sizes and signs that change nothing in what an expression says.
_WITHOUT_MEANING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\[ ,;!:()\[\]]|\\q?quad|\^\{?\\circ\}?|\\?[$%]|[°\s]"
)
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")

# Beyond that a number is compared as text: Python takes no longer text for an integer.
_MOST_DIGITS = 4_000


def maths_fault(text: str, answer: str | None) -> str | None:
    """Why a worked answer does not end in the known one; None if it does.

    Args:
        text: a problem with its solution; see `final_answer` for how the result is found.
        answer: the known result, alone or at the end of a solution of its own.
    """
    if answer is None or not answer.strip():
        return "no answer to check against"
    given = final_answer(text)
    if given is None:
        return "states no final answer"
    return None if same_answer(given, final_answer(answer) or answer) else "wrong answer"


def final_answer(text: str) -> str | None:
    r"""What a solution gives as its result: the last ``\boxed{...}``, else what stands behind the last ``####`` (as in
    GSM8K) or "answer is", up to the end of its line; None if there is none of them."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0 and (inside := _braced(text, text.index("{", start))) is not None:
        return inside
    marks = list(_MARKS.finditer(text))
    return next(filter(None, marks[-1].groups())).strip() if marks else None


def same_answer(one: str, other: str) -> bool:
    r"""Whether two results say the same: equal as rational numbers ("0.5", ``\frac{1}{2}``, "1,000"), else equal text
    without spacing, units and dollar or percent signs."""
    one, other = _plain(one), _plain(other)
    first, second = _as_number(one), _as_number(other)
    return one == other if first is None or second is None else first == second


def _braced(text: str, start: int) -> str | None:
    """What is between the brace at ``start`` and its partner."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    return None


def _plain(answer: str) -> str:
    if words := _UNIT.fullmatch(answer.strip(" $")):
        # Nothing but words: they are the answer.
        answer = words[1]
    answer = _UNIT.sub("", answer.replace("{,}", ","))
    answer = _FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", answer)
    return _WITHOUT_MEANING.sub("", answer).rstrip(".").casefold()


def _as_number(plain: str) -> Fraction | None:
    match = _NUMBER.fullmatch(plain)
    if match is None or len(plain) > _MOST_DIGITS:
        return None
    sign, top, bottom = match[1], match[2].replace(",", ""), (match[3] or "1").replace(",", "")
    if not (divisor := Fraction(bottom)):
        return None
    return Fraction(f"{sign}{top}") / divisor
