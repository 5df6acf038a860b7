"""The input of a reward, the names and weights of rewards, and the built-in ones but choice and code."""

import json
import math
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from glm46.storage.prepare.equal_results import result_fault, same_answer
from glm46.storage.prepare.maths import concluded_result, stated_result

_CALLS_FOR_EACH = 3
"""Of math-verify for each label: two parses and a comparison."""
_LARGEST_REPLY = 1 << 20
_PAUSE_SECONDS = 1.0


class Answer(NamedTuple):
    """A completion to judge."""

    prompt: str
    """The last message of the prompt."""
    text: str
    """The completion, or its last turn, without the stop token; of a thinking model with its thought."""
    label: Any
    """What the prompt file states under its label key; None if it has no such key."""
    thinking: bool
    """True if the model could think: the text then holds the thought, which the prompt has closed otherwise."""
    tokens: int
    """Of the completion, its stop token included."""
    is_finished: bool
    """Ended by a stop token, not by its longest length."""
    history: tuple[str, ...] = ()
    """Of a conversation whose last turn this is: the turns before it, each followed by the reply to it."""
    score: float | None = None
    """The number of rl.environment.score_command."""

    @property
    def labels(self) -> list[Any]:
        """Of which one suffices."""
        return list(self.label) if isinstance(self.label, list | tuple) else [self.label]

    @property
    def spoken(self) -> str:
        """The text behind the thought, with calls of tools; empty while the thought is open."""
        _, closing, text = self.text.rpartition("</think>")
        is_open = "<think>" in text or (self.thinking and not closing)
        return "" if is_open else text.strip()

    @property
    def result(self) -> str:
        """The answer without thought and calls of tools; empty if there is none yet, because the thought is open or
        the longest length has cut the text."""
        return self.spoken.partition("<tool_call>")[0].strip() if self.is_finished else ""


class Scored(NamedTuple):
    """A sample of a group, as the function of rl.filter sees it."""

    answer: Answer
    reward: float


Reward = Callable[[Answer, Mapping[str, Any]], float | None]
"""From an answer and the options of the reward. None and an error of any kind drop the sample."""
DEFAULT_SECONDS = 10.0
_USABLE = 0.9


def usable_seconds(options: Mapping[str, Any]) -> float:
    """Time that the parts of a built-in reward share: its whole time, the option ``timeout_seconds``, which the pool of
    functions sets, less what starting and ending them takes. A reward that is killed drops its sample, so that it must
    end before."""
    return _USABLE * options.get("timeout_seconds", DEFAULT_SECONDS)


@dataclass(frozen=True)
class RewardRule:
    """One table of [[rl.rewards]], or [rl.environment]."""

    name: str
    """A built-in reward, or ``package.module:function``."""
    weight: float = 1.0
    seconds: float = DEFAULT_SECONDS
    """Longest time for one answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_environment: bool = False
    """The function replies to turns."""


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
