"""Writes to storage in a thread: storage that does not answer delays training for seconds, not until it answers."""

import threading
from collections import deque
from collections.abc import Callable

from glm46.files.threads import start_daemon

_PATIENCE_SECONDS = 2.0
_END_SECONDS = 60.0
"""Maximum wait for the remaining calls at the end of a run."""


class Writes:
    """Thread that executes calls in order.

    `make` waits until its call is done, so that readers find the written content. After a call that takes longer than
    `_PATIENCE_SECONDS`, `make` does not wait until the thread has caught up.

    Args:
        name: name of the thread.
        most_waiting: maximum number of waiting calls; beyond it, the oldest ones are dropped.
    """

    def __init__(self, name: str, most_waiting: int):
        self._waiting: deque[tuple[int, Callable[[], None] | None]] = deque(maxlen=most_waiting)
        self._given = self._made = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        start_daemon(self._run, name)

    def make(self, call: Callable[[], None]) -> None:
        """Execute a call.

        Raises:
            Exception: the error of this call or of an earlier one, after which no other call is executed.
        """
        with self._changed:
            is_stalled = self._made < self._given
            number = self._give(call)
            if not is_stalled:
                self._changed.wait_for(lambda: self._made >= number or self._error, _PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until the calls so far are done, without a time limit."""
        with self._changed:
            number = self._given
            self._changed.wait_for(lambda: self._made >= number or self._error)

    def close(self) -> bool:
        """Wait for the calls so far, at most a minute, and end the thread.

        Returns:
            True if all calls are done, or one has failed. Otherwise storage does not answer, and the thread keeps
            running: the end of a run must not wait for storage without limit.
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
            except BaseException as error:  # stored for the caller; this thread ends with its traceback
                self._ends(number, error)
                raise
            self._ends(number, None)

    def _ends(self, number: int, error: BaseException | None) -> None:
        with self._changed:
            self._made = number
            self._error = error
            self._changed.notify_all()
