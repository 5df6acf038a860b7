"""Readers: cut input files into parts for the worker processes, and read the documents of one part.

Formats: rows of JSON, one per line, in an array or over several lines; Parquet; plain text. All but Parquet may be
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
from glm46.storage.prepare.archives import HEAD_BYTES, format_of, is_compressed, opened, refuse_other_format, suffix_in
from glm46.storage.prepare.json_rows import JsonText, refuse_object_of_rows, refuse_other_encoding, refuse_rows
from glm46.storage.prepare.parquet_rows import parquet_rows
from glm46.storage.prepare.rows import EMPTY, BadDocument, Document, Fields, read_row

# Target size of a part, the unit of parallel work.
PART_BYTES = 4_000_000

_JSON = {".jsonl", ".ndjson", ".json"}
_TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of rows that are not read, with what stands between columns."""


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
        fields: those of the rows.

    Raises:
        UserError: a file is not what its ending says, or holds no rows, and conversations are read.
    """
    parts, texts, size = [], [], 0
    for file in files:
        with _readable(file):
            file_size, kind = file.stat().st_size, _kind(file, fields)
        if kind == "text" and fields.format != "text":
            with opened(file) as stream:
                refuse_other_format(file, stream.read(HEAD_BYTES), "rows")
            raise UserError(
                f"{file}: does not hold rows with {fields.named}; format = '{fields.format}' reads .jsonl, .json and "
                ".parquet files; correct input or format"
            )
        if kind == "text":
            texts.append(str(file))
            size += file_size
        if texts and (kind != "text" or size >= PART_BYTES):
            parts.append(InputPart("text", tuple(texts), 0, 0, size))
            texts, size = [], 0
        if kind == "lines" and not is_compressed(file):
            for start in range(0, file_size, PART_BYTES):
                stop = min(start + PART_BYTES, file_size)
                parts.append(InputPart(kind, (str(file),), start, stop, stop - start))
        elif kind != "text":
            parts.append(InputPart(kind, (str(file),), 0, 2**62, file_size))
    return [*parts, InputPart("text", tuple(texts), 0, 0, size)] if texts else parts


def read_part(part: InputPart, fields: Fields) -> Iterator[Document | BadDocument]:
    """Yield the documents of a part in order, and a `BadDocument` in the place of each one that cannot be read.

    Raises:
        UserError: the whole file is unusable: damaged, in another format, or Parquet without the column.
    """
    if part.kind == "text":
        for file in part.files:
            yield _text(Path(file), fields)
        return
    columns = _columns(part.files[0], fields) if part.kind == "parquet" else None
    for place, row in _rows(part, columns):
        yield row if isinstance(row, BadDocument) else read_row(row, place, fields)


def file_rows(file: Path, key: str) -> Iterator[tuple[str, object]]:
    """The rows of a file with their places, whatever its ending; a `BadDocument` is one that cannot be read.

    Args:
        key: that each row should have.

    Raises:
        UserError: as `read_part`.
    """
    with _readable(file):
        kind = _kind(file, Fields(key))
        kind = _json_kind(file, Fields(key)) if kind == "text" else kind
    yield from _rows(InputPart(kind, (str(file),), 0, 2**62, 0))


def _rows(part: InputPart, columns: Sequence[str] | None = None) -> Iterator[tuple[str, object]]:
    file = Path(part.files[0])
    with _readable(file):
        if part.kind == "parquet":
            yield from _table_rows(file, columns)
        else:
            yield from _lines(part) if part.kind == "lines" else _values(file)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise UserError where a file of the input cannot be read, as one that has gone since it was listed."""
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # Parquet's own text repeats the path
        raise UserError(f"{file}: cannot be read: {why}; leave it out, or bring it back and grant access") from error


def _kind(file: Path, fields: Fields) -> str:
    suffix = suffix_in(file)
    if suffix == ".parquet":
        if is_compressed(file):
            raise UserError(f"{file}: Parquet is compressed inside; unpack the file, and give what is in it")
        with file.open("rb") as raw:
            refuse_other_format(file, raw.read(HEAD_BYTES), "Parquet")
        return "parquet"
    return _json_kind(file, fields) if suffix in _JSON else "text"


def _json_kind(file: Path, fields: Fields) -> str:
    """Return "lines" if a file has a row on each line, "values" if it has an array or rows over several lines; "text"
    if it is JSON without rows, and JSON is the text to learn.

    A first row that cannot be read leaves the others of lines readable.
    """
    with opened(file) as stream:
        head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
        refuse_other_encoding(file, head)
        refuse_other_format(file, head, "JSON")
        text = JsonText(stream)
        is_array = text.take("[") and text.peek() in ("{", "]", "")
        try:
            row = text.value()
        except ValueError:
            return "values" if is_array else "lines"
        has_key = isinstance(row, dict) and fields.are_in(row)
        if fields.json_is_text and suffix_in(file) == ".json" and not has_key:
            return "text"
        if is_array:
            return "values"
        is_line = text.fills_its_line()
        if isinstance(row, dict) and not has_key and not text.peek():
            refuse_object_of_rows(file, row, fields.named)
        return "lines" if is_line else "values"


