"""The loop of calls: what hangs in it holds up neither other work nor the end of the run."""

import asyncio
import socket
import threading
import time

import pytest

from glm46.tasks.rl.rollout import event_loop
from glm46.tasks.rl.rollout.event_loop import EventLoop
from glm46.tasks.rl.rollout.http_calls import CallError, call
from tests.processes import wait_until


@pytest.fixture
def loop():
    made = EventLoop()
    yield made
    made.stop()


def test_a_resolver_that_hangs_takes_one_thread_which_nobody_waits_for(loop, monkeypatch):
    ended, asked = threading.Event(), []

    def resolve(host, *_):
        asked.append(host)
        ended.wait(60.0)
        raise socket.gaierror("no such host")

    async def ask() -> list:
        calls = [call("http://glm46.invalid:80", "/path", seconds=0.5) for _ in range(50)]
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        errors = loop.run(ask())
        assert all(isinstance(error, CallError) and "within 0.5 s" in str(error) for error in errors)
        assert loop.begin(asyncio.to_thread(lambda: 5)).result(10.0) == 5, "asyncio's own threads are free"
        assert len(asked) == 1
    finally:
        ended.set()
    wait_until(lambda: not loop._loop._resolving)
    with pytest.raises(CallError, match="no such host"):
        loop.run(call("http://glm46.invalid:80", "/path", seconds=60.0))
    assert len(asked) == 2


def test_the_end_of_a_loop_waits_for_last_calls_and_not_for_what_hangs(loop, monkeypatch):
    monkeypatch.setattr(event_loop, "_END_SECONDS", 0.5)
    done = []

    async def last() -> None:
        await asyncio.sleep(0.1)
        done.append("last")

    async def leaving() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            loop.begin(event_loop.last_call(last))

    async def close() -> None:
        done.append("close")
        await asyncio.Event().wait()

    loop.begin(leaving())
    began = time.monotonic()
    loop.stop(close)
    assert time.monotonic() - began < 30.0 and done == ["last", "close"]
