"""Frozen weights, under adapters or of a whole network: every start reads them from trained weights, and no checkpoint
holds them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import raise_if
from glm46.engine.training.hf_weights import load_weights
from glm46.engine.training.network import Network
from glm46.files.local_disk import real_path
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import MANIFEST
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata, tensor_entries
from glm46.storage.checkpoint.stored_values import StoredTensor
from glm46.storage.huggingface.adapter_origin import changed_files, hash_files
from glm46.storage.huggingface.boxes import intervals_of, overlaps
from glm46.storage.huggingface.folder_check import files_of_weights
from glm46.storage.huggingface.names import HFPart
from glm46.storage.huggingface.step_tensors import MODEL_PREFIX

_FAULTS_SHOWN = 10


def load_frozen(network: Network, checkpoints: CheckpointManager) -> dict[str, Any] | None:
    """Fill the frozen weights and selection biases of a network from checkpoint.initial_load_path, on any mesh and in
    any type, and note in `Network.frozen_files` what they were read from. Collective.

    Returns:
        The metadata of the checkpoint; None of a Hugging Face folder.

    Raises:
        UserError: on all ranks; the folder is damaged or of another model.
    """
    config, ranks = network.plan.config.checkpoint, Ranks.of_this_run()
    folder = real_path(config.initial_folder)
    if config.initial_load_in_hf or kind_of(folder) is Kind.DCP:
        meta = None
        load_weights(network, folder)
        files = files_of_weights(folder, network.plan.shape)
    else:
        meta = checkpoints.load(folder, {}, ignored=("",))  # verifies all files; nothing is loaded yet
        with ranks.stage(f"reading {folder}") as stage:
            stage.value = _fill_from_step(folder, tensors := network.pretrained())
        faults = sorted({fault for faults in stage.values for fault in faults})
        raise_if(faults[:_FAULTS_SHOWN])
        network.take_gates(meta, tensors)
        files = [folder / MANIFEST]  # it has the hashes of the others
    network.frozen_files.update(hash_files(files, ranks))
    return meta


@torch.no_grad()
def _fill_from_step(folder: Path, tensors: dict[str, Tensor]) -> list[str]:
    """Fill this rank's parts from a verified step folder; returns the faults, with which nothing is filled. Weights of
    the folder that the network lacks, such as prediction layers, are not read."""
    metadata, faults = read_metadata(folder)
    if metadata is None:
        return faults
    known = tensor_entries(metadata)
    for name, tensor in tensors.items():
        entry = known.get(MODEL_PREFIX + name)
        if entry is None:
            faults.append(f"{folder}: lacks {name}")
        elif tuple(entry.size) != tuple(tensor.shape):
            faults.append(f"{folder}: {name} has shape {list(entry.size)}, the model's {list(tensor.shape)}")
    if faults:
        return faults
    for name, tensor in tensors.items():
        stored, local = StoredTensor(folder, metadata, MODEL_PREFIX + name), local_tensor(tensor)
        whole = HFPart(name, stored.shape, (0,) * len(stored.shape))
        for part in overlaps(whole, [intervals_of(index) for index in global_indices(tensor)]):
            local[part.local].copy_(stored[tuple(slice(first, first + length) for first, length in part.box)])
    return []


def base_fault(network: Network, folder: Path, saved: Mapping[str, str], weights: Mapping[str, tuple]) -> str | None:
    """The fault of a step folder that was saved beside other frozen weights than those that were read.

    Args:
        saved: `Network.frozen_files` at the save; weights: `RunConfig.read_weights`.
    """
    if not (changed := changed_files(saved, network.frozen_files)):
        return None
    path = network.plan.config.checkpoint.initial_load_path
    *_, key = "checkpoint.initial_load", *(key for key, (of, _) in weights.items() if str(of) == path)
    return (
        f"{key}_path = {path!r}: {changed} changed since {folder} was saved, which belongs to the "
        "frozen weights of then; restore them, or begin anew with another job.dump_folder"
    )
