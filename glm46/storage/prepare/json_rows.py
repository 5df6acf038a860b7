"""Rows of JSON in a stream: arrays of rows, rows one after the other, or both; one row in memory at a time. Files that
hold JSON which is read in no other way than as a mistake are refused with what makes them readable."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from json import detect_encoding, dumps
from pathlib import Path
from typing import Any, BinaryIO

from glm46.config.errors import UserError
from glm46.storage.prepare.archives import is_compressed
from glm46.storage.prepare.rows import Fields

_READ_CHARACTERS = 1 << 20
MAX_ROW_CHARACTERS = 1 << 26
"""Longest row of an array or over several lines, which bounds the memory for a file that is not JSON."""

_SPACE = re.compile(r"[ \t\r\n\x1e]*")
"""White space of JSON, and the character that RFC 7464 puts before each row."""
_decode = json.JSONDecoder().raw_decode


def _behind_space(text: str, at: int) -> int:
    """The place of the next character, skipping white space."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


class JsonText:
    """The values of a stream of UTF-8, read when they are asked for.

    Other bytes become halves of surrogate pairs, so that only the text with them is lost.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self._text, self._at, self._start = "", 0, 0

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._at = _behind_space(self._text, self._at)
            if self._at < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1]

    def take(self, character: str) -> bool:
        """True if this is the next character; it is read then."""
        is_next = self.peek() == character
        self._at += is_next
        return is_next

    def value(self) -> Any:
        """The next value.

        Raises:
            ValueError: there is none, it is malformed, or it is longer than `MAX_ROW_CHARACTERS`.
        """
        self.peek()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MAX_ROW_CHARACTERS:
                    raise ValueError(f"no row within {MAX_ROW_CHARACTERS:,} characters") from error
                if not self._fill():
                    raise ValueError(getattr(error, "msg", "nested too deeply")) from error
                continue
            # A number may go on behind what was read.
            if end < len(self._text) or not self._fill():
                self._start, self._at = self._at, end
                return value

    def fills_its_line(self) -> bool:
        """True if the last value has no line end inside, and no other row follows on its line."""
        if "\n" in self._text[self._start : self._at]:
            return False
        while True:
            end = _behind_space(self._text, self._at)
            space, self._at = self._text[self._at : end], end
            if "\n" in space:
                return True
            if end < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1] not in ("{", "[")

    def rows(self) -> Iterator[Any]:
        """All values; those of arrays instead of the arrays.

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
                    raise ValueError("neither , nor ] behind a row")

    def _fill(self) -> bool:
        """Read as much as is left to read again, so that a long row is decoded few times; whether there was more."""
        more = self._stream.read(max(_READ_CHARACTERS, len(self._text) - self._at))
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def refuse_other_encoding(file: Path, head: bytes) -> None:
    """Raise UserError if a file is JSON in UTF-16 or UTF-32, with or without a byte order mark."""
    encoding = detect_encoding(head)
    text = head.decode(encoding, "ignore").lstrip("\ufeff\x1e \t\r\n")
    if not encoding.startswith("utf-8") and text[:1] in ("{", "["):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
        unpacked = ", unpacked," if is_compressed(file) else ""
        raise UserError(
            f"{file}: holds {name}, not JSON in UTF-8; write it{unpacked} as UTF-8 "
            f"(iconv -f {name} -t UTF-8 '{file}' > FILE.jsonl)"
        )


def refuse_object_of_rows(file: Path, value: dict, named: str) -> None:
    """Raise UserError if the only value of a file is an object that holds rows under a key of its own.

    Args:
        named: the fields that it lacks.
    """
    for key, rows in value.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            raise UserError(
                f"{file}: one object without {named}, with {len(rows):,} rows under '{key}'; write the rows one "
                f"per line: jq -c '.[{dumps(key)}][]' '{file}' > FILE.jsonl"
            )


def refuse_rows(file: Path, data: bytes, fields: Fields) -> None:
    """Raise UserError if a text is rows, which another ending would have told: it begins with one that has the text,
    with two objects, or with an array of objects."""
    text, found = JsonText(BytesIO(data)), []
    is_array = text.peek() == "["
    with suppress(ValueError):
        for row in islice(text.rows(), 2):
            found.append(row)
    if not found or not all(isinstance(row, dict) for row in found):
        return
    ending = "".join([".json", file.suffix if is_compressed(file) else ""])
    if isinstance(found[0].get(fields.text), str):
        raise UserError(f"{file}: holds rows of JSON with '{fields.text}', not a text; give it the ending {ending}")
    if fields.json_is_text:
        return
    if is_array or len(found) == 2:
        keys = ", ".join(list(found[0])[:8])
        raise UserError(
            f"{file}: holds rows of JSON without '{fields.text}', not a text; their keys are {keys}: set text_key and "
            f"give it the ending {ending}, or leave it out of the input"
        )
    if any(
        isinstance(rows, list) and rows and isinstance(rows[0], dict) and fields.text in rows[0]
        for rows in found[0].values()
    ):
        refuse_object_of_rows(file, found[0], fields.named)
