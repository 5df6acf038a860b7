"""The tensors of a step folder, for comparisons."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from glm46.storage.checkpoint.integrity import step_folder
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata
from glm46.storage.checkpoint.stored_values import StepTensors


def step_tensors(step: Path) -> dict[str, Tensor]:
    """Read all tensors of the model."""
    return {name: tensor.read() for name, tensor in StepTensors(step).items()}


def tensor_hashes(checkpoints: Path, step: int) -> dict[str, str]:
    """Hashes of all tensors of a checkpoint: weights, states, averages, generators."""
    kinds = read_metadata(step_folder(checkpoints, step))[0].state_dict_metadata
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    assert CheckpointManager(checkpoints, keep_latest_k=0).load(step, tensors)["progress"]["step"] == step
    return {name: hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy()).hexdigest() for name, t in tensors.items()}
