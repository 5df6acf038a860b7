"""The reward for mathematics: the final result of an answer against the label."""

import re
from collections.abc import Mapping
from typing import Any

from glm46.prepare.maths import final_answer, same_answer
from glm46.rewards.answer import Answer, usable_seconds
from glm46.rewards.text import labels

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def maths(answer: Answer, options: Mapping[str, Any]) -> float:
    r"""1 if the last ``\boxed{}``, else what follows the last "answer is", else the last number of the result equals a
    label: as fraction, decimal number or text, and otherwise by math-verify where it is installed.

    math-verify stops itself by SIGALRM, so this runs in the main thread of a process of its own.
    """
    given = final_answer(answer.result)
    if given is None:
        numbers = _NUMBER.findall(answer.result)
        if not numbers:
            return 0.0
        given = numbers[-1]
    wanted = [final_answer(str(label)) or str(label) for label in labels(answer)]
    return float(any(same_answer(given, label) for label in wanted) or _verified(given, wanted, options))


def _verified(given: str, wanted: list[str], options: Mapping[str, Any]) -> bool:
    """Whether math-verify finds the expressions equal; False where it is not installed, or takes too long."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    # Of one parse of the answer, and for each label a parse and a comparison; its alarms are whole seconds.
    seconds = max(1, int(usable_seconds(options) / (1 + 2 * len(wanted))))
    parsed = parse(f"\\boxed{{{given}}}", parsing_timeout=seconds)
    return bool(parsed) and any(
        verify(parse(f"\\boxed{{{label}}}", parsing_timeout=seconds), parsed, timeout_seconds=seconds)
        for label in wanted
    )
