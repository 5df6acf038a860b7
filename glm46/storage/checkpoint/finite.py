"""Checks for NaN and infinity in tensors to be saved and in checkpoints: training cannot continue from them."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.ranks import CheckpointError, Ranks
from glm46.files.durable import FileRecord
from glm46.storage.checkpoint.metadata import read_checked_metadata, tensor_entries
from glm46.storage.checkpoint.stored_values import StoredTensor

_PIECE_BYTES = 64 << 20
_NAMES_SHOWN = 3


class NotFiniteError(CheckpointError):
    """Tensors to be saved hold NaN or infinity; nothing was published."""


def refuse_not_finite(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise NotFiniteError on all ranks if the tensors of any rank hold NaN or infinity. Collective."""
    with ranks.stage("looking for values that are not finite") as stage:
        stage.value = names_not_finite(tensors)
    if names := sorted({name for rank_names in stage.values for name in rank_names}):
        raise NotFiniteError(describe(names))


@torch.no_grad()
def names_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors whose local part holds NaN or infinity. One pass over the memory, one wait per
    device."""
    extremes: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.is_floating_point() and local.numel():
            local = local.float() if local.dtype.itemsize == 1 else local  # torch has no aminmax for FP8
            min_max = torch.stack(torch.aminmax(local)).double()  # NaN if any value is
            extremes.setdefault(min_max.device, {})[name] = min_max
    bad = set()
    for by_name in extremes.values():
        are_finite = torch.stack([*by_name.values()]).isfinite().all(1).tolist()  # sync: once per device
        bad |= {name for name, is_finite in zip(by_name, are_finite, strict=True) if not is_finite}
    return [name for name in tensors if name in bad]


def stored_not_finite(folder: Path, files: Mapping[str, FileRecord], ranks: Ranks) -> list[str]:
    """Return faults of a checkpoint's values and of their index, one line each. Collective. ``files``: the files of the
    checkpoint, verified."""
    with ranks.stage(f"reading the values of {folder}") as stage:
        metadata, faults = read_checked_metadata(folder, files)
        names = [] if metadata is None else _stored_names(folder, metadata, ranks)
        stage.value = (faults, names)
    faults = sorted({fault for rank_faults, _ in stage.values for fault in rank_faults})
    names = sorted(name for _, rank_names in stage.values for name in rank_names)
    if names and not faults:
        return [f"{folder}: {describe(names)}; it cannot be trained on"]
    return faults


def _stored_names(folder: Path, metadata: Metadata, ranks: Ranks) -> list[str]:
    """Return the names of tensors with values that are not finite, among this rank's share of the checkpoint."""
    entries = tensor_entries(metadata).items()
    floating = sorted(name for name, entry in entries if entry.properties.dtype.is_floating_point)
    local_names = floating[ranks.rank :: ranks.size]
    tensors = {name: StoredTensor(folder, metadata, name) for name in local_names}
    return [name for name, tensor in tensors.items() if any(names_not_finite({"": piece}) for piece in _pieces(tensor))]


def _pieces(stored: StoredTensor) -> Iterable[Tensor]:
    if not stored.shape or stored.nbytes <= _PIECE_BYTES:
        yield stored.read()
        return
    rows = max(_PIECE_BYTES * stored.shape[0] // stored.nbytes, 1)
    other_dimensions = [slice(None)] * (len(stored.shape) - 1)
    for first in range(0, stored.shape[0], rows):
        yield stored[(slice(first, first + rows), *other_dimensions)]


def describe(names: Collection[str]) -> str:
    """Format the names as one line, shortened if there are many."""
    more = f" and {len(names) - _NAMES_SHOWN} more tensors" if len(names) > _NAMES_SHOWN else ""
    hold = "holds" if len(names) == 1 else "hold"
    return f"{', '.join(list(names)[:_NAMES_SHOWN])}{more} {hold} values that are not finite"
