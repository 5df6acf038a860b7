"""The deadline of a call holds for the whole call, however its bytes come."""

import itertools
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from glm46.tasks.rl.rollout.http_calls import CallError, call, in_thread
from tests.processes import wait_until

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


def test_a_fault_of_the_client_has_its_traceback_and_is_no_fault_of_a_server(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda given: seen.append(given.exc_value))

    def fail() -> None:
        raise RuntimeError("in our own code")

    with pytest.raises(CallError, match="the client failed; see the traceback above"):
        in_thread(fail).result()
    wait_until(lambda: seen)
    with pytest.raises(RuntimeError, match="in our own code"):
        in_thread(fail, RuntimeError).result()
    assert [str(error) for error in seen] == ["in our own code"]
