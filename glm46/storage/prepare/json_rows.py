"""Rows of JSON in a stream: arrays of rows, rows one after another, or both, with one row in memory at a time."""

import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_READ_CHARACTERS = 1 << 20
MAX_ROW_CHARACTERS = 1 << 26
"""Longest row: in characters for a row in an array or over several lines, in bytes for a row on one line. It bounds the
memory for a file that is not JSON, or that unpacks to one endless line."""
LONG_LINE = "line of more than 64 MiB"
"""Reason for refusing a line above `MAX_ROW_CHARACTERS`."""

_SPACE = re.compile(r"[ \t\r\n\x1e]*")
"""White space of JSON, and the character that RFC 7464 puts before each row."""
_decode = json.JSONDecoder().raw_decode


class Line(NamedTuple):
    """One line of a stream."""

    content: bytes | None
    """Line with its end; None if it is longer than `MAX_ROW_CHARACTERS`. Empty at the end of the stream."""
    size: int
    """Length in bytes."""


def read_line(stream: BinaryIO) -> Line:
    """Read the next line in bounded memory."""
    line = stream.readline(MAX_ROW_CHARACTERS)
    size = len(line)
    if size < MAX_ROW_CHARACTERS or line.endswith(b"\n"):
        return Line(line, size)
    chunk = stream.readline(_READ_CHARACTERS)
    if not chunk:
        return Line(line, size)
    while chunk:
        size += len(chunk)
        if chunk.endswith(b"\n"):
            break
        chunk = stream.readline(_READ_CHARACTERS)
    return Line(None, size)


class JsonText:
    """JSON values of a UTF-8 stream, read on request.

    Invalid bytes become halves of surrogate pairs, so that only the texts that contain them are lost.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self._text = ""
        self._at = 0
        self._start = 0

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        self._skip_space()
        return self._text[self._at : self._at + 1]

    def take(self, character: str) -> bool:
        """Consume the next character if it is this one; return whether it was."""
        is_next = self.peek() == character
        self._at += is_next
        return is_next

    def value(self) -> object:
        """Read the next value.

        Raises:
            ValueError: there is no value, it is malformed, or it is longer than `MAX_ROW_CHARACTERS`.
        """
        self._skip_space()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MAX_ROW_CHARACTERS:
                    raise ValueError(f"no row within {MAX_ROW_CHARACTERS:,} characters") from error
                if not self._fill():
                    raise ValueError(getattr(error, "msg", "nested too deeply")) from error
                continue
            # A number may continue after the text that was read so far.
            if end < len(self._text) or not self._fill():
                self._start = self._at
                self._at = end
                return value

    def fills_its_line(self) -> bool:
        """Return True if the last value contains no line end, and no other row follows on its line."""
        if "\n" in self._text[self._start : self._at]:
            return False
        return self._skip_space() or self.peek() not in ("{", "[")

    def rows(self) -> Iterator[object]:
        """Yield all values; for arrays their entries.

        Raises:
            ValueError: the rest is not JSON.
        """
        while self.peek():
            if not self.take("["):
                yield self.value()
                continue
            while not self.take("]"):
                yield self.value()
                if not self.take(",") and self.peek() != "]":
                    raise ValueError("neither , nor ] after a row")

    def _skip_space(self) -> bool:
        """Consume white space; return whether it holds a line end."""
        has_line_end = False
        while True:
            space = _SPACE.match(self._text, self._at)
            if space is not None:  # the pattern matches the empty text too
                has_line_end |= "\n" in space[0]
                self._at = space.end()
            if self._at < len(self._text) or not self._fill():
                return has_line_end

    def _fill(self) -> bool:
        """Read at least as much as the unread text, so that a long row is decoded only a few times; return False at the
        end."""
        more = self._stream.read(max(_READ_CHARACTERS, len(self._text) - self._at))
        if more:
            self._text = self._text[self._at :] + more
            self._at = 0
        return bool(more)
