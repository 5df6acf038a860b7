"""Optimizer states in fewer bits: BF16, or 8-bit codes with one scale per block.

Blocks run along the last dimension, so that rows can be sharded anywhere. Codes and scales are DTensors with the
parameter's placements, and a checkpoint loads on any mesh. Arithmetic is FP32. Storing rounds once, stochastically:
rounding to nearest would undo a decay that is smaller than half the distance between two levels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm46.compat import quiet_libraries
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.optim.muon_layout import Zeros, is_sharding, state_like, zeros_on_device
from glm46.compute.optim.rounding import RANDOM_RANGE, RandomBits, store_bfloat16
from glm46.config.errors import UserError

# Short enough that GLM's matrices can be sharded along their columns between blocks.
BLOCK = 64

# As in torchao: for smaller tensors the saved memory is not worth the error.
MIN_ENTRIES = 4096


@lru_cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """Return the values of the codes, ascending, FP32 [256]: Dettmers' dynamic map (arXiv 2110.02861)."""
    # Imported here: only 8-bit states need it.
    quiet_libraries()
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(sorted(create_dynamic_map(signed)), dtype=torch.float32, device=device)


def _largest_level(signed: bool) -> float:
    """Return the largest magnitude available for both signs. torchao's signed map has 1.0, but not -1.0."""
    return -float(_levels(True, torch.device("cpu"))[0]) if signed else 1.0


@dataclass(frozen=True)
class Quantized:
    """Codes uint8 [..., C] and scales FP32 [..., blocks of the last dimension], in the memory of the saved tensors.

    A signed value is the level of its code times the scale of its block. An unsigned value, such as a second moment, is
    the square of the level times the scale: its square root has the range and precision of a first moment.

    The scales of unsigned blocks are stored as negative numbers, to distinguish them from checkpoints before version
    0.2. In those, scales are positive, and an unsigned value is the level itself times the scale.
    """

    codes: Tensor
    scales: Tensor
    signed: bool

    def __getitem__(self, select: slice | tuple[slice, ...]) -> "Quantized":
        """Select a part along leading dimensions, as a view."""
        return Quantized(self.codes[select], self.scales[select], self.signed)

    def load(self) -> Tensor:
        """Return the values in a new FP32 tensor."""
        values = _levels(self.signed, self.codes.device)[self.codes.int()]
        scales = self._spread(self.scales)
        if self.signed:
            return values.mul_(scales)
        return torch.where(scales < 0.0, values.square(), values).mul_(scales.abs())

    def store(self, values: Tensor, random_bits: RandomBits) -> None:
        """Round FP32 ``values`` stochastically to one of the two nearest levels of their block.

        A positive unsigned value never becomes zero: AdamW divides by its square root.
        """
        if not values.numel():
            return
        levels = _levels(self.signed, values.device)
        if not self.signed:
            levels = levels.square()
        max_level = _largest_level(self.signed)
        padding = self.scales.shape[-1] * BLOCK - values.shape[-1]
        blocks = torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1).div_(max_level)
        self.scales.copy_(scales if self.signed else -scales)
        # A block of zeros has the scale zero; any positive divisor keeps its values at zero.
        relative = values / self._spread(scales.clamp_(min=torch.finfo(torch.float32).tiny))
        if not self.signed:  # levels[0] is 0
            relative = torch.where(values > 0.0, relative.clamp(min=levels[1]), relative)
        lower_codes = torch.bucketize(relative, levels, out_int32=True, right=True).sub_(1).clamp_(0, len(levels) - 2)
        # The relative distance from the lower level is the probability of the upper level.
        lower_levels = levels[lower_codes]
        fraction = (relative - lower_levels).div_(levels[lower_codes + 1] - lower_levels)
        is_raised = random_bits(values.device) < fraction.mul_(RANDOM_RANGE)
        self.codes.copy_(lower_codes + is_raised)

    def _spread(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(BLOCK, dim=-1)[..., : self.codes.shape[-1]]


State = Tensor | Quantized
StateType = torch.dtype | Literal["8bit"]


def make_state(
    name: str, parameter: Tensor, dtype: StateType, signed: bool, zeros: Zeros = zeros_on_device
) -> dict[str, Tensor]:
    """Create the saved tensors of one state, by suffix of their names: "", or ".codes" and ".scales".

    Args:
        name: name of the parameter, for the message.
        parameter: a tensor or DTensor; the state gets its shape, mesh and placements.
        dtype: a floating-point dtype, or "8bit"; vectors and small tensors stay FP32 under "8bit".
        signed: True if values can be negative.
        zeros: creates this rank's part of a tensor.

    Raises:
        UserError: a shard would end inside an 8-bit block.
    """
    if dtype != "8bit":
        return {"": state_like(parameter, dtype, zeros=zeros)}
    if parameter.ndim < 2 or parameter.numel() < MIN_ENTRIES:
        return {"": state_like(parameter, torch.float32, zeros=zeros)}
    column_ranks = _column_ranks(parameter)
    if column_ranks > 1 and parameter.shape[-1] % (BLOCK * column_ranks):
        raise UserError(
            f'[optimizer] state_dtype = "8bit": {name} has its {parameter.shape[-1]} columns over '
            f"{column_ranks} ranks, which must leave multiples of {BLOCK}; use another layout or type"
        )
    codes = state_like(parameter, torch.uint8, zeros=zeros)
    # Fill with the code of zero, so that a new state is zero under any scale.
    local_tensor(codes).fill_(int((_levels(signed, torch.device("cpu")) == 0).nonzero()[0]))
    return {".codes": codes, ".scales": state_like(parameter, torch.float32, block=BLOCK, zeros=zeros)}


def _column_ranks(parameter: Tensor) -> int:
    """Count the ranks over which the last dimension is sharded."""
    if not isinstance(parameter, DTensor):
        return 1
    last = parameter.ndim - 1
    mesh_sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in mesh_sizes if is_sharding(placement) and placement.dim == last)


