"""What the recomputation of a checkpointed layer knows of the layer's forward, and what it does not send again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Literal

Part = Literal["rows", "first hop", "back"]
"""An exchange of tokens with experts: to their ranks, to a rank that passes them on, or back."""


class Recomputation:
    """One forward of a checkpointed layer, and its recomputation."""

    def __init__(self, left_out: frozenset[Part]):
        """``left_out``: exchanges whose results the recomputation does not read, or has."""
        self.left_out, self.is_again = left_out, False
        self._values: list[Any] = []
        self._read = 0

    def contexts(
        self, forward: AbstractContextManager | None = None, again: AbstractContextManager | None = None
    ) -> tuple[AbstractContextManager, AbstractContextManager]:
        """What `torch.utils.checkpoint` takes as the result of ``context_fn``; around other contexts, if any."""
        return _Run(self, False, forward or nullcontext()), _Run(self, True, again or nullcontext())

    def begin(self, is_again: bool) -> None:
        """Begin the forward, or a recomputation, of which there may be several."""
        self.is_again, self._read = is_again, 0

    def recall(self, make: Callable[[], Any]) -> Any:
        """The next value: made in the forward, the same object in the recomputation."""
        if not self.is_again:
            self._values.append(make())
        self._read += 1
        return self._values[self._read - 1]


_running: ContextVar[Recomputation | None] = ContextVar("recomputation", default=None)


class _Run:
    """A context of one of both. `contextlib.contextmanager` makes contexts for one use only."""

    def __init__(self, of: Recomputation, is_again: bool, inner: AbstractContextManager):
        self._of, self._is_again, self._inner = of, is_again, inner
        self._before: list[Token] = []

    def __enter__(self) -> None:
        self._of.begin(self._is_again)
        self._before.append(_running.set(self._of))
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _running.reset(self._before.pop())


def recalled(make: Callable[[], Any]) -> Any:
    """What ``make`` returned in the forward that is computed again here, or returns now."""
    running = _running.get()
    return make() if running is None else running.recall(make)


def leaves_out(part: Part) -> bool:
    """True in a recomputation that does not repeat an exchange."""
    running = _running.get()
    return running is not None and running.is_again and part in running.left_out
