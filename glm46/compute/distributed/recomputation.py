"""Recomputation of a checkpointed layer: it reuses values of the forward, and can skip exchanges of rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

Part = Literal["rows", "first hop", "back"]
"""An exchange of tokens with experts: to their ranks, to a rank that passes them on, or back."""


def recomputation(
    left_out: tuple[Part, ...], inner: tuple[AbstractContextManager[object], ...] = (nullcontext(), nullcontext())
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Create the contexts for the forward of a layer and for its recomputation, for `torch.utils.checkpoint`.

    Args:
        left_out: exchanges that the recomputation skips, because it has their results or does not read them.
        inner: contexts to enter inside, for the forward and for the recomputation.
    """
    values: list[Any] = []
    forward = _Pass(values, left_out, is_recomputation=False, inner=inner[0])
    return forward, _Pass(values, left_out, is_recomputation=True, inner=inner[1])


class _Pass:
    """The forward of a layer, or its recomputation; both share ``values``.

    A context that can be entered repeatedly, unlike those of `contextlib.contextmanager`.
    """

    def __init__(
        self,
        values: list[Any],
        left_out: tuple[Part, ...],
        *,
        is_recomputation: bool,
        inner: AbstractContextManager[object],
    ):
        self.values = values
        self.left_out = left_out
        self.is_recomputation = is_recomputation
        self.num_recalled = 0
        self._inner = inner

    def __enter__(self) -> None:
        self.num_recalled = 0
        self._token = _running.set(self)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _running.reset(self._token)


_running: ContextVar[_Pass | None] = ContextVar("recomputation", default=None)


def recalled(make: Callable[[], Any]) -> Any:
    """In a recomputation, return the result that ``make`` had in the forward; otherwise call ``make``."""
    running = _running.get()
    if running is None or not running.is_recomputation:
        value = make()
        if running is not None:
            running.values.append(value)
        return value
    running.num_recalled += 1
    return running.values[running.num_recalled - 1]


def leaves_out(part: Part) -> bool:
    """Return whether this is a recomputation that skips this exchange."""
    running = _running.get()
    return running is not None and running.is_recomputation and part in running.left_out


def will_leave_out(part: Part) -> bool:
    """Return whether this is a forward whose recomputation, if there is one, skips this exchange."""
    running = _running.get()
    return running is not None and part in running.left_out
