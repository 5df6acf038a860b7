"""Writes to storage in a thread: storage that does not answer holds training up for seconds, not until it answers."""

import threading
from collections import deque
from collections.abc import Callable

_PATIENCE_SECONDS = 2.0
_END_SECONDS = 60.0
"""For what is left at the end of a run."""


class Writes:
    """Makes calls in a thread, in order.

    `make` waits until its call is made, so that readers find what was written. A call that takes longer than
    `_PATIENCE_SECONDS` is left to the thread, and nothing waits for storage until it has caught up.

    Args:
        name: of the thread.
        most_waiting: calls that storage keeps waiting; the oldest ones of more are dropped.
    """

    def __init__(self, name: str, most_waiting: int):
        self._waiting: deque[tuple[int, Callable[[], None] | None]] = deque(maxlen=most_waiting)
        self._given = self._made = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def make(self, call: Callable[[], None]) -> None:
        """Make a call.

        Raises:
            Exception: what this call or an earlier one has raised, after which no other is made.
        """
        with self._changed:
            is_stalled = self._made < self._given
            number = self._give(call)
            if not is_stalled:
                self._changed.wait_for(lambda: self._made >= number or self._error, _PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until the calls so far are made, however long storage takes."""
        with self._changed:
            number = self._given
            self._changed.wait_for(lambda: self._made >= number or self._error)

    def close(self) -> bool:
        """Wait for the calls so far, at most a minute, and end the thread.

        Returns:
            Whether all of them are made, or one has failed. Otherwise storage does not answer, and the thread is left
            behind: the end of a run must not wait for storage as long as that takes.
        """
        with self._changed:
            number = self._given
            is_done = self._changed.wait_for(lambda: self._made >= number or self._error, _END_SECONDS)
            self._give(None)
        return bool(is_done)

    def _give(self, call: Callable[[], None] | None) -> int:
        self._given += 1
        self._waiting.append((self._given, call))
        self._changed.notify_all()
        return self._given

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                number, call = self._waiting.popleft()
            if call is None:
                return
            try:
                call()
            except BaseException as error:  # for the caller; this thread ends with its traceback
                self._ends(number, error)
                raise
            self._ends(number, None)

    def _ends(self, number: int, error: BaseException | None) -> None:
        with self._changed:
            self._made, self._error = number, error
            self._changed.notify_all()
