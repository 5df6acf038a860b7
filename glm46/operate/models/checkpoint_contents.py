"""Contents of a step folder: its bytes, its values and the list of its tensors. Imports torch."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from glm46.compute.distributed.ranks import ALONE
from glm46.config.errors import UserError
from glm46.files.durable import FileRecord
from glm46.storage.checkpoint.finite import stored_not_finite
from glm46.storage.checkpoint.integrity import META, check_hash
from glm46.storage.checkpoint.metadata import METADATA, read_checked_metadata, tensor_entries
from glm46.storage.checkpoint.store_mirror import fetch_step, release_step


class ListedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: int
    """Number of pieces in which ranks have written it."""


def content_faults(folder: Path, records: dict[str, FileRecord]) -> list[str]:
    """Return the faults in the bytes and the values of a checkpoint's files."""
    with suppress(OSError):  # an object that cannot be fetched stays a link, which the check of hashes reports
        fetch_step(folder)
    faults = [fault for name, record in sorted(records.items()) for fault in check_hash(folder / name, record)]
    faults = faults or stored_not_finite(folder, records, ALONE)
    release_step(folder)
    return faults


def stored_tensors(folder: Path, records: Mapping[str, FileRecord]) -> list[ListedTensor]:
    """Return the tensors of a checkpoint by name. Raises UserError if its meta or metadata is damaged."""
    faults = [fault for name in (META, METADATA) for fault in check_hash(folder / name, records[name])]
    metadata = None
    if not faults:
        metadata, faults = read_checked_metadata(folder, records)
    if metadata is None:
        raise UserError(*faults)
    return [
        ListedTensor(
            name,
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(entry.size),
            math.prod(entry.size) * entry.properties.dtype.itemsize,
            len(entry.chunks),
        )
        for name, entry in sorted(tensor_entries(metadata).items())
    ]
