"""Work in threads: blocking calls, work during a context, and calls for many items."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def start_daemon(work: Callable[[], None], name: str) -> threading.Thread:
    """Run work in a daemon thread, before whose end the process can end. The thread prints the traceback of an
    error."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def in_thread(work: Callable[[], _Result]) -> Future[_Result]:
    """Run blocking work in a daemon thread. The process can end before it, unlike before the threads of an executor."""
    future: Future[_Result] = Future()
    future.set_running_or_notify_cancel()  # from now on nobody can cancel it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    start_daemon(run, "call")
    return future


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run work in a daemon thread during this context. The work takes an event that is set at the end of the context,
    which does not wait for it. An error of the work is logged."""
    end = threading.Event()
    in_thread(lambda: work(end)).add_done_callback(Future.result)  # errors of callbacks are logged
    try:
        yield
    finally:
        end.set()


def map_in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int) -> list[_Result]:
    """Call a function with each item, ``at_once`` at a time, and return the results in order. Raises the first error
    when all calls have ended."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(function, items))
