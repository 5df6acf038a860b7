"""Readers: cut input files into parts for the worker processes, and read the documents of one part.

Formats: rows of JSON, one per line, in an array or over several lines; Parquet; plain text. All except Parquet may be
compressed.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import loads
from pathlib import Path

from glm46.config.errors import UserError
from glm46.storage.prepare.compressed import is_compressed, opened
from glm46.storage.prepare.file_kinds import file_kind, json_kind, refuse_other_format, refuse_rows
from glm46.storage.prepare.json_rows import LONG_LINE, JsonText, read_line
from glm46.storage.prepare.rows import EMPTY, BadDocument, Document, Fields, read_row

# Target size of a part, the unit of parallel work.
PART_BYTES = 4_000_000

_WHOLE_FILE = 2**62
"""End of the byte range of a part that is a whole file."""
_RECORD_SEPARATOR = b"\x1e"
"""Byte that begins each row of a JSON text sequence. Source: RFC 7464."""


@dataclass(frozen=True)
class InputPart:
    """One part of the input: whole text files, a byte range of one file of lines, or one file of rows.

    A compressed file and a file of rows are one part each. A line belongs to the range that holds its first byte.
    """

    kind: str
    files: tuple[str, ...]
    start: int
    stop: int
    size_bytes: int


def parts_of(files: Sequence[Path], fields: Fields) -> list[InputPart]:
    """Cut files into parts of about `PART_BYTES`, in the order of the files.

    Args:
        fields: fields of the rows.

    Raises:
        UserError: the content of a file does not match its ending, or conversations are read and a file holds no rows.
    """
    parts = []
    texts = []
    size = 0
    for file in files:
        with _readable(file):
            file_size = file.stat().st_size
            kind = file_kind(file, fields)
        if kind == "text" and fields.format != "text":
            raise UserError(
                f"{file}: does not hold rows with {fields.named}; format = '{fields.format}' reads .jsonl, .json and "
                ".parquet files; correct input or format"
            )
        if kind == "text":
            texts.append(str(file))
            size += file_size
        if texts and (kind != "text" or size >= PART_BYTES):
            parts.append(InputPart("text", tuple(texts), 0, 0, size))
            texts = []
            size = 0
        if kind == "lines" and not is_compressed(file):
            for start in range(0, file_size, PART_BYTES):
                stop = min(start + PART_BYTES, file_size)
                parts.append(InputPart(kind, (str(file),), start, stop, stop - start))
        elif kind != "text":
            parts.append(InputPart(kind, (str(file),), 0, _WHOLE_FILE, file_size))
    if texts:
        parts.append(InputPart("text", tuple(texts), 0, 0, size))
    return parts


def read_part(part: InputPart, fields: Fields) -> Iterator[Document | BadDocument]:
    """Yield the documents of a part in order; a `BadDocument` replaces each one that cannot be read.

    Raises:
        UserError: the whole file is unusable: damaged, in another format, or Parquet without the column.
    """
    if part.kind == "text":
        for file in part.files:
            yield _text(Path(file), fields)
        return
    for place, row in _rows(part, fields):
        yield row if isinstance(row, BadDocument) else read_row(row, place, fields)


def file_rows(file: Path, key: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a file with their places, whatever its ending; a `BadDocument` replaces one that cannot be
    read.

    Args:
        key: key that each row should have.

    Raises:
        UserError: see `read_part`.
    """
    fields = Fields(key)
    with _readable(file):
        kind = file_kind(file, fields)
        if kind == "text":
            kind = json_kind(file, fields)
    yield from _rows(InputPart(kind, (str(file),), 0, _WHOLE_FILE, 0))


def _rows(part: InputPart, fields: Fields | None = None) -> Iterator[tuple[str, object]]:
    """Yield the rows of a part with their places.

    Args:
        fields: fields that a table must have; None: all its columns are read.
    """
    file = Path(part.files[0])
    with _readable(file):
        if part.kind == "lines":
            yield from _lines(part)
        elif part.kind == "values":
            yield from _values(file)
        else:
            from glm46.storage.prepare.parquet_rows import parquet_rows, text_columns  # optional: the extra [data]

            columns = text_columns(file, fields) if fields is not None else None
            for number, row in enumerate(parquet_rows(file, columns)):
                yield f"{file} row {number}", row


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise UserError if a file of the input cannot be read, for example because it was removed after it was listed."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Parquet's own text repeats the path
        raise UserError(f"{file}: cannot be read: {reason}; leave it out, or bring it back and grant access") from error


def with_line(place: str) -> str:
    """Replace the byte offset in the place of a bad document by its line number, unless the file is compressed."""
    match = re.fullmatch(r"(.*) byte (\d+)( \(.*\))?", place, re.DOTALL)
    if not match or is_compressed(Path(match[1])):
        return place
    file, byte, detail = match.groups(default="")
    line = 1
    remaining = int(byte)
    with open(file, "rb") as handle:
        while remaining > 0:
            data = handle.read(min(remaining, 1 << 20))
            if not data:
                break
            remaining -= len(data)
            line += data.count(b"\n")
    return f"{file} line {line}{detail}"


def _text(file: Path, fields: Fields) -> Document | BadDocument:
    with _readable(file), opened(file) as stream:
        data = stream.read()
    refuse_other_format(file, data, "text")
    place = str(file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return BadDocument("not UTF-8", f"{place} line {line}")
    if "\0" in text:
        return BadDocument("not text but binary, or UTF-16", place)
    refuse_rows(file, text, fields)
    return Document(text, place) if text.strip() else BadDocument(EMPTY, place)


def _lines(part: InputPart) -> Iterator[tuple[str, object]]:
    file = Path(part.files[0])
    position = 0
    number = 0
    with opened(file) as handle:
        if part.start:
            # The line that holds the byte before the range belongs to the previous part: skip it. If that byte ends it,
            # nothing of this range is skipped.
            handle.seek(part.start - 1)
            position = part.start - 1 + read_line(handle).size
        while position < part.stop:
            line, size = read_line(handle)
            if not size:
                return
            number += 1
            # The line number is unknown inside a range; `with_line` finds it when it is shown.
            place = f"{file} byte {position}" if part.start else f"{file} line {number}"
            if line is None:
                yield place, BadDocument(LONG_LINE, place)
            elif line.strip(_RECORD_SEPARATOR + b" \t\r\n"):
                yield place, _row(line, place)
            position += size


def _row(line: bytes, place: str) -> object:
    try:
        return loads(line.lstrip(_RECORD_SEPARATOR))
    except UnicodeDecodeError:
        return BadDocument("not UTF-8", place)
    except (ValueError, RecursionError):
        is_truncated = not line.endswith(b"\n") and line.lstrip(_RECORD_SEPARATOR + b" \t")[:1] in (b"{", b"[", b'"')
        return BadDocument("truncated line" if is_truncated else "not JSON", place)


def _values(file: Path) -> Iterator[tuple[str, object]]:
    number = 0
    with opened(file) as stream:
        try:
            for row in JsonText(stream).rows():
                yield f"{file} row {number}", row
                number += 1
        except ValueError as error:
            raise UserError(
                f"{file}: damaged JSON at row {number} ({error}); fix it, or write one row per line as .jsonl"
            ) from error
