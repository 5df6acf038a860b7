"""Input and rules of rewards, and the built-in rewards except choice and code."""

import json
import math
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from glm46.storage.judge.equal_results import result_fault, same_answer
from glm46.storage.judge.maths import concluded_result, stated_result

_CALLS_FOR_EACH = 3
"""Calls of math-verify for each label: two parses and a comparison."""
_LARGEST_REPLY = 1 << 20
_PAUSE_SECONDS = 1.0


class Answer(NamedTuple):
    """A completion to score."""

    prompt: str
    """The last message of the prompt."""
    text: str
    """The completion, or its last turn, without the stop token. The thought of a thinking model is included and begins
    with ``<think>`` even if this tag is part of the prompt."""
    label: Any
    """Value of the label key in the row of the prompt; None without such a key."""
    thinking: bool
    """True if the model could think. A text without ``<think>`` is then an answer without a thought."""
    tokens: int
    """Number of tokens of the completion, including its stop token."""
    is_finished: bool
    """True if a stop token ended it, not the length limit."""
    history: tuple[str, ...] = ()
    """Previous turns of the conversation, each followed by the reply to it."""
    score: float | None = None
    """Score from rl.environment.score_command."""

    @property
    def labels(self) -> list[Any]:
        """Labels, of which one must match."""
        return list(self.label) if isinstance(self.label, list | tuple) else [self.label]

    @property
    def spoken(self) -> str:
        """Text after the last thought, with tool calls; empty while a thought is open."""
        text = self.text.rpartition("</think>")[2]
        return "" if "<think>" in text else text.strip()

    @property
    def result(self) -> str:
        """Answer without thought and tool calls; empty if the thought is open or the text was truncated."""
        return self.spoken.partition("<tool_call>")[0].strip() if self.is_finished else ""


Reward = Callable[[Answer, Mapping[str, Any]], float | None]
"""Computes a reward from an answer and the options of the reward. None or an error drops the sample."""
DEFAULT_SECONDS = 10.0
_USABLE = 0.9


def usable_seconds(options: Mapping[str, Any]) -> float:
    """Return the time that the parts of a built-in reward share: the option ``timeout_seconds``, which `FunctionPool`
    sets, minus a margin to start and end them. A reward must end within it, because killing it drops the sample."""
    seconds: float = options.get("timeout_seconds", DEFAULT_SECONDS)
    return _USABLE * seconds


@dataclass(frozen=True)
class RewardRule:
    """Settings of one table of [[rl.rewards]], or of [rl.environment]."""

    name: str
    """Name of a built-in reward, or ``package.module:function``."""
    weight: float = 1.0
    seconds: float = DEFAULT_SECONDS
    """Time limit in seconds for one answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_environment: bool = False
    """True if the function replies to turns."""


def exact(answer: Answer, options: Mapping[str, Any]) -> float:  # noqa: ARG001 - a reward's
    """Return 1 if the result equals the label, or one of several labels, ignoring surrounding white space."""
    return float(bool(answer.result) and answer.result in {str(label).strip() for label in answer.labels})


def exact_fault(label: object) -> str:
    """Explain why no answer can equal a label; empty if one can."""
    if not _is_text_or_number(label):
        return "is not a text or a finite number; write it as one of these, or as a list of them"
    return "" if str(label).strip() else "is empty, as an answer that was not given; write what the answer is to be"


def well_formed(answer: Answer, options: Mapping[str, Any]) -> float:  # noqa: ARG001 - a reward's
    """Return 1 if the answer ended with a stop token, has a text after the thought, and closed the thought once,
    or has no thought tags if it could not think."""
    opened = answer.text.count("<think>")
    closed = answer.text.count("</think>")
    is_closed = closed == 1 and opened <= 1 and answer.text.find("<think>") < answer.text.find("</think>")
    is_formed = is_closed if answer.thinking else not opened and not closed
    return float(answer.is_finished and is_formed and bool(answer.result))


def repetition(answer: Answer, options: Mapping[str, Any]) -> float:
    """Return minus the share of runs of ``n`` words (4) that repeat earlier ones, from 0 to -1."""
    words = answer.text.split()
    n = options.get("n", 4)
    runs = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def maths(answer: Answer, options: Mapping[str, Any]) -> float:
    r"""Return 1 if the result equals a label (`same_answer`). The result is the last ``\boxed{}``, else the text after
    the last "answer is", else the result in the last sentence, or the whole text if it is just a result.

    math-verify stops itself by SIGALRM, so this must run in the main thread of a separate process.
    """
    result = stated_result(answer.result) or concluded_result(answer.result)
    if not result:
        return 0.0
    expected = [stated_result(str(label)) or str(label) for label in answer.labels]
    seconds = max(1, int(usable_seconds(options) / (_CALLS_FOR_EACH * len(expected))))
    return float(any(same_answer(result, label, seconds) for label in expected))


def maths_fault(label: object) -> str:
    """Explain why no result can equal a label; empty if one can."""
    if not _is_text_or_number(label):
        return "is not a text or a finite number; write the result as one of these"
    fault = result_fault(stated_result(str(label)) or str(label))
    return f"{fault}; correct it, leave the row out, or take the reward exact" if fault else ""


def _is_text_or_number(label: object) -> bool:
    """Return True for a text or a finite number. A boolean is no number here, and nothing equals NaN."""
    return isinstance(label, str) or (
        isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    )


def remote(answer: Answer, options: Mapping[str, Any]) -> float:
    """POST prompt, text and label as JSON to ``url`` and return the reward in the reply: a number, or a table with the
    key ``reward``. An answer without a result gets 0 and is not sent.

    Args:
        answer: the answer to send.
        options: ``url``; ``tries`` (3), with pauses of a second, as long as `usable_seconds` allows; ``seconds`` (5)
            for each try.

    Raises:
        OSError, ValueError: no try returned a number.
    """
    if not answer.result:
        return 0.0
    body = json.dumps({"prompt": answer.prompt, "response": answer.text, "label": answer.label}).encode()
    tries = options.get("tries", 3)
    end = time.monotonic() + usable_seconds(options)
    for number in range(1, tries + 1):
        request = urllib.request.Request(options["url"], body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(
                request, timeout=min(options.get("seconds", 5), end - time.monotonic())
            ) as reply:
                value = json.loads(reply.read(_LARGEST_REPLY))
            reward: float = value["reward"] if isinstance(value, dict) else value
            return reward
        except (OSError, ValueError, KeyError):
            if number == tries or time.monotonic() + _PAUSE_SECONDS >= end:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise ValueError(f"tries = {tries}: must be at least 1")
