"""The kind of an input file, by its ending and its first row; files of other formats are refused."""

from contextlib import suppress
from io import BytesIO
from itertools import islice
from json import detect_encoding, dumps
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.storage.prepare.compressed import COMPRESSED_SUFFIXES, inner_suffix, is_compressed, opened
from glm46.storage.prepare.json_rows import JsonText
from glm46.storage.prepare.rows import Fields

_HEAD_BYTES = 512
"""Number of first bytes that identify a file of another format."""

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Endings of tables, which are not read -> separator of their columns."""

_OTHER_FORMATS = (
    b"\x1f\x8b",  # gzip
    b"\x28\xb5\x2f\xfd",  # zstd
    b"BZh",  # bzip2
    b"\xfd7zXZ\x00",  # xz
    b"\x5d\x00\x00",  # lzma
    b"PAR1",  # Parquet
    b"PK\x03\x04",  # zip
    b"\xff\xff\xff\xff",  # a stream of Arrow, as `save_to_disk` of Hugging Face's datasets writes it
    b"version https://git-lfs.github.com/spec/",  # a pointer of Git LFS instead of the file
)
"""First bytes of formats in which data sets are published. Without this check such a file would be one bad document,
and the pointer a text."""
_TAR_MAGIC = b"ustar"
_TAR_MAGIC_OFFSET = 257


def file_kind(file: Path, fields: Fields) -> str:
    """Return "parquet"; "lines" for JSON with a row on each line; "values" for other JSON; or "text".

    Raises:
        UserError: the file has another format than its ending.
    """
    suffix = inner_suffix(file)
    if suffix == ".parquet":
        if is_compressed(file):
            raise _wrong_format(file, "Parquet")
        return "parquet"
    return json_kind(file, fields) if suffix in _JSON_SUFFIXES else "text"


def json_kind(file: Path, fields: Fields) -> str:
    """Return "lines" if a file has a row on each line, "values" if it has an array or rows over several lines; "text"
    if it is JSON without rows, and JSON is the text to learn.

    If the first row cannot be read, the other lines still can.

    Raises:
        UserError: the file is not JSON in UTF-8.
    """
    with opened(file) as stream:
        head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
        refuse_other_format(file, head, "JSON")
        if _is_other_encoding(head):
            raise _wrong_format(file, "JSON")
        text = JsonText(stream)
        is_array = text.take("[") and text.peek() in ("{", "]", "")
        try:
            row = text.value()
        except ValueError:
            return "values" if is_array else "lines"
        is_row = isinstance(row, dict) and fields.are_in(row)
        if fields.json_is_text and inner_suffix(file) == ".json" and not is_row:
            return "text"
        if is_array:
            return "values"
        is_line = text.fills_its_line()
        if isinstance(row, dict) and not is_row and not text.peek():
            _refuse_object_of_rows(file, row, fields)
        return "lines" if is_line else "values"


def refuse_other_format(file: Path, content: bytes, expected: str) -> None:
    """Raise UserError if the content of a file begins as a format that is not text."""
    if content.startswith(_OTHER_FORMATS) or content.startswith(_TAR_MAGIC, _TAR_MAGIC_OFFSET):
        raise _wrong_format(file, expected)


def refuse_rows(file: Path, text: str, fields: Fields) -> None:
    """Raise UserError if a file with the ending of a text holds rows.

    A text of JSON is rows if it begins with a row that has the text field, with two objects, or with an array of
    objects. A table has several columns, or one with the name of the text field.
    """
    text = text.lstrip()
    if text.startswith(("{", "[", "\x1e")) and _is_rows(text, fields):
        ending = ".json" + file.suffix if is_compressed(file) else ".json"
        raise UserError(
            f"{file}: holds rows of JSON, not a text; give it the ending {ending} and set text_key, or leave it out of "
            "the input"
        )
    separator = _TABLE_SEPARATORS.get(inner_suffix(file))
    if separator is not None:
        first_line = text.partition("\n")[0].strip()
        if separator in first_line or first_line == fields.text:
            raise _wrong_format(file, "text")


def _is_rows(text: str, fields: Fields) -> bool:
    json_text = JsonText(BytesIO(text.encode()))
    is_array = json_text.peek() == "["
    first_rows = []
    with suppress(ValueError):
        for row in islice(json_text.rows(), 2):
            if not isinstance(row, dict):
                return False
            first_rows.append(row)
    if not first_rows:
        return False
    has_text = isinstance(first_rows[0].get(fields.text), str)
    return has_text or (not fields.json_is_text and (is_array or len(first_rows) == 2))


def _refuse_object_of_rows(file: Path, value: dict[str, Any], fields: Fields) -> None:
    """Raise UserError if the only value of a file is an object with rows under one of its keys."""
    for key, rows in value.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            raise UserError(
                f"{file}: one object without {fields.named}, with {len(rows):,} rows under '{key}'; write the rows one "
                f"per line: jq -c '.[{dumps(key)}][]' '{file}' > FILE.jsonl"
            )


def _is_other_encoding(head: bytes) -> bool:
    """Return True if a file is JSON in UTF-16 or UTF-32, with or without a byte order mark."""
    encoding = detect_encoding(head)
    begin = head.decode(encoding, "ignore").lstrip("\ufeff\x1e \t\r\n")
    return not encoding.startswith("utf-8") and begin.startswith(("{", "["))


def _wrong_format(file: Path, expected: str) -> UserError:
    return UserError(
        f"{file}: not {expected} but another format; glm46 reads Parquet (.parquet), JSON "
        f"({', '.join(_JSON_SUFFIXES)}) and text in UTF-8, the latter two also as {', '.join(COMPRESSED_SUFFIXES)}: "
        "correct the ending, unpack the archive, fetch the file (git lfs pull) or write it as one of these, or leave "
        "it out of the input"
    )
