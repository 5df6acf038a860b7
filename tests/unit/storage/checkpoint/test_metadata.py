"""DCP's metadata is read without a change of the process, whatever the pickle holds."""

import pickle
import resource
from pathlib import Path, PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from glm46.storage.checkpoint.metadata import METADATA, read_metadata

DCP = "torch.distributed.checkpoint.metadata"


def named(module: str, name: str) -> bytes:
    """The opcodes that push a global."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


PATH = named("pathlib", "PurePosixPath")
HOSTILE = {
    "an attribute of a class of Python": PATH + b"N}\x8c\x0b__truediv__" + PATH + b"s\x86b.",
    "an attribute of a class of torch": named(DCP, "MetadataIndex") + b"N}\x8c\x08__hash__" + PATH + b"s\x86b.",
    "a field of a function": named("torch.serialization", "_get_layout") + b"}\x8c\x01a" + PATH + b"sb.",
    "a field of a member of an enum": (
        named("builtins", "getattr") + named(DCP, "_MEM_FORMAT_ENCODING") + b"\x8c\x12TORCH_CHANNELS_LAST\x86R"
        b"}\x8c\x07_value_K\x07sb."
    ),
    "an object by an old opcode": b"(ios\nsystem\n.",
    "an object of an earlier extension": b"\x82\x01.",
    "a persistent object": b"Pname\n.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_that_changes_something_is_refused_and_changes_nothing(kind, tmp_path):
    classes = (PurePosixPath, MetadataIndex, TensorProperties)
    before = [dict(vars(owner)) for owner in classes]
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + HOSTILE[kind])
    metadata, faults = read_metadata(tmp_path)
    assert metadata is None
    assert "refused" in faults[0]
    assert [dict(vars(owner)) for owner in classes] == before
    assert str(Path("/run") / "checkpoint") == "/run/checkpoint"


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param(b"Nr\xff\xff\xff\x7f.", id="place 2^31 of the memo"),
        pytest.param(b"\x96" + (2**36).to_bytes(8, "little") + b".", id="array of 64 GiB"),
        pytest.param(b"\x8e" + (2**36).to_bytes(8, "little") + b".", id="bytes of 64 GiB"),
    ],
)
def test_a_few_bytes_reserve_no_memory(operations, tmp_path):
    (tmp_path / METADATA).write_bytes(b"\x80\x05" + operations)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_metadata(tmp_path)[0] is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_every_protocol_is_read(protocol, tmp_path):
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    properties = TensorProperties(dtype=torch.bfloat16)
    entry = TensorStorageMetadata(properties, torch.Size([2, 3]), [chunk])
    written = Metadata({"a": entry}, {}, {MetadataIndex("a", chunk.offsets): PurePosixPath("x")})
    (tmp_path / METADATA).write_bytes(pickle.dumps(written, protocol))
    assert read_metadata(tmp_path) == (written, [])
