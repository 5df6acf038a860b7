"""JSON over HTTP with a deadline for the whole call."""

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

_LONGEST_REASON = 400


class CallError(Exception):
    """A call failed or its reply makes no sense; the message says why. The server may be at fault, or the network."""


class RefusedError(CallError):
    """The server understood the request and refuses it (4xx): another server would refuse it too."""


class ForgottenError(CallError):
    """The server has none of the weights that it was given: it was started again."""


def call(url: str, path: str, body: Any = None, *, seconds: float) -> Any:
    """POST `body` as JSON, or GET without one, and return the JSON reply; None if it is empty.

    Args:
        url: such as ``http://host:8000``.
        seconds: from now to the last byte of the reply. A server that sends a byte now and then gains no time.

    Raises:
        RefusedError: the reply is 4xx.
        CallError: no connection, no complete reply in time, a 5xx, or a reply that is not JSON.
    """
    content = exchange(url, path, body, seconds=seconds)
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise CallError(f"{path}: the reply is not JSON: {content[:80]!r}") from None


def exchange(url: str, path: str, body: Any = None, *, seconds: float) -> bytes:
    """The reply of `call` as it is."""
    parts, end = urlsplit(url), time.monotonic() + seconds
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
        socket = connection.sock
        reply, blocks = connection.getresponse(), []
        while block := reply.read1(1 << 20):
            blocks.append(block)
            socket.settimeout(max(end - time.monotonic(), 1e-3))
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
        kind = RefusedError if reply.status < 500 else CallError
        raise kind(f"{path} answered {reply.status}: {content[:_LONGEST_REASON].decode(errors='replace')}")
    return content