def with_line(place: str) -> str:
    """Replace the byte offset in the place of a bad document by its line number, unless the file is compressed."""
    found = re.fullmatch(r"(.*) byte (\d+)( \(.*\))?", place, re.DOTALL)
    if not found or is_compressed(Path(found[1])):
        return place
    file, byte, detail = found.groups(default="")
    with open(file, "rb") as handle:
        left, line = int(byte), 1
        while left > 0 and (data := handle.read(min(left, 1 << 20))):
            left, line = left - len(data), line + data.count(b"\n")
    return f"{file} line {line}{detail}"


def _text(file: Path, fields: Fields) -> Document | BadDocument:
    with _readable(file), opened(file) as stream:
        data = stream.read()
    found = format_of(data[:HEAD_BYTES])
    if found is not None and found.remedy is not None:
        refuse_other_format(file, data[:HEAD_BYTES], "text")
    place = str(file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(bytes([10]), 0, error.start) + 1
        return BadDocument(f"not UTF-8 but {found.name}" if found else "not UTF-8", f"{place} line {line}")
    if "\0" in text:
        return BadDocument(f"not text but {found.name if found else 'binary, or UTF-16'}", place)
    if text.lstrip()[:1] in ("{", "[", "\x1e"):
        refuse_rows(file, data, fields)
    if between := _TABLES.get(suffix_in(file)):
        _refuse_table(file, text.lstrip().partition("\n")[0].strip().split(between), fields.text)
    return Document(text, place) if text.strip() else BadDocument(EMPTY, place)


def _refuse_table(file: Path, columns: list[str], text: str) -> None:
    if len(columns) > 1 or text in columns:
        raise UserError(
            f"{file}: holds rows of a table with the columns {', '.join(columns[:8])[:200]}, not a text; write them "
            "as Parquet or .jsonl and set text_key, or leave it out of the input"
        )


def _lines(part: InputPart) -> Iterator[tuple[str, object]]:
    file = Path(part.files[0])
    position, number = 0, 0
    with opened(file) as handle:
        if part.start:
            # The line that holds the byte before the range belongs to the previous part, unless it ends there.
            handle.seek(part.start - 1)
            position = part.start - 1 + len(handle.readline())
        while position < part.stop and (line := handle.readline()):
            number += 1
            # The line number is unknown inside a range; `with_line` finds it when it is shown.
            place = f"{file} byte {position}" if part.start else f"{file} line {number}"
            if line.strip(b"\x1e \t\r\n"):
                yield place, _row(line, place)
            position += len(line)


def _row(line: bytes, place: str) -> object:
    try:
        return loads(line.lstrip(b"\x1e"))
    except UnicodeDecodeError:
        return BadDocument("not UTF-8", place)
    except (ValueError, RecursionError):
        is_cut = not line.endswith(b"\n") and line.lstrip(b"\x1e \t")[:1] in (b"{", b"[", b'"')
        return BadDocument("truncated line" if is_cut else "not JSON", place)


def _values(file: Path) -> Iterator[tuple[str, object]]:
    with opened(file) as stream:
        rows = enumerate(JsonText(stream).rows())
        number = -1
        while True:
            try:
                number, row = next(rows)
            except StopIteration:
                return
            except ValueError as error:
                raise UserError(
                    f"{file}: damaged JSON behind row {number + 1} ({error}); fix it, or write one row per line as "
                    ".jsonl"
                ) from error
            yield f"{file} row {number}", row


def _columns(file: str, fields: Fields) -> list[str] | None:
    """The columns of a table to read; None: all.

    Raises:
        UserError: one is missing.
    """
    import pyarrow.parquet

    with _readable(Path(file)), _parquet_faults(file), pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
    found, is_text = f"its columns are {', '.join(names[:8])}", fields.format == "text"
    if not fields.are_in(names):
        raise UserError(f"{file}: no column {fields.named}; {found}; set {'text_key' if is_text else 'format'}")
    if fields.answer and fields.answer not in names:
        raise UserError(f"{file}: no column '{fields.answer}'; {found}; set answer_key")
    return [fields.text, *([fields.answer] if fields.answer else [])] if is_text else None


def _table_rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, object]]:
    with _parquet_faults(file):
        for number, row in enumerate(parquet_rows(file, columns)):
            yield f"{file} row {number}", row


@contextmanager
def _parquet_faults(file: Path | str) -> Iterator[None]:
    """Raise UserError for an error of pyarrow. An error of the disk stays one."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{file}: {_parquet_fault(error)}") from error


def _parquet_fault(error: Exception) -> str:
    """The fault of a file by the words of pyarrow's error: its classes do not tell damage from a missing codec."""
    words = str(error).lower()
    if "crypt" in words:
        return f"encrypted Parquet ({error}); write it without encryption"
    if isinstance(error, NotImplementedError) or re.search(r"not (currently )?supported|support for codec", words):
        return f"Parquet that this pyarrow does not read ({error}); write it anew with compression zstd"
    return f"damaged Parquet file ({error}); remove it, or download it again"
