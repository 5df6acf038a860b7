"""Built-in rewards: exact, format, repetition, math, remote; choice and code have files of their own."""

import json
import math
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from glm46.storage.prepare.equal_results import result_fault, same_answer
from glm46.storage.prepare.maths import concluded_result, stated_result
from glm46.tasks.rl.rewards.answer import Answer, usable_seconds

_CALLS_FOR_EACH = 3
"""Of math-verify for each label: two parses and a comparison."""
_LARGEST_REPLY = 1 << 20
_PAUSE_SECONDS = 1.0


def exact(answer: Answer, options: Mapping[str, Any]) -> float:
    """1 if the result is the label, or one of several labels, without the white space around it."""
    return float(bool(answer.result) and answer.result in {str(label).strip() for label in answer.labels})


def exact_fault(label: Any) -> str:
    """The reason why no answer can be a label; empty if one can."""
    if not _is_text_or_number(label):
        return "is not a text or a finite number; write it as one of these, or as a list of them"
    return "" if str(label).strip() else "is empty, as an answer that was not given; write what the answer is to be"


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


def maths(answer: Answer, options: Mapping[str, Any]) -> float:
    r"""1 if the last ``\boxed{}``, else what follows the last "answer is", else the result that the last sentence
    states, or that is all of the text, equals a label (`same_answer`).

    math-verify stops itself by SIGALRM, so this runs in the main thread of a process of its own.
    """
    given = stated_result(answer.result) or concluded_result(answer.result)
    if not given:
        return 0.0
    wanted = [stated_result(str(label)) or str(label) for label in answer.labels]
    seconds = max(1, int(usable_seconds(options) / (_CALLS_FOR_EACH * len(wanted))))
    return float(any(same_answer(given, label, seconds) for label in wanted))


def maths_fault(label: Any) -> str:
    """The reason why no answer can equal a label; empty if one can."""
    if not _is_text_or_number(label):
        return "is not a text or a finite number; write the result as one of these"
    fault = result_fault(stated_result(str(label)) or str(label))
    return f"{fault}; correct it, leave the row out, or take the reward exact" if fault else ""


def _is_text_or_number(label: Any) -> bool:
    """True if a label is a text or a finite number: True is no 1, and nothing equals NaN."""
    return isinstance(label, str) or (
        isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    )


def remote(answer: Answer, options: Mapping[str, Any]) -> float:
    """POST prompt, text and label as JSON to ``url``; the reply is a number, or a table with the key ``reward``. An
    answer without a result gets 0 and is not sent.

    Args:
        answer: what is sent.
        options: ``url``; ``tries`` (3), with a second between them, as far as `usable_seconds` has time for them;
            ``seconds`` (5) for each.

    Raises:
        OSError, ValueError: no try gave a number.
    """
    if not answer.result:
        return 0.0
    body = json.dumps({"prompt": answer.prompt, "response": answer.text, "label": answer.label}).encode()
    tries, end = options.get("tries", 3), time.monotonic() + usable_seconds(options)
    for number in range(1, tries + 1):
        request = urllib.request.Request(options["url"], body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(
                request, timeout=min(options.get("seconds", 5), end - time.monotonic())
            ) as reply:
                found = json.loads(reply.read(_LARGEST_REPLY))
            return found["reward"] if isinstance(found, dict) else found
        except (OSError, ValueError, KeyError):
            if number == tries or time.monotonic() + _PAUSE_SECONDS >= end:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise ValueError(f"tries = {tries}: must be at least 1")
