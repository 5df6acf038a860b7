"""A checkpoint as a mapping of whole tensors, one in memory at a time: for conversion and inference on one process."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.checkpoint.agreement import Ranks
from glm46.checkpoint.content import Content
from glm46.checkpoint.dcp import fill_tensors, write_tensors
from glm46.checkpoint.integrity import META, read_manifest, records_of
from glm46.checkpoint.metadata import check_metadata, read_metadata
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
        self._folder = folder
        faults = verify_folder(folder, step_of(folder.absolute()), Ranks(rank=0, size=1, group=None))
        if faults:
            raise UserError(*faults)
        body, _ = read_manifest(folder, step_of(folder.absolute()))
        self.meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        metadata, faults = read_metadata(folder)
        if metadata is not None:
            faults = check_metadata(folder, metadata, records_of(body))
        if faults:
            raise UserError(*faults)
        self._metadata = metadata
        self._kinds = {
            name.removeprefix(MODEL_PREFIX): (tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(MODEL_PREFIX)
        }

    def __getitem__(self, name: str) -> Tensor:
        size, dtype = self._kinds[name]
        tensor = torch.empty(size, dtype=dtype)
        fill_tensors(self._folder, self._metadata, {MODEL_PREFIX + name: tensor}, is_first=True)
        return tensor

    def __contains__(self, name: object) -> bool:  # that of Mapping would read the tensor
        return name in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a tensor, without reading it."""
        return self._kinds[name]


class ReadAhead(Mapping[str, Tensor]):
    """Tensors that are asked for in order, each made by another thread while the one before is used.

    Args:
        names: all names, in the order in which they will be asked for.
        make: gives the tensor of a name.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], Tensor]):
        self._next = dict(zip(names, [*names[1:], None], strict=True))
        self._make = make
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._coming: tuple[str | None, Future[Tensor] | None] = (None, None)

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown(cancel_futures=True)

    def __getitem__(self, name: str) -> Tensor:
        coming, future = self._coming
        if future is None or coming != name:
            future = self._reader.submit(self._make, name)
        tensor = future.result()
        following = self._next[name]
        self._coming = following, following and self._reader.submit(self._make, following)
        return tensor

    def __contains__(self, name: object) -> bool:  # that of Mapping would make the tensor
        return name in self._next

    def __iter__(self) -> Iterator[str]:
        return iter(self._next)

    def __len__(self) -> int:
        return len(self._next)


def write_model(
    folder: Path,
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    make: Callable[[str], Tensor],
    meta: dict[str, Any],
) -> Path:
    """Write a checkpoint of a model alone, as step 0 of a folder: one tensor is written while the next one is made.

    Args:
        kinds: our name -> shape and type.
        make: gives the tensor of a name; called once for each, by another thread.

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
        with ReadAhead(list(meta_tensors), lambda name: make(name.removeprefix(MODEL_PREFIX))) as made:
            files = write_tensors(draft, meta_tensors, ranks, made, file_per_tensor=True)
        return publish(draft, content.step, files, content.meta, content.facts(ranks.size))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
