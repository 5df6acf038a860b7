"""What there is to read, cut into parts that processes can take, and the documents of one part.

JSON lines, JSON arrays of rows, Parquet and plain text; gzip and zstd around any but Parquet. What an optional package
reads is refused with its name where the package is missing.
"""

import codecs
import glob
import gzip
import importlib.util
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError
from glm46.prepare.embedded import BUILTIN, embedded_files

# Text per part where the input can be cut: the unit of parallel work.
PART_BYTES = 4_000_000

_LINES = {".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".zst"}
_EXTRA = {".zst": "zstandard", ".parquet": "pyarrow"}

_HEAD_BYTES = 1 << 20
"""Bytes in which a .json file shows whether it holds rows."""


# The reason of a document with nothing but white space.
EMPTY = "empty"


class BadDocument(Exception):
    """A document that cannot be read: the reason under which it is counted, and where it is."""


@dataclass(frozen=True)
class Part:
    """A piece of the input: whole files of one text each, a byte range of one file of lines, or one file of rows.

    A compressed file and a file of rows are one part each. A line belongs to the range that its first byte is in.
    """

    kind: str
    files: tuple[str, ...]
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True)
class Document:
    """One text, where it came from, and the known result beside it, if one was asked for."""

    text: str
    place: str
    answer: str | None = None


def find_files(patterns: Sequence[str], key: str) -> list[Path]:
    """The files that names, folders and globs mean, each once, in sorted order. Of a folder, no hidden file or folder.

    Args:
        patterns: as a user wrote them; ``builtin:NAME`` is an embedded source.
        key: the setting they come from, for messages.

    Raises:
        UserError: a pattern without a file, or a file that needs a package which is not installed.
    """
    found: dict[Path, Path] = {}
    faults = []
    for pattern in patterns:
        if pattern.startswith(BUILTIN):
            found.update({file: file for file in embedded_files(pattern.removeprefix(BUILTIN))})
            continue
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files = [f for name in names for f in (_below(Path(name)) if Path(name).is_dir() else [Path(name)])]
        files = [file for file in files if file.is_file()]
        if not files:
            hint = "; hidden files of a folder are left out" if Path(pattern).is_dir() else ""
            faults.append(f"{key} = '{pattern}': no file of that name; give a file, a folder or a glob{hint}")
        # Links often lead to one file many times, and one file twice is a duplicate that costs reading.
        found.update({file.resolve(): file for file in files})
    for suffix, package in _EXTRA.items():
        if importlib.util.find_spec(package) is None and (needs := [f for f in found if _suffix(f) == suffix]):
            faults.append(f"{needs[0]}: reading {suffix} needs {package}; pip install 'glm46[data]'")
    if faults:
        raise UserError(*faults)
    return sorted(found)


def _below(folder: Path) -> list[Path]:
    inside = sorted(folder.rglob("*"))
    return [path for path in inside if not any(name.startswith(".") for name in path.relative_to(folder).parts)]


def parts_of(files: Sequence[Path], text_key: str) -> list[Part]:
    """Parts of about `PART_BYTES`, in the order of the files.

    Args:
        text_key: field of the text in a row; a .json file that has it is read as rows.
    """
    parts, texts, size = [], [], 0
    for file in files:
        file_size = file.stat().st_size
        kind = _kind(file, text_key)
        if kind == "text":
            texts.append(str(file))
            size += file_size
        if texts and (kind != "text" or size >= PART_BYTES):
            parts.append(Part("text", tuple(texts), 0, 0, size))
            texts, size = [], 0
        if kind == "lines" and _suffix(file) not in _COMPRESSED:
            for start in range(0, file_size, PART_BYTES):
                stop = min(start + PART_BYTES, file_size)
                parts.append(Part(kind, (str(file),), start, stop, stop - start))
        elif kind != "text":
            parts.append(Part(kind, (str(file),), 0, 2**62, file_size))
    return [*parts, Part("text", tuple(texts), 0, 0, size)] if texts else parts


def read_part(part: Part, text_key: str, answer_key: str | None = None) -> Iterator[Document | BadDocument]:
    """The documents of a part in order; a bad one is given as the exception that says why.

    Args:
        text_key: field or column of the text.
        answer_key: that of a known result, read as well. A line without it gives none; a text file has none.

    Raises:
        UserError: the file itself is broken: a damaged archive, or a Parquet file without the column.
    """
    if part.kind == "text":
        for file in part.files:
            yield _text(_read_whole(Path(file)), file)
    elif part.kind == "lines":
        yield from _lines(part, text_key, answer_key)
    elif part.kind == "array":
        yield from _array(Path(part.files[0]), text_key, answer_key)
    else:
        yield from _rows(part.files[0], text_key, answer_key)


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def _kind(file: Path, text_key: str) -> str:
    suffix = _suffix(Path(file.stem)) if _suffix(file) in _COMPRESSED else _suffix(file)
    if suffix == ".json":
        return _json_kind(file, text_key)
    return "lines" if suffix in _LINES else "parquet" if suffix == ".parquet" else "text"


def _json_kind(file: Path, text_key: str) -> str:
    """An array or lines of rows where the first row has the text's field; any other .json file is a text."""
    try:
        with _open(file) as handle:
            head = handle.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    except _archive_errors(file):
        return "text"  # refused with its name when it is read
    if re.match(rb"\[\s*\{", head):
        return "array" if re.search(re.escape(json.dumps(text_key).encode()) + rb"\s*:", head) else "text"
    try:
        row = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return "text"
    return "lines" if isinstance(row, dict) and text_key in row else "text"


