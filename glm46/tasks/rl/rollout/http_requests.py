"""HTTP/1.1 for the endpoint that programs connect to: reading of requests, and responses."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from string import hexdigits

COMMENT_SECONDS = 5.0
"""Seconds between two comments on a stream while its turn is generated. Clients may close a silent stream."""
_LINE_END = b"\r\n"
_COMMENT = b": the turn is being generated\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nConnection: close\r\n\r\n"
)
_READ_BYTES = 2**16
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
    503: "Service Unavailable",
}


class Client:
    """The connection of one request, until its response is written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self.is_streaming = False
        """True once the head of a stream is sent."""

    @property
    def is_gone(self) -> bool:
        """True if the program has closed the connection."""
        return self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing()

    def begin_stream(self) -> None:
        """Send the head of a stream of events."""
        self._writer.write(_STREAM_HEAD)
        self.is_streaming = True

    async def wait(self, answered: asyncio.Event) -> None:
        """Wait until `answered` is set. A stream gets comments meanwhile.

        Raises:
            ConnectionResetError: the program closes the connection before.
        """
        gone = asyncio.ensure_future(self._until_gone())
        ready = asyncio.ensure_future(answered.wait())
        try:
            while not answered.is_set():
                await asyncio.wait((gone, ready), timeout=COMMENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ConnectionResetError("the program has closed the connection")
                if self.is_streaming and not answered.is_set():
                    self._writer.write(_COMMENT)
        finally:
            gone.cancel()
            ready.cancel()

    async def _until_gone(self) -> None:
        """Return when the program closes the connection. Bytes after the request are read and ignored."""
        with suppress(OSError):
            while await self._reader.read(_READ_BYTES):
                pass


def response(status: int, text: str, kind: str = "application/json") -> bytes:
    """Return a whole response, after which the connection is closed."""
    body = text.encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def bearer_key(headers: Mapping[str, str]) -> str:
    """Return the key of `Authorization: Bearer KEY`, or an empty text."""
    # Schemes may be in upper or lower case (RFC 9110).
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def body_length(headers: Mapping[str, str]) -> int:
    """Return the declared length of a body in bytes; 0 for chunks. Raises ValueError if it is not a number."""
    if _is_in_chunks(headers):
        return 0
    return _number(headers.get("content-length") or "0", 10)


def _is_in_chunks(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers


def _number(digits: str, base: int) -> int:
    """Read a number of HTTP. Raises ValueError also for signs and underscores, which `int` takes and HTTP forbids."""
    if set(digits) - set(hexdigits):
        raise ValueError(digits)
    return int(digits, base)


async def body_parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the parts of a body, of a declared length or in chunks.

    Raises:
        EOFError: the connection ends before the body.
        ValueError: a length is not a number, or a chunk is longer than declared.
        asyncio.LimitOverrunError: a line is too long.
    """
    if not _is_in_chunks(headers):
        async for part in _parts(reader, body_length(headers)):
            yield part
        return
    while True:
        size_line = await reader.readuntil(_LINE_END)
        size = _number(size_line.partition(b";")[0].decode("latin-1").strip(), 16)
        if size == 0:
            break
        async for part in _parts(reader, size):
            yield part
        if await reader.readuntil(_LINE_END) != _LINE_END:
            raise ValueError("no end of a chunk")
    # Header fields may follow the last chunk. An empty line ends the body.
    while await reader.readuntil(_LINE_END) != _LINE_END:
        pass


async def _parts(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """Yield the next `length` bytes in parts of at most 64 KiB."""
    while length > 0:
        part = await reader.readexactly(min(length, _READ_BYTES))
        length -= len(part)
        yield part
