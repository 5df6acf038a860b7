"""Recomputation of a checkpointed layer: it recalls values of the forward, and need not send all rows again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

Part = Literal["rows", "first hop", "back"]
"""An exchange of tokens with experts: to their ranks, to a rank that passes them on, or back."""


def recomputation(
    left_out: tuple[Part, ...], inner: tuple[AbstractContextManager, ...] = (nullcontext(), nullcontext())
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of the forward of a layer and of its recomputation, as `torch.utils.checkpoint` takes them, around
    two other ones. ``left_out``: exchanges whose results the recomputation has, or does not read."""
    values: list[Any] = []
    return _Run(values, left_out, False, inner[0]), _Run(values, left_out, True, inner[1])


class _Run:
    """A context that can be entered again, as those of `contextlib.contextmanager` cannot."""

    def __init__(self, values: list[Any], left_out: tuple[Part, ...], is_again: bool, inner: AbstractContextManager):
        self.values, self.left_out, self.is_again, self.read, self._inner = values, left_out, is_again, 0, inner

    def __enter__(self) -> None:
        self.read, self._before = 0, _running.set(self)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _running.reset(self._before)


_running: ContextVar[_Run | None] = ContextVar("recomputation", default=None)


def recalled(make: Callable[[], Any]) -> Any:
    """The result of ``make`` in the forward that is computed again here; or the present one."""
    running = _running.get()
    if running is None or not running.is_again:
        value = make()
        if running is not None:
            running.values.append(value)
        return value
    running.read += 1
    return running.values[running.read - 1]


def leaves_out(part: Part) -> bool:
    """True in a recomputation that does not repeat an exchange."""
    running = _running.get()
    return running is not None and running.is_again and part in running.left_out


def will_leave_out(part: Part) -> bool:
    """True in a forward whose recomputation, if there is one, does not repeat an exchange."""
    running = _running.get()
    return running is not None and part in running.left_out
