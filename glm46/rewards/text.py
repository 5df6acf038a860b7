"""Rewards that compare and count text, in linear time: exact, choice, format, repetition."""

import re
from collections.abc import Mapping
from typing import Any

from glm46.rewards.answer import Answer

_CHOICES = (
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Za-z])\)?\s*\}"),
    re.compile(r"(?:answer|choice|option)\s*(?:is|:)?\s*\**\(?([A-Za-z])\)?(?![A-Za-z])", re.IGNORECASE),
    re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z])"),
)
"""Where a letter stands, the surest form first; the last match of the first form that matches counts."""


def exact(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the result is the label, or one of several labels, without the white space around it."""
    return float(bool(answer.result) and answer.result in {str(label).strip() for label in labels(answer)})


def choice(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the last letter that the result names as its choice is the label, such as "C"."""
    found = next((marks[-1] for form in _CHOICES if (marks := form.findall(answer.result))), None)
    wanted = {str(label).strip().strip("()").upper() for label in labels(answer)}
    return float(found is not None and found.upper() in wanted)


def well_formed(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the answer ended by itself, closed its thought exactly once, if it could think at all, and holds no other
    tag of a thought, and some text behind it."""
    opened, closed = answer.text.count("<think>"), answer.text.count("</think>")
    is_closed = closed == 1 and opened <= 1 and answer.text.find("<think>") < answer.text.find("</think>")
    is_formed = is_closed if answer.thinking else not opened and not closed
    return float(answer.is_finished and is_formed and bool(answer.result))


def repetition(answer: Answer, options: Mapping[str, Any]) -> float:
    """From 0 to -1: the share of runs of ``n`` words (4) that were there before."""
    words, n = answer.text.split(), options.get("n", 4)
    runs = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def labels(answer: Answer) -> list[Any]:
    """The labels of an answer, of which one suffices."""
    return list(answer.label) if isinstance(answer.label, list | tuple) else [answer.label]
