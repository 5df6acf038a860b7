"""Runs coroutines of servers to their end, for tests, which are not in the thread of their loop."""

import asyncio
from typing import Any

from glm46.tasks.rl.rollout.event_loop import EventLoop
from glm46.tasks.rl.rollout.http_calls import call as begin_call
from glm46.tasks.rl.rollout.servers import Servers

_LOOP = EventLoop()
_CALLS = EventLoop()  # not the same: functions that the loop of servers calls may call servers
run = _LOOP.run


def servers_of(*arguments, **options) -> Servers:
    """Servers in the loop of `run`."""
    made = Servers(*arguments, **options)
    made.loop = _LOOP
    return made


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """The loop of `run`."""
    return run(_running_loop())


def call(url: str, path: str, body: Any = None, *, seconds: float) -> Any:
    """See `http_calls.call`."""
    return _CALLS.run(begin_call(url, path, body, seconds=seconds))
