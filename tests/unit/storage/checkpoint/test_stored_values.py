"""Values read directly from a checkpoint's files equal those of DCP's reader."""

import io
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from glm46.storage.checkpoint import stored_values
from glm46.storage.checkpoint.dcp import fill_tensors
from glm46.storage.checkpoint.stored_values import StoredTensor

FILE = "__0_0.distcp"


def stored(folder: Path, whole: torch.Tensor, starts: list[tuple[int, ...]], sizes: list[tuple[int, ...]], save=None):
    """A tensor in chunks: records in one file, with other bytes between them."""
    content, data = b"", {}
    for start, size in zip(starts, sizes, strict=True):
        record = io.BytesIO()
        part = whole[tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))]
        torch.save(part.clone() if save is None else save(part), record)
        content += bytes(7)
        data[MetadataIndex("w", torch.Size(start))] = _StorageInfo(FILE, len(content), len(record.getvalue()))
        content += record.getvalue()
    (folder / FILE).write_bytes(content)
    chunks = [
        ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in zip(starts, sizes, strict=True)
    ]
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    return Metadata(state_dict_metadata={"w": entry}, storage_data=data)


def both_read(folder, metadata, whole) -> bool:
    """Our reader and DCP's give the same values: the whole tensor, and every box of two indices a side."""
    by_dcp, stored = torch.full_like(whole, 8), StoredTensor(folder, metadata, "w")
    fill_tensors(folder, metadata, {"w": by_dcp}, is_first=True)
    boxes = product(*([slice(None), *(slice(i, i + 2) for i in range(0, size, 2))] for size in whole.shape))
    return torch.equal(by_dcp, whole) and all(torch.equal(stored[box], whole[box]) for box in boxes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("starts, sizes", [
    ([(0, 0)], [(6, 10)]), ([(0, 0), (2, 0)], [(2, 10), (4, 10)]), ([(0, 0), (0, 3)], [(6, 3), (6, 7)]),
    ([(0, 0), (0, 3), (5, 0)], [(5, 3), (5, 7), (1, 10)]),
])  # fmt: skip
def test_chunks_equal_what_dcp_reads(dtype, starts, sizes, tmp_path, monkeypatch):
    whole = torch.randn(6, 10).mul(100).to(dtype)
    metadata = stored(tmp_path, whole, starts, sizes)
    assert both_read(tmp_path, metadata, whole)
    monkeypatch.setattr(stored_values, "fill_tensors", None)  # none of these records needs DCP
    assert torch.equal(StoredTensor(tmp_path, metadata, "w")[2, 1:], whole[2, 1:])


@pytest.mark.parametrize("whole", [torch.tensor(3.5), torch.empty(0, 4), torch.randn(1)])
def test_scalars_and_empty_tensors(whole, tmp_path):
    assert both_read(tmp_path, stored(tmp_path, whole, [(0,) * whole.dim()], [tuple(whole.shape)]), whole)


@pytest.mark.parametrize(
    "save",
    [
        lambda part: part.t().contiguous().t(),  # columns are contiguous
        lambda part: torch.cat([torch.zeros(1, part.shape[1]), part])[1:],  # values begin inside their storage
        lambda part: torch.nn.Parameter(part.clone()),
    ],
)
def test_records_of_another_form_are_read_too(save, tmp_path):
    whole = torch.randn(4, 5)
    assert both_read(tmp_path, stored(tmp_path, whole, [(0, 0)], [(4, 5)], save), whole)


def test_a_truncated_file_is_an_error(tmp_path):
    whole = torch.randn(40, 50)
    metadata = stored(tmp_path, whole, [(0, 0)], [(40, 50)])
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises((OSError, RuntimeError, ValueError)):
        StoredTensor(tmp_path, metadata, "w")[:, :]
