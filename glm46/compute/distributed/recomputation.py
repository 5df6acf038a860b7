"""What the recomputation of a checkpointed layer knows of the layer's forward, and what it does not send again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Literal

Part = Literal["rows", "first hop", "back"]
"""An exchange of tokens with experts: to their ranks, to a rank that passes them on, or back."""


class Recomputation:
    """One forward of a checkpointed layer, and its recomputation, of which there may be several."""

    def __init__(self, left_out: tuple[Part, ...]):
        """``left_out``: exchanges whose results the recomputation has, or does not read."""
        self.left_out, self.is_again = left_out, False
        self.values: list[Any] = []
        self.read = 0

    def contexts(self, *inner: AbstractContextManager) -> tuple[AbstractContextManager, AbstractContextManager]:
        """What `torch.utils.checkpoint` takes as the result of ``context_fn``; around two other contexts, if any."""
        forward, again = inner or (nullcontext(), nullcontext())
        return _Run(self, False, forward), _Run(self, True, again)


_running: ContextVar[Recomputation | None] = ContextVar("recomputation", default=None)


class _Run:
    """A context of one of both. `contextlib.contextmanager` makes contexts for one use only."""

    def __init__(self, of: Recomputation, is_again: bool, inner: AbstractContextManager):
        self._of, self._is_again, self._inner = of, is_again, inner
        self._before: list[Token] = []

    def __enter__(self) -> None:
        self._of.is_again, self._of.read = self._is_again, 0
        self._before.append(_running.set(self._of))
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _running.reset(self._before.pop())


def recalled(make: Callable[[], Any]) -> Any:
    """What ``make`` returned in the forward that is computed again here, or returns now."""
    running = _running.get()
    if running is None:
        return make()
    if not running.is_again:
        running.values.append(make())
    running.read += 1
    return running.values[running.read - 1]


def leaves_out(part: Part) -> bool:
    """True in a recomputation that does not repeat an exchange."""
    running = _running.get()
    return running is not None and running.is_again and part in running.left_out
