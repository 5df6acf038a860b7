"""The reward for mathematics: the final result of an answer against the label."""

from collections.abc import Mapping
from typing import Any

from glm46.storage.prepare.equal_results import result_fault, same_answer
from glm46.storage.prepare.maths import concluded_result, stated_result
from glm46.tasks.rl.rewards.answer import Answer, usable_seconds
from glm46.tasks.rl.rewards.text import is_text_or_number, labels

_CALLS_FOR_EACH = 3
"""Of math-verify for each label: two parses and a comparison."""


def maths(answer: Answer, options: Mapping[str, Any]) -> float:
    r"""1 if the last ``\boxed{}``, else what follows the last "answer is", else the result that the last sentence
    states, or that is all of the text, equals a label (`same_answer`).

    math-verify stops itself by SIGALRM, so this runs in the main thread of a process of its own.
    """
    given = stated_result(answer.result) or concluded_result(answer.result)
    if not given:
        return 0.0
    wanted = [stated_result(str(label)) or str(label) for label in labels(answer)]
    seconds = max(1, int(usable_seconds(options) / (_CALLS_FOR_EACH * len(wanted))))
    return float(any(same_answer(given, label, seconds) for label in wanted))


def check_maths_label(label: Any) -> None:
    """Check that an answer can equal a label.

    Raises:
        ValueError: none can.
    """
    if not is_text_or_number(label):
        raise ValueError("is not a text or a finite number; write the result as one of these")
    if fault := result_fault(stated_result(str(label)) or str(label)):
        raise ValueError(f"{fault}; correct it, leave the row out, or take the reward exact")
