"""Frozen weights from a step folder of another run, without its optimizer."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import raise_if
from glm46.engine.training.network import Network
from glm46.storage.checkpoint.boxes import intervals_of, overlaps
from glm46.storage.checkpoint.integrity import MANIFEST
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata, tensor_entries
from glm46.storage.checkpoint.stored_values import StoredTensor

_FAULTS_SHOWN = 10
_PREFIX = "model."
"""Prefix of the names of weights in a checkpoint."""


class StepWeights:
    """The weights of a step folder; see `WeightFolder`. Weights that the network lacks, such as prediction layers, are
    not read."""

    def __init__(self, network: Network, folder: Path, checkpoints: CheckpointManager):
        self.names: Collection[str] = network.pretrained().keys()
        self._folder = folder
        self._checkpoints = checkpoints

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `WeightFolder.read`."""
        meta = self._checkpoints.load(self._folder, {}, ignored=("",))  # verifies all files; nothing is loaded yet
        with Ranks.of_this_run().stage(f"reading {self._folder}") as stage:
            stage.value = self._fill(tensors)
        faults = sorted({fault for faults in stage.values for fault in faults})
        raise_if(faults[:_FAULTS_SHOWN])
        return meta

    def files(self) -> list[Path]:
        """See `WeightFolder.files`."""
        return [self._folder / MANIFEST]  # it has the hashes of the other files

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Fill this rank's parts from the verified folder, unless there are faults; return the faults."""
        folder = self._folder
        metadata, faults = read_metadata(folder)
        if metadata is None:
            return faults
        entries = tensor_entries(metadata)
        for name, tensor in tensors.items():
            entry = entries.get(_PREFIX + name)
            if entry is None:
                faults.append(f"{folder}: lacks {name}")
            elif tuple(entry.size) != tuple(tensor.shape):
                faults.append(f"{folder}: {name} has shape {list(entry.size)}, the model's {list(tensor.shape)}")
        if faults:
            return faults
        for name, tensor in tensors.items():
            stored = StoredTensor(folder, metadata, _PREFIX + name)
            local = local_tensor(tensor)
            intervals = [intervals_of(index) for index in global_indices(tensor)]
            origin = (0,) * len(stored.shape)  # the stored tensor begins where ours does
            for part in overlaps(origin, stored.shape, intervals):
                local[part.local].copy_(stored[tuple(slice(first, first + length) for first, length in part.box)])
        return []
