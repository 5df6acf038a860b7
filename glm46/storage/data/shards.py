"""A shard: a safetensors file with the tokens of whole documents, read through memory maps.

``doc_ends`` I64 [documents] holds the exclusive end of each document, whose last token is ``<|endoftext|>``; ``tokens``
U32 [tokens] the ids; ``checksums`` U32 the CRC-32 of each block of `BLOCK_BYTES`, first of ``doc_ends``, then of
``tokens``. Any safetensors reader opens it. ``__metadata__`` holds the format, the source and the counts.

A shard of chats has ``targets`` in its metadata: the number of tokens to learn. All other tokens have `NOT_A_TARGET`
set.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm46.config.errors import UserError
from glm46.files.array_file import map_arrays
from glm46.files.store_ranges import range_file

FORMAT = "glm46-shard-2"
_TYPES = {"tokens": "uint32", "doc_ends": "int64", "checksums": "uint32"}

BLOCK_BYTES = 4096
"""Bytes per checksum. Reads verify whole blocks, so smaller blocks make short reads cheaper."""

NOT_A_TARGET = 1 << 31
"""Bit of a token that is not a label at any prediction depth. The other bits are its id. Text does not use it: each
token except the first of a document is a label."""

SHARD_REMEDY = "remove the folder and run 'python -m glm46 prepare' again"


@dataclass(frozen=True)
class Shard:
    """Memory maps of one shard.

    Attributes:
        tokens: uint32 [tokens], with the bit `NOT_A_TARGET` where the metadata has ``targets``.
        doc_ends: int64 [documents], ascending; the last one equals the number of tokens.
        metadata: the strings of the header.
        checksums: uint32, CRC-32 of each block of ``doc_ends``, then of ``tokens``.
        places: offset of each tensor in the file, in bytes, by name.
    """

    tokens: np.ndarray
    doc_ends: np.ndarray
    metadata: dict[str, str]
    checksums: np.ndarray
    places: dict[str, int]


def open_shard(file: Path) -> Shard:
    """Open one shard as memory maps. Raises UserError if the file is missing or truncated, has another format, or its
    tensors do not fit each other."""
    tensors, metadata, places = map_arrays(file, SHARD_REMEDY)
    if metadata.get("format") != FORMAT:
        raise UserError(f"{file}: not a {FORMAT} file (format {metadata.get('format')!r}); {SHARD_REMEDY}")
    types = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    if types != _TYPES:
        raise UserError(f"{file}: its tensors are {types}, not {_TYPES}; {SHARD_REMEDY}")
    tokens = tensors["tokens"]
    ends = tensors["doc_ends"]
    checksums = tensors["checksums"]
    if len(ends) and (ranges := range_file(file)) is not None:
        last = places["doc_ends"] + ends.nbytes - ends.itemsize
        ranges.fetch([(last, last + ends.itemsize)])
    if not len(ends) or ends[-1] != len(tokens):
        raise UserError(f"{file}: document ends do not cover its {len(tokens)} tokens; {SHARD_REMEDY}")
    blocks = sum(-(-array.nbytes // BLOCK_BYTES) for array in (ends, tokens))
    if checksums.shape != (blocks,):
        raise UserError(f"{file}: its checksums do not cover its {blocks} blocks; {SHARD_REMEDY}")
    return Shard(tokens, ends, metadata, checksums, places)
