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
    """A call failed or its reply makes no sense, by the server, the network or the request; the message says why."""


class StatusError(CallError):
    """The server answered, with an error."""


class RefusedError(StatusError):
    """The server understood the request and refuses it (4xx): it would refuse it again."""


class ForgottenError(CallError):
    """The server has none of the weights that it was given: it was started again."""


def call(url: str, path: str, body: Any = None, *, seconds: float) -> Any:
    """POST `body` as JSON, or GET without one, and return the JSON reply; None if it is empty.

    Args:
        url: such as ``http://host:8000``.
        seconds: from now to the last byte of the reply. A server that sends a byte now and then gains no time. If the
            host has several addresses, each has this time for the connection.

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
    """The bytes that come from a socket before a deadline."""

    def __init__(self, sock: socket.socket, end: float):
        self._sock, self._raw, self._end = sock, sock.makefile("rb", buffering=0), end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reply(http.client.HTTPResponse):
    """A reply whose status line, headers and body come before a deadline."""

    def __init__(self, end: float, sock: socket.socket, **options: Any):
        super().__init__(sock, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, end))


def exchange(url: str, path: str, body: Any = None, *, seconds: float) -> bytes:
    """The bytes of the reply; arguments and errors as for `call`."""
    parts, end = urlsplit(url), time.monotonic() + seconds
    scheme = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection: Any = scheme(parts.hostname or "", parts.port, timeout=seconds)
    connection.response_class = partial(_Reply, end)
    try:
        connection.connect()
        connection.sock.settimeout(max(end - time.monotonic(), 1e-3))
        content = None if body is None else to_json(body)  # a fifth of json's time, which other threads wait for
        connection.request("GET" if body is None else "POST", path, content, {"Content-Type": "application/json"})
        reply, blocks = connection.getresponse(), []
        while block := reply.read1(1 << 20):
            blocks.append(block)
        if reply.length:  # read1 does not mind a reply that ends early
            raise http.client.IncompleteRead(b"", reply.length)
    except TimeoutError:
        raise CallError(f"{path}: no complete reply within {seconds:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise CallError(f"{path}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    content = b"".join(blocks)
    if reply.status >= 400:
        kind = RefusedError if reply.status < 500 else StatusError
        raise kind(f"{path} answered {reply.status}: {content[:_LONGEST_REASON].decode(errors='replace')}")
    return content


def in_thread(work: Callable[[], _Result], *expected: type[Exception]) -> Future[_Result]:
    """The result of work in a thread that does not hold up the end of the process. Other errors than `CallError` and
    ``expected`` are faults of this program: their traceback is printed."""
    found: Future[_Result] = Future()

    def run() -> None:
        error: Exception = CallError("the client failed; see the traceback above")
        try:
            found.set_result(work())
        except Exception as raised:
            if not isinstance(raised, (CallError, *expected)):
                raise
            error = raised
        finally:
            if not found.done():
                found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found
