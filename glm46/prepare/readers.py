"""Readers: cut input files into parts for the worker processes, and read the documents of one part.

Formats: JSON lines, JSON arrays of rows, Parquet and plain text; all but Parquet may be compressed with gzip or zstd.
"""

import codecs
import gzip
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError
from glm46.data.parquet_rows import parquet_rows
from glm46.prepare.rows import EMPTY, BadDocument, Document, Fields, read_row

# Target size of a part, the unit of parallel work.
PART_BYTES = 4_000_000

_LINES = {".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".zst"}

# Bytes read of a .json file to detect whether it holds rows.
_HEAD_BYTES = 1 << 20


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
        fields: a .json file that has the field of the text is read as rows.

    Raises:
        UserError: a file does not hold rows, and conversations are read.
    """
    parts, texts, size = [], [], 0
    for file in files:
        file_size = file.stat().st_size
        kind = _kind(file, fields.text)
        if kind == "text" and fields.format != "text":
            raise UserError(
                f"{file}: does not hold rows with '{fields.text}'; format = '{fields.format}' reads .jsonl, .json and "
                ".parquet files; correct input or format"
            )
        if kind == "text":
            texts.append(str(file))
            size += file_size
        if texts and (kind != "text" or size >= PART_BYTES):
            parts.append(InputPart("text", tuple(texts), 0, 0, size))
            texts, size = [], 0
        if kind == "lines" and _suffix(file) not in _COMPRESSED:
            for start in range(0, file_size, PART_BYTES):
                stop = min(start + PART_BYTES, file_size)
                parts.append(InputPart(kind, (str(file),), start, stop, stop - start))
        elif kind != "text":
            parts.append(InputPart(kind, (str(file),), 0, 2**62, file_size))
    return [*parts, InputPart("text", tuple(texts), 0, 0, size)] if texts else parts


def read_part(part: InputPart, fields: Fields) -> Iterator[Document | BadDocument]:
    """Yield the documents of a part in order, and a `BadDocument` in the place of each one that cannot be read.

    Raises:
        UserError: the whole file is unusable: a damaged archive, or a Parquet file without the column.
    """
    if part.kind == "text":
        for file in part.files:
            yield _text(_read_whole(Path(file)), file)
    elif part.kind == "lines":
        yield from _lines(part, fields)
    elif part.kind == "array":
        yield from _array(Path(part.files[0]), fields)
    else:
        yield from _rows(part.files[0], fields)


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def _kind(file: Path, text_key: str) -> str:
    suffix = _suffix(Path(file.stem)) if _suffix(file) in _COMPRESSED else _suffix(file)
    if suffix == ".json":
        return _json_kind(file, text_key)
    return "lines" if suffix in _LINES else "parquet" if suffix == ".parquet" else "text"


def _json_kind(file: Path, text_key: str) -> str:
    """Return "array" or "lines" if the first row of a .json file has the field of the text, else "text"."""
    try:
        with _open(file) as handle:
            head = handle.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    except _archive_errors(file):
        return "text"  # reading it raises the error
    if re.match(rb"\[\s*\{", head):
        return "array" if re.search(re.escape(json.dumps(text_key).encode()) + rb"\s*:", head) else "text"
    try:
        row = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return "text"
    return "lines" if isinstance(row, dict) and text_key in row else "text"


def with_line(place: str) -> str:
    """Replace the byte offset in the place of a bad document by its line number, unless the file is compressed."""
    found = re.fullmatch(r"(.*) byte (\d+)( \(.*\))?", place, re.DOTALL)
    if not found or _suffix(Path(found[1])) in _COMPRESSED:
        return place
    file, byte, detail = found.groups(default="")
    with open(file, "rb") as handle:
        left, line = int(byte), 1
        while left > 0 and (data := handle.read(min(left, 1 << 20))):
            left, line = left - len(data), line + data.count(b"\n")
    return f"{file} line {line}{detail}"


def _open(file: Path):
    if _suffix(file) == ".gz":
        return gzip.open(file, "rb")
    if _suffix(file) == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"), 1 << 20)
    return file.open("rb")


def _archive_errors(file: Path) -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged archive raises."""
    # zlib.error has no other public base; pyarrow raises a plain OSError.
    errors = {".gz": (gzip.BadGzipFile, EOFError, gzip.zlib.error), ".zst": (OSError,)}
    return errors.get(_suffix(file), ())


def _read_whole(file: Path) -> bytes:
    try:
        with _open(file) as handle:
            return handle.read()
    except _archive_errors(file) as error:
        raise UserError(f"{file}: damaged archive ({error}); remove it, or download it again") from error


def _text(data: bytes, place: str) -> Document | BadDocument:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadDocument("not UTF-8", f"{place} line {data.count(bytes([10]), 0, error.start) + 1}")
    return Document(text, place) if text.strip() else BadDocument(EMPTY, place)


def _lines(part: InputPart, fields: Fields) -> Iterator[Document | BadDocument]:
    file = Path(part.files[0])
    position, number = 0, 0
    try:
        with _open(file) as handle:
            if part.start:
                # The line that holds the byte before the range belongs to the previous part, unless it ends there.
                handle.seek(part.start - 1)
                position = part.start - 1 + len(handle.readline())
            while position < part.stop and (line := handle.readline()):
                number += 1
                # The line number is unknown inside a range; `with_line` finds it when it is shown.
                place = f"{file} byte {position}" if part.start else f"{file} line {number}"
                yield from _json_line(line, place, fields)
                position += len(line)
    except _archive_errors(file) as error:
        raise UserError(
            f"{file}: damaged archive near text byte {position} ({error}); remove it, or download it again"
        ) from error


def _json_line(line: bytes, place: str, fields: Fields) -> Iterator[Document | BadDocument]:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        yield BadDocument("not UTF-8", place)
    except (ValueError, RecursionError):
        yield BadDocument("not JSON" if line.endswith(b"\n") else "truncated line", place)
    else:
        yield read_row(row, place, fields)


def _array(file: Path, fields: Fields) -> Iterator[Document | BadDocument]:
    data = _read_whole(file)
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: damaged array of rows ({error}); fix it, or write one row per line as .jsonl"
        ) from error
    for number, row in enumerate(rows):
        yield read_row(row, f"{file} row {number}", fields)


def _rows(file: str, fields: Fields) -> Iterator[Document | BadDocument]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            is_text = fields.format == "text"
            columns = {"text_key" if is_text else "format": fields.text}
            columns |= {"answer_key": fields.answer} if fields.answer else {}
            for key, column in columns.items():
                if column not in table.schema_arrow.names:
                    names = ", ".join(table.schema_arrow.names[:8])
                    raise UserError(f"{file}: no column '{column}'; its columns are {names}; set {key}")
        for number, row in enumerate(parquet_rows(file, list(columns.values()) if is_text else None)):
            yield read_row(row, f"{file} row {number}", fields)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: damaged Parquet file ({error}); remove it, or download it again") from error