def with_line(place: str) -> str:
    """The place of a bad document with the number of its line where it says a byte."""
    file, found, byte = place.rpartition(" byte ")
    if not found or _suffix(Path(file)) in _COMPRESSED:
        return place
    with open(file, "rb") as handle:
        left, line = int(byte), 1
        while left > 0 and (data := handle.read(min(left, 1 << 20))):
            left, line = left - len(data), line + data.count(b"\n")
    return f"{file} line {line}"


def _open(file: Path):
    if _suffix(file) == ".gz":
        return gzip.open(file, "rb")
    if _suffix(file) == ".zst":
        return io.BufferedReader(_ZstdReader(file), 1 << 20)
    return file.open("rb")


class _ZstdReader(io.RawIOBase):
    """Text of a .zst file. Its own stream ends without a word in a file that was cut; this one raises EOFError."""

    def __init__(self, file: Path):
        import zstandard

        self._handle, self._new_frame = file.open("rb"), zstandard.ZstdDecompressor().decompressobj
        self._frame, self._waiting, self._in_frame = self._new_frame(), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._waiting:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._in_frame = self._new_frame(), False
            data = data or self._handle.read(1 << 17)
            if not data:
                if self._in_frame:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._in_frame = True
            self._waiting = self._frame.decompress(data)
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count

    def close(self) -> None:
        self._handle.close()
        super().close()


def _archive_errors(file: Path) -> tuple[type[Exception], ...]:
    """What a damaged archive raises while it is read."""
    if _suffix(file) == ".zst":
        import zstandard

        return (zstandard.ZstdError, EOFError)
    # zlib.error has no other public base.
    return (gzip.BadGzipFile, EOFError, gzip.zlib.error) if _suffix(file) == ".gz" else ()


def _read_whole(file: Path) -> bytes:
    try:
        with _open(file) as handle:
            return handle.read()
    except _archive_errors(file) as error:
        raise UserError(f"{file}: damaged archive ({error}); remove it or fetch it again") from error


def _text(data: bytes, place: str) -> Document | BadDocument:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadDocument("not UTF-8", f"{place} line {data.count(bytes([10]), 0, error.start) + 1}")
    return Document(text, place) if text.strip() else BadDocument(EMPTY, place)


def _lines(part: Part, text_key: str, answer_key: str | None) -> Iterator[Document | BadDocument]:
    file = Path(part.files[0])
    position, number = 0, 0
    try:
        with _open(file) as handle:
            if part.start:
                # The line that the byte before the range belongs to is not ours, unless it ends there.
                handle.seek(part.start - 1)
                position = part.start - 1 + len(handle.readline())
            while position < part.stop and (line := handle.readline()):
                number += 1
                # Lines before a range are not counted here, see `with_line`.
                place = f"{file} byte {position}" if part.start else f"{file} line {number}"
                yield from _json_line(line, place, text_key, answer_key)
                position += len(line)
    except _archive_errors(file) as error:
        raise UserError(
            f"{file}: damaged archive near text byte {position} ({error}); remove it or fetch it again"
        ) from error


def _json_line(line: bytes, place: str, text_key: str, answer_key: str | None) -> Iterator[Document | BadDocument]:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        yield BadDocument("not UTF-8", place)
    except (ValueError, RecursionError):
        yield BadDocument("not JSON" if line.endswith(b"\n") else "truncated line", place)
    else:
        yield _row(row, place, text_key, answer_key)


def _array(file: Path, text_key: str, answer_key: str | None) -> Iterator[Document | BadDocument]:
    data = _read_whole(file)
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: a damaged array of rows ({error}); mend it, or write one row a line and call it .jsonl"
        ) from error
    for number, row in enumerate(rows):
        yield _row(row, f"{file} row {number}", text_key, answer_key)


def _row(row: object, place: str, text_key: str, answer_key: str | None) -> Document | BadDocument:
    row = row if isinstance(row, dict) else {}
    return _field(row.get(text_key), place, text_key, row.get(answer_key))


def _field(text: object, place: str, text_key: str, answer: object) -> Document | BadDocument:
    if not isinstance(text, str):
        return BadDocument(f"no text in field '{text_key}'", place)
    # JSON can spell half a surrogate pair, which is no character and has no UTF-8.
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        return BadDocument("not UTF-8", place)
    # Results are often stored as numbers; true and false are none.
    answer = str(answer) if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) else None
    return Document(text, place, answer) if text.strip() else BadDocument(EMPTY, place)


def _rows(file: str, text_key: str, answer_key: str | None) -> Iterator[Document | BadDocument]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = {"text_key": text_key} | ({"answer_key": answer_key} if answer_key else {})
            for key, column in columns.items():
                if column not in table.schema_arrow.names:
                    there = ", ".join(table.schema_arrow.names[:8])
                    raise UserError(f"{file}: no column '{column}'; it has {there}; set {key}")
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=list(columns.values())):
                for row in batch.to_pylist():
                    yield _field(row[text_key], f"{file} row {number}", text_key, row.get(answer_key))
                    number += 1
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: damaged Parquet file ({error}); remove it or fetch it again") from error
