"""Calls and their loop: a deadline holds for the whole call, and what hangs holds up nothing else."""

import asyncio
import itertools
import socket
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from glm46.config.errors import UserError
from glm46.config.rollout import RolloutConfig
from glm46.operate.launch import rl_start
from glm46.tasks.rl.rollout import event_loop, http_calls
from glm46.tasks.rl.rollout.event_loop import EventLoop, blocking
from glm46.tasks.rl.rollout.http_calls import CallError, StatusError, guarded, require_http_client
from tests.processes import wait_until
from tests.unit.tasks.rl.rollout.waiting import call, run

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n"


@contextmanager
def answering(parts):
    """The URL of a server that sends these parts of a reply, with a pause behind each, to one call."""
    ended = threading.Event()

    def serve():
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        try:
            for part in parts:
                connection.sendall(part)
                if ended.wait(0.1):
                    break
        except OSError:  # the caller has hung up
            pass
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        thread.join()


@pytest.mark.parametrize("parts", [
    [b""] * 1000, (bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10_000),
    itertools.chain([b"HTTP/1.1 200 OK\r\n"], (b"X-%d: y\r\n" % n for n in range(90))),
    itertools.chain([HEAD], itertools.repeat(b"[")),
    itertools.chain([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], itertools.repeat(b"1\r\n[\r\n")),
    itertools.chain([b"HTTP/1.0 200 OK\r\n\r\n"], itertools.repeat(b"[")),
], ids=["nothing", "a header", "headers", "body", "chunks", "until the end"])  # fmt: skip
def test_a_server_that_sends_a_byte_now_and_then_gains_no_time(parts):
    with answering(parts) as url:
        began = time.monotonic()
        with pytest.raises(CallError, match="no complete reply within 0.3 s"):
            call(url, "/path", {"a": 1}, seconds=0.3)
        assert time.monotonic() - began < 60  # the parts last longer


@pytest.mark.parametrize("parts", [
    [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"[", b"1]"],
    [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n", b"1\r\n]\r\n0\r\n\r\n"],
    [b"HTTP/1.0 200 OK\r\n\r\n[1", b"]"],
], ids=["length", "chunks", "until the end"])  # fmt: skip
def test_a_reply_in_parts_is_whole(parts):
    with answering(parts) as url:
        assert call(url, "/path", seconds=60.0) == [1]


def test_a_fault_of_the_client_has_its_traceback_and_is_no_fault_of_a_server(capfd):
    async def fail() -> None:
        raise RuntimeError("in our own code")

    with pytest.raises(CallError, match="the client failed; see the traceback above"):
        run(guarded(fail))
    assert "RuntimeError: in our own code" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="in our own code"):
        run(blocking(lambda: run(fail())))


def test_a_reply_is_not_decompressed_whatever_it_declares():
    with answering([b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n[1]"]) as url:
        assert call(url, "/path", seconds=60.0) == [1]


def test_a_reply_that_does_not_end_is_refused_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(http_calls, "_MAX_REPLY_BYTES", 1000)
    parts = itertools.chain([b"HTTP/1.0 200 OK\r\n\r\n"], itertools.repeat(b"[" * 600))
    with answering(parts) as url, pytest.raises(CallError, match="/path: the reply is longer than 1000 bytes"):
        call(url, "/path", seconds=60.0)


def test_parsing_a_large_reply_does_not_hold_up_other_calls(monkeypatch):
    begun, other_ran = threading.Event(), threading.Event()

    def parse(content: bytes) -> int:
        begun.set()
        assert other_ran.wait(10.0), "the loop waits for the parser"
        return len(content)

    async def other() -> None:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        other_ran.set()

    async def both(url: str) -> tuple[int, None]:
        return await asyncio.gather(http_calls.call(url, "/path", seconds=60.0), other())

    monkeypatch.setattr(http_calls, "from_json", parse)
    with answering([b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"1" * 100_000]) as url:
        assert run(both(url))[0] == 100_000


def test_a_redirect_is_not_followed_and_is_no_answer():
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 2\r\n\r\n[]"
    with answering([moved]) as url, pytest.raises(StatusError, match="/path answered 302"):
        call(url, "/path", seconds=60.0)


def test_proxies_and_passwords_of_the_environment_are_not_read(monkeypatch, tmp_path):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b")
    with answering([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"]) as url:
        assert call(url, "/path", seconds=60.0) == []


def test_without_the_package_for_http_one_message_names_its_extra(monkeypatch):
    require_http_client()
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match=r"rollout.kind: .*httpx.*glm46\[rl\]"):
        require_http_client()
    monkeypatch.setattr(rl_start, "reward_pool", lambda rl: SimpleNamespace(close=lambda: None))
    rl = SimpleNamespace(prompts=None, validation=(), environment=None)
    rl_start.refuse_rl(rl, RolloutConfig(max_new_tokens=6))
    with pytest.raises(UserError, match=r"httpx.*glm46\[rl\]"):
        rl_start.refuse_rl(rl, RolloutConfig(kind="vllm", urls=["http://127.0.0.1:8000"], max_new_tokens=6))


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
        calls = [http_calls.call("http://glm46.invalid:80", "/path", seconds=0.5) for _ in range(50)]
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
        loop.run(http_calls.call("http://glm46.invalid:80", "/path", seconds=60.0))
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
    asyncio_loop = loop._loop
    began = time.monotonic()
    loop.stop(close)
    assert time.monotonic() - began < 30.0 and done == ["last", "close"]
    assert not asyncio.all_tasks(asyncio_loop)  # asyncio would complain on standard error
