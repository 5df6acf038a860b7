"""JSON over HTTP with a deadline for the whole call."""

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic_core import to_json

_Result = TypeVar("_Result")
_LONGEST_REASON = 400


class CallError(Exception):
    """A call failed or its reply is invalid, because of the server, the network or the request; see the message."""


class StatusError(CallError):
    """The server answered with an error status."""


class RefusedError(StatusError):
    """The server refused the request (4xx), and would refuse it again."""


class ForgottenError(CallError):
    """The server no longer has the weights that it was sent, because it was restarted."""


def call(url: str, path: str, body: Any = None, *, seconds: float) -> Any:
    """POST `body` as JSON, or GET without one, and return the JSON reply; None if it is empty.

    Args:
        url: base URL such as ``http://host:8000``.
        seconds: time until the last byte of the reply, however slowly the server sends. If the host has several
            addresses, each has this time for the connection.

    Raises:
        RefusedError: the reply is 4xx.
        StatusError: it is 5xx.
        CallError: no connection, no complete reply in time, or a reply that is not JSON.
    """
    content = exchange(url, path, body, seconds=seconds)
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise CallError(f"{path}: the reply is not JSON: {content[:80]!r}") from None


class _Timed(io.RawIOBase):
    """Reads bytes from a socket until a deadline."""

    def __init__(self, sock: socket.socket, end: float):
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (remaining := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reply(http.client.HTTPResponse):
    """A reply whose status line, headers and body must arrive before a deadline."""

    def __init__(self, end: float, sock: socket.socket, **options: Any):
        super().__init__(sock, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, end))


def exchange(url: str, path: str, body: Any = None, *, seconds: float) -> bytes:
    """Return the bytes of the reply; arguments and errors are those of `call`."""
    parts = urlsplit(url)
    end = time.monotonic() + seconds
    scheme = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection: Any = scheme(parts.hostname or "", parts.port, timeout=seconds)
    connection.response_class = partial(_Reply, end)
    try:
        connection.connect()
        connection.sock.settimeout(max(end - time.monotonic(), 1e-3))
        content = (
            None if body is None else to_json(body)
        )  # five times faster than json, which would block other threads
        connection.request("GET" if body is None else "POST", path, content, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        blocks = []
        while block := reply.read1(1 << 20):
            blocks.append(block)
        if reply.length:  # read1 does not detect a reply that ends early
            raise http.client.IncompleteRead(b"", reply.length)
    except TimeoutError:
        raise CallError(f"{path}: no complete reply within {seconds:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise CallError(_reason(path, error)) from None
    finally:
        connection.close()
    content = b"".join(blocks)
    if reply.status >= 400:
        kind = RefusedError if reply.status < 500 else StatusError
        raise kind(f"{path} answered {reply.status}: {content[:_LONGEST_REASON].decode(errors='replace')}")
    return content


def _reason(path: str, error: OSError | http.client.HTTPException) -> str:
    """Return the message for a call without a reply."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"  # nothing listens there, whatever the path
    return f"{path}: {type(error).__name__}: {error}"


def in_thread(work: Callable[[], _Result], *expected: type[Exception]) -> Future[_Result]:
    """Run work in a daemon thread, which does not block the exit of the process. Errors other than `CallError` and
    ``expected`` are bugs: their traceback is printed."""
    future: Future[_Result] = Future()

    def run() -> None:
        error: Exception = CallError("the client failed; see the traceback above")
        try:
            future.set_result(work())
        except Exception as raised:
            if not isinstance(raised, (CallError, *expected)):
                raise
            error = raised
        finally:
            if not future.done():
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