def local_state(tensors: dict[str, Tensor], signed: bool, view: Callable[[Tensor], Tensor] = local_tensor) -> State:
    """Return this rank's part of the tensors of ``make_state``; ``view`` takes it from each tensor, sharing memory."""
    if "" in tensors:
        return view(tensors[""])
    return Quantized(view(tensors[".codes"]), view(tensors[".scales"]), signed)


def state_parts(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a state."""
    return (state.codes, state.scales) if isinstance(state, Quantized) else (state,)


def load_state(state: State, like: Tensor) -> Tensor:
    """Return the values in a new tensor, in FP32 or the dtype of ``like`` if that is wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return state.load().to(wide) if isinstance(state, Quantized) else state.to(wide, copy=True)


def store_state(state: State, values: Tensor, random_bits: RandomBits) -> None:
    """Write ``values`` in the dtype of the state; dtypes of fewer bits are rounded stochastically."""
    if isinstance(state, Quantized):
        state.store(values, random_bits)
    elif state.dtype == torch.bfloat16:
        store_bfloat16(state, values, random_bits)
    else:
        state.copy_(values)


_ALIGNMENT = 256
"""Alignment in bytes, enough for every dtype and every copy engine."""


def packed_bytes(item: Sequence[State]) -> int:
    """Return the bytes that `views_like` needs for the states of an item, which are updated together."""
    return sum(_aligned_bytes(tensor) for state in item for tensor in state_parts(state))


def views_like(item: Sequence[State], buffer: Tensor) -> list[State]:
    """Create contiguous tensors within ``buffer``, uint8, with the dtypes and shapes of the states of an item."""
    views: list[State] = []
    start = 0
    for state in item:
        parts = []
        for tensor in state_parts(state):
            size = tensor.numel() * tensor.element_size()
            parts.append(buffer[start : start + size].view(tensor.dtype).view(tensor.shape))
            start += _aligned_bytes(tensor)
        views.append(Quantized(parts[0], parts[1], state.signed) if isinstance(state, Quantized) else parts[0])
    return views


def copy_states(targets: Sequence[State], sources: Sequence[State]) -> None:
    """Copy states of equal shapes and dtypes, without waiting for a GPU."""
    for target, source in zip(targets, sources, strict=True):
        for target_part, source_part in zip(state_parts(target), state_parts(source), strict=True):
            _copy_tensor(target_part, source_part)


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _copy_tensor(target: Tensor, source: Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    # torch would copy a non-contiguous view to a new host tensor first and wait. Copy it by rows, which are contiguous.
    for target_row, source_row in zip(target, source, strict=True):
        _copy_tensor(target_row, source_row)
