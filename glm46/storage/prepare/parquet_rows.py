"""Rows of Parquet files, as if read from lines of JSON.

All rows of a column have the same fields in Arrow, and a missing key is null. A null in the data cannot be
distinguished from a missing key, so both are removed: data that needs nulls, or the order of keys, must be stored as
JSON text.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet
from pyarrow import types

from glm46.config.errors import UserError
from glm46.storage.prepare.rows import Fields

_ROWS = 256
"""Number of rows read at a time."""


def parquet_rows(file: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without keys of structs that are null.

    Args:
        columns: names of the columns to read; None: all.

    Raises:
        UserError: pyarrow does not read the file.
    """
    with _faults_explained(file), pyarrow.parquet.ParquetFile(file) as table:
        without_nulls = _null_remover(pyarrow.struct(list(table.schema_arrow)))
        for batch in table.iter_batches(_ROWS, columns=columns):
            yield from map(without_nulls, batch.to_pylist())


def text_columns(file: Path, fields: Fields) -> list[str] | None:
    """Return the columns to read from a file; None: all.

    Raises:
        UserError: a column is missing, or pyarrow does not read the file.
    """
    with _faults_explained(file), pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
    available = f"its columns are {', '.join(names[:8])}"
    is_text = fields.format == "text"
    if not fields.are_in(names):
        raise UserError(f"{file}: no column {fields.named}; {available}; set {'text_key' if is_text else 'format'}")
    if fields.answer and fields.answer not in names:
        raise UserError(f"{file}: no column '{fields.answer}'; {available}; set answer_key")
    if not is_text:
        return None
    return [fields.text, fields.answer] if fields.answer else [fields.text]


@contextmanager
def _faults_explained(file: Path) -> Iterator[None]:
    """Raise UserError for an error of pyarrow; errors of the disk are re-raised as they are."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{file}: damaged Parquet file, or one that this pyarrow does not read ({error}); download it again, or "
            "write it anew without encryption and with compression zstd"
        ) from error


def _null_remover(type_: pyarrow.DataType) -> Callable[[Any], Any]:
    """Return a function that removes missing keys from a value of this Arrow type. Nulls in lists and maps are kept."""
    type_ = getattr(type_, "storage_type", type_)  # storage of an extension type
    if types.is_struct(type_):
        fields = {field.name: _null_remover(field.type) for field in type_}
        return lambda row: {key: fields[key](value) for key, value in row.items() if value is not None}
    if types.is_map(type_):
        item = _or_null(_null_remover(type_.item_type))
        return lambda pairs: {key: item(value) for key, value in pairs}
    if hasattr(type_, "value_field"):  # lists of all kinds: large, views, of a fixed size
        element = _or_null(_null_remover(type_.value_type))
        return lambda values: [element(value) for value in values]
    return lambda value: value


def _or_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)
