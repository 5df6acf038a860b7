"""Verify the steps and the final result of a worked solution. Nothing is evaluated: results are compared as numbers or
as text."""

import re
from fractions import Fraction

_MARKS = re.compile(r"####\s*(.+)|(?:the|final)\s+answer\s*(?:is|:)\s*(.+)", re.IGNORECASE)
_DIGITS = r"(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)({_DIGITS})(?:/({_DIGITS}))?")

# A numbered step at the begin of a line: "Step 3:", "**Step 3** -", "### Step 3", "3.", "3)".
_STEP = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]*)?(?:\*\*)?(?:(step)[ \t]+)?(\d{1,4})(?(1)\b|[.)](?=\s))[*.:) \t-]*", re.I | re.M
)
_LEAST_STEPS = 2

# Spacing, sizes and signs that do not change the value of an expression.
_FORMATTING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\[ ,;!:()\[\]]|\\q?quad|\^\{?\\circ\}?|\\?[$%]|[°\s]"
)
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")

# Longer numbers are compared as text: Python refuses to convert longer strings to integers.
_MAX_DIGITS = 4_000


def maths_fault(text: str, answer: str | None) -> str | None:
    """Return the reason if a solution does not end in the known result, else None.

    Args:
        text: a problem with its solution; `final_answer` extracts the result.
        answer: the known result, alone or at the end of a solution.
    """
    if answer is None or not answer.strip():
        return "no answer to check against"
    given = final_answer(text)
    if given is None:
        return "states no final answer"
    return None if same_answer(given, final_answer(answer) or answer) else "wrong answer"


def steps_fault(text: str, answer: str | None) -> str | None:
    """Return the reason if a text is not reasoning in steps, else None.

    Steps are numbered from 1 on without a gap, at the begins of lines ("Step 1:", or all as "1." or "1)"), and are at
    least two. Each says something, and the last one, or what follows it, states the final answer.

    Args:
        text: a problem with its solution. Of several lists the last one counts, since the problem may have one.
        answer: the known result; None is not compared.
    """
    marks = [*_STEP.finditer(text)]
    if any(mark[1] for mark in marks):
        marks = [mark for mark in marks if mark[1]]  # numbers inside steps are not steps
    start = max((place for place, mark in enumerate(marks) if int(mark[2]) == 1), default=len(marks))
    steps = marks[start:]
    if len(steps) < _LEAST_STEPS:
        return "no steps" if not steps else "a single step"
    if [int(step[2]) for step in steps] != list(range(1, len(steps) + 1)):
        return "steps out of order"
    ends = [*(step.start() for step in steps[1:]), len(text)]
    if any(not text[step.end() : end].strip() for step, end in zip(steps, ends, strict=True)):
        return "an empty step"
    given = final_answer(text[steps[-1].start() :])
    if given is None:
        return "states no final answer behind its steps"
    is_wrong = answer is not None and answer.strip() and not same_answer(given, final_answer(answer) or answer)
    return "wrong answer" if is_wrong else None


def final_answer(text: str) -> str | None:
    r"""Return the result of a solution: the last ``\boxed{...}``, else the rest of the line after the last ``####`` (in
    GSM8K) or "answer is"; None without any of them."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0 and (inside := _braced(text, text.index("{", start))) is not None:
        return inside
    marks = list(_MARKS.finditer(text))
    return next(filter(None, marks[-1].groups())).strip() if marks else None


def same_answer(one: str, other: str) -> bool:
    r"""Return whether two results are equal, as rational numbers ("0.5", ``\frac{1}{2}``, "1,000") or else as text
    without spacing, units, dollar and percent signs."""
    one, other = _plain(one), _plain(other)
    first, second = _as_number(one), _as_number(other)
    return one == other if first is None or second is None else first == second


def _braced(text: str, start: int) -> str | None:
    """Return the text between the brace at ``start`` and the matching one; None if there is no match."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    return None


def _plain(answer: str) -> str:
    if words := _UNIT.fullmatch(answer.strip(" $")):
        # The whole answer is text, so the text is not a unit.
        answer = words[1]
    answer = _UNIT.sub("", answer.replace("{,}", ","))
    answer = _FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", answer)
    return _FORMATTING.sub("", answer).rstrip(".").casefold()


def _as_number(plain: str) -> Fraction | None:
    match = _NUMBER.fullmatch(plain)
    if match is None or len(plain) > _MAX_DIGITS:
        return None
    sign, top, bottom = match[1], match[2].replace(",", ""), (match[3] or "1").replace(",", "")
    if not (divisor := Fraction(bottom)):
        return None
    return Fraction(f"{sign}{top}") / divisor
