"""The input of a reward, and the names and weights of rewards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
