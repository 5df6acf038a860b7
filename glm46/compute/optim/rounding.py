"""Stochastic rounding to BF16: a value is rounded up with a probability equal to its fraction, down otherwise.

The mean of many roundings is the exact value, so updates smaller than half a unit are not lost. The random bits depend
only on the number of the update, the name of the parameter and the global index of the entry. So every layout, and a
resumed run, gives the same bits.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices, local_tensor

RandomBits = Callable[[torch.device], Tensor]
"""Function that computes the random numbers of some entries on a device: int32 in [0, `RANDOM_RANGE`), in the shape of
the entries."""

RANDOM_BITS = 16
"""Number of random bits of a rounding: FP32 has this many more bits than BF16."""

RANDOM_RANGE = 1 << RANDOM_BITS

ENTRIES_AT_ONCE = 1 << 24
"""Maximum entries updated at a time: limits each temporary FP32 tensor to 64 MiB."""

_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B


@dataclass(frozen=True)
class EntryNumbers:
    """Global number of each entry of this rank's part of a parameter: its index in the full, flattened parameter.

    Entry [i, j, ...] has the number offsets[0][i] + offsets[1][j] + ..., modulo 2**32. ``offsets`` has one int32 tensor
    for each dimension, so that the numbers of a large parameter take little memory between updates.
    """

    name: str
    offsets: tuple[Tensor, ...]

    def __getitem__(self, select: tuple[slice, ...]) -> "EntryNumbers":
        """Return the numbers of a part along the leading dimensions."""
        leading = self.offsets[: len(select)]
        trailing = self.offsets[len(select) :]
        selected = tuple(offset[part] for offset, part in zip(leading, select, strict=True))
        return EntryNumbers(self.name, (*selected, *trailing))

    def as_matrices(self) -> "EntryNumbers":
        """Return the same numbers for the part viewed as [matrices, rows, columns]."""
        *leading, rows, columns = self.offsets
        matrices = torch.zeros(1, dtype=torch.int32, device=rows.device)
        for offset in leading:
            matrices = (matrices.unsqueeze(-1) + offset).flatten()
        return EntryNumbers(self.name, (matrices, rows, columns))

    def random_bits(self, update: int, tensor: str) -> RandomBits:
        """Return the random numbers of one rounding.

        Args:
            update: number of the update, the same on all ranks and after a resume.
            tensor: the rounded tensor of this parameter: "weight", or the name of a state.
        """
        # A hash, because keys of successive updates and of different tensors must be unrelated.
        digest = hashlib.blake2b(f"{update}\0{self.name}\0{tensor}".encode(), digest_size=4).digest()
        key = int.from_bytes(digest, "little")

        def make(device: torch.device) -> Tensor:
            numbers = torch.zeros((), dtype=torch.int32, device=device)
            for offset in self.offsets:
                numbers = numbers.unsqueeze(-1) + offset.to(device, non_blocking=True)
            return _scramble(numbers, key)

        return make


def entry_numbers(name: str, parameter: Tensor) -> EntryNumbers:
    """Compute the numbers of the entries of this rank's part of a parameter, on its device."""
    device = local_tensor(parameter).device
    offsets: list[Tensor] = []
    stride = 1
    # Start with the last dimension, whose entries are neighbours in the flattened parameter.
    for size, indices in zip(reversed(parameter.shape), reversed(global_indices(parameter)), strict=True):
        # Wrap into the range of int32, as sums of int32 do.
        wrapped = (indices * stride + 2**31) % 2**32 - 2**31
        offsets.append(wrapped.to(torch.int32).to(device))
        stride *= size
    return EntryNumbers(name, tuple(reversed(offsets)))


def row_slices(tensor: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the first dimension that cover a tensor, of at most `ENTRIES_AT_ONCE` entries or one row each."""
    if not tensor.numel():
        return
    if tensor.ndim == 0:
        yield ()  # selects the whole scalar
        return
    rows = tensor.shape[0]
    row_entries = tensor.numel() // rows
    step = max(1, ENTRIES_AT_ONCE // row_entries)
    for start in range(0, rows, step):
        yield (slice(start, start + step),)


def store_bfloat16(target: Tensor, values: Tensor, random_bits: RandomBits) -> None:
    """Round ``values`` stochastically into ``target``, BF16 of the same shape."""
    wide = values.float()
    # BF16 is the upper half of FP32. The lower half is the fraction between two BF16 numbers, in units of 2**-16.
    # Adding a random number below 2**16 carries into the upper half with exactly this probability.
    raised = wide.view(torch.int32) + random_bits(values.device)
    # -2**16 has ones in the upper half only.
    rounded = (raised & -RANDOM_RANGE).view(torch.float32)
    # A carry would turn an infinity into a NaN, and some NaNs into zero.
    target.copy_(torch.where(wide.isfinite(), rounded, wide))


def _scramble(numbers: Tensor, key: int) -> Tensor:
    """Return the upper 16 bits of a hash of int32 numbers. Source: Wellons, hash-prospector, "lowbias32"."""
    hashed = numbers + _signed(key)
    hashed = (hashed ^ _shift_right(hashed, 16)) * _signed(_MIX_1)
    hashed = (hashed ^ _shift_right(hashed, 15)) * _signed(_MIX_2)
    return _shift_right(hashed, 32 - RANDOM_BITS)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Shift int32 right logically; the built-in operator copies the sign bit."""
    return (numbers >> bits) & ((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int32 with the bits of an unsigned integer."""
    return (value + 2**31) % 2**32 - 2**31
