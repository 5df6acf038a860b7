"""A checkpoint as a mapping of whole tensors, one in memory at a time: for conversion and inference on one process."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.checkpoint.agreement import Ranks
from glm46.checkpoint.content import Content
from glm46.checkpoint.dcp import read_tensors, write_tensors
from glm46.checkpoint.integrity import META, read_manifest, records_of
from glm46.checkpoint.metadata import read_metadata
from glm46.checkpoint.publish import open_draft, publish, step_of
from glm46.checkpoint.verification import verify_folder
from glm46.config.errors import UserError

MODEL_PREFIX = "model."
"""What the trainer puts before the names of parameters and buffers."""


class StepTensors(Mapping[str, Tensor]):
    """The model of a step folder: our names -> whole tensors, each read from the disk when it is asked for.

    Attributes:
        meta: what was saved with the tensors.

    Raises:
        UserError: the folder is no checkpoint, or is damaged.
    """

    def __init__(self, folder: Path):
        self._folder, self._ranks = folder, Ranks(rank=0, size=1, group=None)
        faults = verify_folder(folder, step_of(folder.absolute()), self._ranks)
        if faults:
            raise UserError(*faults)
        body, _ = read_manifest(folder, step_of(folder.absolute()))
        self._files = records_of(body)
        self.meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        metadata, faults = read_metadata(folder)
        if metadata is None:
            raise UserError(*faults)
        self._kinds = {
            name.removeprefix(MODEL_PREFIX): (tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(MODEL_PREFIX)
        }

    def __getitem__(self, name: str) -> Tensor:
        size, dtype = self._kinds[name]
        tensor = torch.empty(size, dtype=dtype)
        stored = {MODEL_PREFIX + name: tensor}
        faults = read_tensors(self._folder, stored, self._files, optional=(), ranks=self._ranks, ignored=("",))
        if faults:
            raise UserError(*faults)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a tensor, without reading it."""
        return self._kinds[name]


class _Making(Mapping[str, Tensor]):
    """Tensors by stored name, each made when it is asked for and kept by nobody."""

    def __init__(self, make: Callable[[str], Tensor], kinds: Mapping[str, Any]):
        self._make, self._kinds = make, kinds

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name.removeprefix(MODEL_PREFIX))

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def write_model(
    folder: Path,
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    make: Callable[[str], Tensor],
    meta: dict[str, Any],
) -> Path:
    """Write a checkpoint of a model alone, as step 0 of a folder, one tensor in memory at a time.

    Args:
        kinds: our name -> shape and type.
        make: gives the tensor of a name; called once for each.

    Returns:
        The step folder.

    Raises:
        CheckpointError: writing failed; nothing is published then.
    """
    ranks = Ranks(rank=0, size=1, group=None)
    meta_tensors = {
        MODEL_PREFIX + name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in kinds.items()
    }
    content = Content.of(0, meta_tensors, meta, None)
    draft = open_draft(folder, content.step)
    try:
        files = write_tensors(draft, meta_tensors, ranks, _Making(make, meta_tensors), file_per_tensor=True)
        return publish(draft, content.step, files, content.meta, content.facts(ranks.size))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
