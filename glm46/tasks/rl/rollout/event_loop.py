"""Asyncio loops in threads, in which rank 0 talks to servers and runs episodes while its main thread trains, and
blocking calls besides them."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

from glm46.files.threads import in_thread

_Result = TypeVar("_Result")
_LAST_CALL = "last call"
_END_SECONDS = 30.0
"""Maximum wait for the ends of the coroutines of a loop."""
_CANCEL_SECONDS = 1.0
"""Maximum wait for what has not ended by then, and is cancelled once more."""


class EventLoop:
    """Runs coroutines for callers in other threads. Its daemon thread starts with the first one."""

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = _Loop()
        in_thread(loop.run_forever)
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

    def stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all coroutines, run `last`, and end the thread, within half a minute: what has not ended by then hangs
        and must not hold up the end of the run."""
        if "_loop" in vars(self):
            wait([self.begin(_end_others(last))], _END_SECONDS + _CANCEL_SECONDS)
            self.call(self._loop.stop)
            del self._loop  # a later coroutine starts another one


async def _end_others(last: Callable[[], Awaitable[None]] | None) -> None:
    # The limit cancels what is awaited here: asyncio complains about tasks that are pending when their loop is gone.
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # a cancelled one may start a last call
                for task in others:
                    if task.get_name() != _LAST_CALL:
                        task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            if last is not None:
                await last()


class _Loop(asyncio.SelectorEventLoop):
    """Resolves host names in daemon threads, and a name once for all calls that wait for it. asyncio's own executor has
    few threads, which a resolver that hangs would occupy, and for which the end of the process would wait."""

    def __init__(self) -> None:
        super().__init__()
        self._resolving = dict[tuple[object, ...], Future[list[Any]]]()

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        key = (host, port, family, type, proto, flags)
        resolving = self._resolving.get(key)
        if resolving is None:
            resolving = self._resolving[key] = in_thread(partial(socket.getaddrinfo, *key))
            resolving.add_done_callback(lambda _: self._resolving.pop(key))
        return await asyncio.wrap_future(resolving)


async def last_call(begin: Callable[[], Awaitable[_Result]]) -> _Result:
    """Begin a call, as a task that `EventLoop.stop` lets end by itself, and return its result."""
    task = asyncio.current_task()
    assert task is not None, "in a coroutine"
    task.set_name(_LAST_CALL)
    return await begin()


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


async def blocking(work: Callable[[], _Result]) -> _Result:
    """Run blocking work, such as a rendezvous of torch, in a thread, and wait for it without blocking the loop."""
    return await asyncio.wrap_future(in_thread(work))
