"""Loading of a model for inference, on one process or split over a mesh, from a step folder or a Hugging Face
folder."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError, raise_if
from glm46.config.model import ModelShape
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.stored_model import alignment_faults, stored_model, whole_model
from glm46.storage.checkpoint.finite import describe, names_not_finite
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.checkpoint.stored_values import StepTensors
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.folder_check import stored_shape
from glm46.storage.huggingface.import_weights import FolderReader


class Loaded(NamedTuple):
    """A model that is ready to run."""

    model: Transformer
    """Model in evaluation mode; on a mesh, this rank's part."""
    tokenizer: Tokenizer
    mesh: ModelMesh


def load_for_inference(
    folder: Path, *, tokenizer: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[Transformer, Tokenizer]:
    """Load a complete model in evaluation mode, and its tokenizer; see `load_on_mesh`."""
    return load_on_mesh(folder, lambda _: ModelMesh(), tokenizer=tokenizer, dtype=dtype, device=device)[:2]


def load_on_mesh(
    folder: Path,
    mesh_of: Callable[[ModelShape], ModelMesh],
    *,
    tokenizer: str | None,
    dtype: torch.dtype,
    device: torch.device,
    drafts: bool = True,
) -> Loaded:
    """Load this rank's part of a model, and its tokenizer. A rank reads only its part. Collective over all ranks.

    Args:
        folder: a step folder, or a Hugging Face folder (with a config.json).
        mesh_of: returns the mesh for a model of this shape.
        tokenizer: tokenizer file or folder; None for the one that the folder names or contains.
        dtype: dtype of the weights; selection biases are always FP32.
        drafts: True to load the prediction layers.

    Raises:
        UserError: the folder is neither of both, or damaged, its shape cannot run in this dtype, or there is no
            tokenizer.
    """
    kind = require_kind(folder, Kind.HUGGING_FACE, Kind.STEP)
    load = _from_hugging_face if kind is Kind.HUGGING_FACE else _from_step

    def empty(shape: ModelShape) -> _Part:
        raise_if(alignment_faults(folder, shape, str(dtype).removeprefix("torch.")))
        mesh = mesh_of(shape)
        built_shape = shape if drafts else shape.model_copy(update={"num_nextn_predict_layers": 0})
        return mesh.part_of_model(built_shape, dtype).to_empty(device=device), mesh

    model, mesh = load(folder, empty)
    return Loaded(model, stored_model(folder).tokenizer(tokenizer), mesh)


_Part = tuple[Transformer, ModelMesh]
_Empty = Callable[[ModelShape], _Part]


@torch.no_grad()
def _from_hugging_face(folder: Path, empty: _Empty) -> _Part:
    shape = stored_shape(folder)
    model, mesh = empty(shape)
    with FolderReader(folder, shape) as reader:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            raise_if(reader.fill(name, local_tensor(tensor), global_indices(tensor)))
    return model, mesh


@torch.no_grad()
def _from_step(folder: Path, empty: _Empty) -> _Part:
    tensors = StepTensors(folder, Ranks.of_this_run())
    whole_model(folder, tensors.meta["config"])
    function = tensors.function
    model, mesh = empty(function.shape)
    local_tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    raise_if([f"{folder}: lacks {name}" for name in local_tensors if name not in tensors])
    for name, tensor in local_tensors.items():
        local_slices = tuple(slice(int(index[0]), int(index[-1]) + 1) for index in global_indices(tensor))
        local_tensor(tensor).copy_(tensors[name][local_slices])
    if names := names_not_finite({name: local_tensor(tensor) for name, tensor in local_tensors.items()}):
        raise UserError(f"{folder}: {describe(names)}: its training diverged; take an earlier step")
    model.compute_as(function, local_tensor(next(model.parameters())).device)
    return model, mesh
