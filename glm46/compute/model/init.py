"""Initial weights as a pure function of (seed, parameter name, global index).

Each rank computes only the elements that it keeps. Every layout, pipeline split and process count starts from the same
bits.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from glm46.run.parameters import find_parameter

_CHUNK_ELEMENTS = 1 << 22
"""Elements computed at a time, to limit temporaries to some tens of MB."""


def signed(value: int) -> int:
    """Return the int64 with the lowest 64 bits of an integer: torch has no arithmetic on unsigned 64-bit integers."""
    return (value + 2**63) % 2**64 - 2**63


GAMMA = signed(0x9E3779B97F4A7C15)
"""Increment of the state of SplitMix64: 2**64 divided by the golden ratio, rounded to an odd number."""
_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; the built-in operator copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Scramble a state of SplitMix64 into random bits, int64. Source: Steele, Lea, Flood, OOPSLA 2014."""
    x = (x ^ shift_right(x, 30)) * _MIX_1
    x = (x ^ shift_right(x, 27)) * _MIX_2
    return x ^ shift_right(x, 31)


def _uniform_bits(seed: int, name: str, index: Tensor) -> Tensor:
    """Generate two independent 32-bit numbers for the given elements of a parameter, as one int64."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    bits = mixed((index + signed(int.from_bytes(digest, "little"))) * GAMMA)
    return mixed(bits * GAMMA)  # twice: neighbouring counters, and close keys of two parameters, must not correlate


def normal_at(seed: int, name: str, index: Tensor) -> Tensor:
    """Generate standard normal numbers for the given elements of a parameter.

    Args:
        index: int64, any shape: flat indices into the whole parameter.

    Returns:
        FP32, shape of `index`. Box-Muller in FP64, so that devices agree after rounding except for rare last bits.
    """
    bits = _uniform_bits(seed, name, index)
    first = (shift_right(bits, 32).double() + 0.5) * 2.0**-32
    second = (bits & 0xFFFFFFFF).double() * 2.0**-32
    return ((-2.0 * first.log()).sqrt() * (2.0 * math.pi * second).cos()).float()


def uniform_at(seed: int, name: str, index: Tensor) -> Tensor:
    """Generate numbers uniform in [-1, 1), FP32; arguments as in `normal_at`."""
    return (shift_right(_uniform_bits(seed, name, index), 32).double() * 2.0**-31 - 1.0).float()


@torch.no_grad()
def fill_normal(
    local: Tensor, indices: list[Tensor], global_shape: tuple[int, ...], *, seed: int, name: str, std: float
) -> None:
    """Fill a part of a parameter with N(0, std); arguments as in `fill_parameter`."""
    _fill_random(local, indices, global_shape, lambda index: normal_at(seed, name, index) * std)


def _fill_random(
    local: Tensor, indices: list[Tensor], global_shape: tuple[int, ...], values: Callable[[Tensor], Tensor]
) -> None:
    places = list[Tensor]()
    stride = 1
    for dim in reversed(range(len(global_shape))):
        places.insert(0, indices[dim].to(local.device) * stride)
        stride *= global_shape[dim]
    _fill_box(local, places, values)


def _fill_box(local: Tensor, places: list[Tensor], values: Callable[[Tensor], Tensor]) -> None:
    """Fill a box whose element [i, j, ...] has the flat index places[0][i] + places[1][j] + ... in the parameter."""
    if local.numel() == 0:
        return
    row_elements = local[0].numel()
    if local.dim() > 1 and row_elements > _CHUNK_ELEMENTS:  # the matrix of one expert can exceed a chunk
        for row, place in zip(local, places[0], strict=True):
            _fill_box(row, [places[1] + place, *places[2:]], values)
        return
    offsets_in_row = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim in range(1, local.dim()):
        offsets_in_row = offsets_in_row.unsqueeze(-1) + places[dim]
    rows_at_once = max(1, _CHUNK_ELEMENTS // row_elements)
    for start in range(0, local.shape[0], rows_at_once):
        rows = places[0][start : start + rows_at_once]
        local[start : start + rows_at_once] = values(rows.view(-1, *[1] * offsets_in_row.dim()) + offsets_in_row)


@torch.no_grad()
def fill_parameter(
    local: Tensor, indices: list[Tensor], global_shape: tuple[int, ...], *, seed: int, name: str, std: float
) -> None:
    """Fill in the initial value of a parameter or buffer of the model, defined by its row in `run/parameters.py`.

    Args:
        local: this rank's part of the parameter, any strides.
        indices: for each dimension of `local`, int64 [size]: the global indices that it holds.
        std: standard deviation of normal values.
    """
    initial = find_parameter(name).initial
    if initial == "ones":
        local.fill_(1.0)
    elif initial == "zeros":
        local.zero_()
    elif initial == "uniform":
        # The last dimension has a matrix's inputs, also where matrices of experts are stacked.
        bound = global_shape[-1] ** -0.5
        _fill_random(local, indices, global_shape, lambda index: uniform_at(seed, name, index) * bound)
    else:
        fill_normal(local, indices, global_shape, seed=seed, name=name, std=std)
