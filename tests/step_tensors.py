"""The model of a step folder, for comparisons."""

from pathlib import Path

from torch import Tensor

from glm46.storage.checkpoint.stored_values import StepTensors


def step_tensors(step: Path) -> dict[str, Tensor]:
    """Read all tensors of the model."""
    return {name: tensor.read() for name, tensor in StepTensors(step).items()}
