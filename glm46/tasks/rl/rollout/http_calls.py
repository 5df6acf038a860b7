"""JSON over HTTP with a deadline for the whole call."""

import asyncio
import ssl
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from glm46.config.errors import UserError

with suppress(ImportError):  # it is needed for servers alone, see `require_http_client`
    import httpx

_Result = TypeVar("_Result")
_MAX_REASON = 400
_MAX_REPLY_BYTES = 2**30
"""Larger than a reply of 200,000 tokens with the experts of each layer."""
_LARGE_BYTES = 2**16
_PARSER = ThreadPoolExecutor(1, thread_name_prefix="large replies")
"""Parses large replies. One thread: a parser keeps Python's lock, and the loop gets it between two replies."""
_HEADERS = {
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",
}


class CallError(Exception):
    """A call failed or its reply is invalid, because of the server, the network or the request; see the message."""


class StatusError(CallError):
    """The server answered with an error status."""


class RefusedError(StatusError):
    """The server refused the request (4xx), and would refuse it again."""


class ForgottenError(CallError):
    """The server no longer has the weights that it was sent, because it was restarted."""


def require_http_client() -> None:
    """Return if the package for HTTP can be imported.

    Raises:
        UserError: it cannot.
    """
    try:
        import_module("httpx")
    except ImportError as error:
        reason = "is not installed" if error.name == "httpx" else f"cannot be imported ({error})"
        raise UserError(
            f"rollout.kind: inference servers need httpx, which {reason}; pip install 'glm46[rl]'"
        ) from error


async def call(url: str, path: str, body: Any = None, *, seconds: float) -> Any:
    """POST `body` as JSON, or GET without one, and return the JSON reply; None if it is empty.

    Args:
        url: base URL such as ``http://host:8000``.
        seconds: time until the last byte of the reply, however slowly the server sends.

    Raises:
        RefusedError: the reply is 4xx.
        StatusError: it is 5xx, or a redirect.
        CallError: no connection, no complete reply in time, or a reply that is not JSON or is longer than any other.
    """
    content = await exchange(url, path, body, seconds=seconds)
    try:
        if len(content) > _LARGE_BYTES:
            return await asyncio.get_running_loop().run_in_executor(_PARSER, from_json, content)
        return from_json(content) if content else None
    except ValueError:
        raise CallError(f"{path}: the reply is not JSON: {content[:80]!r}") from None


async def exchange(url: str, path: str, body: Any = None, *, seconds: float) -> bytes:
    """Return the bytes of the reply; arguments and errors are those of `call`."""
    # Five times faster than json, which would block the loop longer.
    content = None if body is None else to_json(body)
    method = "GET" if body is None else "POST"
    try:
        # A client for each call: a shared one searches all its open connections at each call. It reads no proxy and no
        # password from the environment, and follows no redirect.
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(verify=_tls(), trust_env=False, follow_redirects=False, timeout=None) as client,
            client.stream(method, url + path, content=content, headers=_HEADERS) as reply,
        ):
            received = bytearray()
            async for block in reply.aiter_raw():  # raw: whatever the reply declares, it is not decompressed
                received += block
                if len(received) > _MAX_REPLY_BYTES:
                    raise CallError(f"{path}: the reply is longer than {_MAX_REPLY_BYTES} bytes")
    except TimeoutError:
        raise CallError(f"{path}: no complete reply within {seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise CallError(_reason(path, error)) from None
    if not reply.is_success:  # redirects are not followed
        kind = RefusedError if reply.is_client_error else StatusError
        raise kind(f"{path} answered {reply.status_code}: {received[:_MAX_REASON].decode(errors='replace')}")
    return bytes(received)


@cache
def _tls() -> ssl.SSLContext:
    """Trust the certificates of the system, as Python's own clients do."""
    return ssl.create_default_context()


def _reason(path: str, error: Exception) -> str:
    """Return the message for a call without a reply."""
    innermost: BaseException = error
    cause: BaseException | None = error
    while cause is not None:
        members = getattr(cause, "exceptions", ())  # a group, for a host with several addresses
        if any(isinstance(member, ConnectionRefusedError) for member in (cause, *members)):
            return "connection refused"  # nothing listens there, whatever the path
        if isinstance(cause, OSError):
            innermost = cause  # httpx's own text does not have the reason of the system
        cause = members[0] if members else cause.__cause__ or cause.__context__
    return f"{path}: {type(innermost).__name__}: {innermost}"


async def guarded(begin: Callable[[], Awaitable[_Result]]) -> _Result:
    """Begin a call and return its result. Errors other than `CallError` are bugs of this client: their traceback is
    printed, because the message about the server does not explain them."""
    try:
        return await begin()
    except Exception as error:
        if isinstance(error, CallError):
            raise
        traceback.print_exc()
        raise CallError("the client failed; see the traceback above") from None
