"""Writes a model as a checkpoint in one process, with two tensors in memory at a time."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm46.compute.distributed.ranks import ALONE
from glm46.files.threads import in_thread
from glm46.storage.checkpoint.dcp import write_tensors
from glm46.storage.checkpoint.publish import open_draft, publish
from glm46.storage.checkpoint.save import Snapshot, encode_meta
from glm46.storage.checkpoint.stored_values import MODEL_PREFIX

TensorKind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors that are made on access. Unlike with a plain Mapping, ``in``, iteration and ``len`` make no
    tensor."""

    names: Mapping[str, object]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ReadAhead(LazyTensors):
    """Tensors accessed in order; a thread fills each one while the caller uses the previous one.

    Two buffers alternate: a tensor is valid until the next one is accessed. Allocating memory for each tensor would
    take longer than filling it.

    Args:
        kinds: shape and dtype by name, in the order of access.
        fill: writes the values of a named tensor into a CPU tensor.
    """

    def __init__(self, kinds: Mapping[str, TensorKind], fill: Callable[[str, Tensor], None]):
        self._kinds = kinds
        self.names = self._next = dict(zip(kinds, [*list(kinds)[1:], None], strict=True))
        self._fill = fill
        largest = max(prod(size) * dtype.itemsize for size, dtype in kinds.values())
        self._idle = np.empty(largest, np.uint8)
        self._used = np.empty(largest, np.uint8)
        self._coming: dict[str, Future[Tensor]] = {}

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._coming.values())

    def __getitem__(self, name: str) -> Tensor:
        tensor = (self._coming.get(name) or self._start(name)).result()
        following = self._next[name]
        self._coming = {} if following is None else {following: self._start(following)}
        return tensor

    def _start(self, name: str) -> Future[Tensor]:
        self._idle, self._used = self._used, self._idle
        return in_thread(partial(self._made, name, self._used))

    def _made(self, name: str, memory: np.ndarray) -> Tensor:
        size, dtype = self._kinds[name]
        nbytes = prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype)
        # A storage of exactly this size: DCP would copy a view of a larger one before it writes it.
        tensor = torch.frombuffer(memory[:nbytes], dtype=torch.uint8).view(dtype).view(size)
        self._fill(name, tensor)
        return tensor


def write_model(
    folder: Path, kinds: Mapping[str, TensorKind], fill: Callable[[str, Tensor], None], meta: dict[str, Any]
) -> Path:
    """Write a checkpoint with only a model, as step 0 of a folder; one tensor is written while the next one is filled.
    Returns the step folder.

    Args:
        kinds: shape and dtype by glm46 name.
        fill: writes the values of a named tensor into a CPU tensor; called once for each name, in another thread.

    Raises:
        CheckpointError: writing failed; nothing is published.
    """
    stored = {MODEL_PREFIX + name: kind for name, kind in kinds.items()}
    meta_tensors = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in stored.items()}
    snapshot = Snapshot(0, meta_tensors, encode_meta(meta))
    draft = open_draft(folder, snapshot.step)
    try:
        with ReadAhead(stored, lambda name, tensor: fill(name.removeprefix(MODEL_PREFIX), tensor)) as read_ahead:
            files = write_tensors(draft, meta_tensors, ALONE, read_ahead, file_per_tensor=True)
        return publish(draft, snapshot.step, files, snapshot.meta, snapshot.facts(ALONE.size, is_finite=False))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
