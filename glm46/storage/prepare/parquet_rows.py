"""Rows of Parquet files as the lines of a JSON file would hold them.

All rows of a column have the same fields in Arrow: a key that a row lacks is null there. A null that the data states
cannot be told from it, so both go: what needs nulls, or the order of its keys, is written as JSON text.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_ROWS = 256
"""Read at a time."""


def parquet_rows(file: Path | str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file, without the keys of structs that are null. Raises pyarrow.ArrowException if the file is
    damaged.

    Args:
        columns: names of those to read; None: all.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        stated = _stated(pyarrow.struct(list(table.schema_arrow)))
        for batch in table.iter_batches(_ROWS, columns=columns):
            yield from map(stated, batch.to_pylist())


def _stated(type_: Any) -> Callable[[Any], Any]:
    """A function from a value of this Arrow type to what the data states. Nulls of lists and maps are the data's."""
    from pyarrow import types

    type_ = getattr(type_, "storage_type", type_)  # of an extension type
    if types.is_struct(type_):
        fields = {field.name: _stated(field.type) for field in type_}
        return lambda row: {key: fields[key](value) for key, value in row.items() if value is not None}
    if types.is_map(type_):
        item = _or_null(_stated(type_.item_type))
        return lambda pairs: {key: item(value) for key, value in pairs}
    if hasattr(type_, "value_field"):  # lists of each kind: large, views, of a fixed size
        one = _or_null(_stated(type_.value_type))
        return lambda values: [one(value) for value in values]
    return lambda value: value


def _or_null(stated: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else stated(value)
