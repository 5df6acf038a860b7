"""One asyncio loop in a thread, in which rank 0 talks to servers while its main thread trains, and blocking calls
besides it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import cached_property
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class EventLoop:
    """Runs coroutines for callers in other threads. Its daemon thread starts with the first one."""

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
        return loop

    def begin(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end. Not for the thread of the loop."""
        return self.begin(work).result()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function soon, after those of earlier calls."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Cancel all coroutines and end the thread."""
        if "_loop" in vars(self):
            self.run(_cancel_others())
            self.call(self._loop.stop)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def all_results(works: Iterable[Awaitable[_Result]]) -> list[_Result]:
    """Run work concurrently and return the results in order. An error is raised when all of them have ended: a task
    group would cancel the others in the middle of an update, from which a server has to be repaired."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    results = list[_Result]()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


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

    threading.Thread(target=run, daemon=True).start()
    return future


async def blocking(work: Callable[[], _Result]) -> _Result:
    """Run blocking work, such as a rendezvous of torch, in a thread, and wait for it without blocking the loop."""
    return await asyncio.wrap_future(in_thread(work))
