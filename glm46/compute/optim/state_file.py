"""Optimizer states in a file on a local disk."""

import mmap
import os
import tempfile
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.optimizer import state_folder_message
from glm46.files.local_disk import local_disk_fault

_PAGE = mmap.ALLOCATIONGRANULARITY


class StateFile:
    """Makes zeros in the memory-mapped file of one rank.

    The file has no name, so its space is free again when the process ends, however it ends: a run goes on from its
    checkpoints, never from this file. All space is reserved before training starts.

    Args:
        folder: on a local disk.

    Raises:
        UserError: no file can be made in the folder.
    """

    def __init__(self, folder: Path):
        self._folder, self._bytes = folder, 0
        if fault := local_disk_fault(folder):
            raise UserError(state_folder_message(folder, fault))
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="optimizer-states-")  # noqa: SIM115, as long as self
        except OSError as error:
            raise UserError(state_folder_message(folder, f"no file can be made: {error.strerror}")) from error

    def zeros(self, shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
        """See `muon_layout.Zeros`; the tensor is in host memory as far as it is used.

        Raises:
            UserError: the disk is full.
        """
        if not prod(shape):
            return torch.zeros(shape, dtype=dtype)
        size = -(-prod(shape) * dtype.itemsize // _PAGE) * _PAGE
        try:
            os.posix_fallocate(self._file.fileno(), self._bytes, size)
            mapped = mmap.mmap(self._file.fileno(), size, offset=self._bytes)
        except OSError as error:
            fault = f"no room for {(self._bytes + size) / 2**30:,.2f} GiB of this rank: {error.strerror}"
            raise UserError(state_folder_message(self._folder, fault)) from error
        self._bytes += size
        return torch.frombuffer(mapped, dtype=dtype, count=prod(shape)).view(shape)
