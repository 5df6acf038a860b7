"""Optimizer states in fewer bits: BF16, or 8-bit codes with one scale per block.

Blocks run along the last dimension, so that rows can be sharded anywhere: codes and scales are DTensors with the
parameter's placements, and a checkpoint loads on any mesh. Arithmetic is FP32; storing rounds once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm46.compat import quiet_libraries
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.optim.muon_layout import Zeros, is_sharding, state_like, zeros_on_device
from glm46.config.errors import UserError

# Short enough that GLM's matrices can be sharded along their columns between blocks.
BLOCK = 64

# As in torchao: for fewer entries the memory saved is not worth the error.
LEAST_ENTRIES = 4096


@lru_cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """The values of the codes, ascending, FP32 [256]: Dettmers' dynamic map (arXiv 2110.02861)."""
    # Imported here: only 8-bit states need it.
    quiet_libraries()
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(sorted(create_dynamic_map(signed)), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Quantized:
    """Codes uint8 [..., C] and scales FP32 [..., blocks of the last dimension], in the memory of the saved tensors."""

    codes: Tensor
    scales: Tensor
    signed: bool

    def __getitem__(self, select) -> "Quantized":
        """A part along leading dimensions, as a view."""
        return Quantized(self.codes[select], self.scales[select], self.signed)

    def load(self) -> Tensor:
        """The values, a new FP32 tensor."""
        values = _levels(self.signed, self.codes.device)[self.codes.int()]
        return values.mul_(self._spread(self.scales))

    def store(self, values: Tensor) -> None:
        """Round FP32 ``values`` to the nearest level of their block."""
        if not values.numel():
            return
        padding = self.scales.shape[-1] * BLOCK - values.shape[-1]
        blocks = torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, BLOCK))
        self.scales.copy_(blocks.abs().amax(-1))
        levels = _levels(self.signed, values.device)
        # An all-zero block has scale zero; any divisor keeps its values at zero.
        relative = values / self._spread(self.scales.clamp(min=torch.finfo(torch.float32).tiny))
        self.codes.copy_(torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2))

    def _spread(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(BLOCK, dim=-1)[..., : self.codes.shape[-1]]


State = Tensor | Quantized
StateType = torch.dtype | Literal["8bit"]


def make_state(
    name: str, parameter: Tensor, dtype: StateType, signed: bool, zeros: Zeros = zeros_on_device
) -> dict[str, Tensor]:
    """The saved tensors of one state, by suffix of their names: "", or ".codes" and ".scales".

    Args:
        name: name of the parameter, for the message.
        parameter: a tensor or DTensor; the state gets its shape, mesh and placements.
        dtype: a floating type, or "8bit"; vectors and small tensors stay FP32 under "8bit".
        signed: True if values can be negative.
        zeros: makes this rank's part of a tensor.

    Raises:
        UserError: a shard would end inside an 8-bit block.
    """
    if dtype != "8bit":
        return {"": state_like(parameter, dtype, zeros=zeros)}
    if parameter.ndim < 2 or parameter.numel() < LEAST_ENTRIES:
        return {"": state_like(parameter, torch.float32, zeros=zeros)}
    if isinstance(parameter, DTensor):
        last = parameter.ndim - 1
        ways = [size for size, p in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
                if is_sharding(p) and p.dim == last]  # fmt: skip
        if ways and parameter.shape[-1] % (BLOCK * math.prod(ways)):
            raise UserError(
                f'[optimizer] state_dtype = "8bit": {name} has its {parameter.shape[-1]} columns over '
                f"{math.prod(ways)} ranks, which must leave multiples of {BLOCK}; use another layout or type"
            )
    codes = state_like(parameter, torch.uint8, zeros=zeros)
    # The code of zero, so that a fresh state is zero under any scale.
    local_tensor(codes).fill_(int((_levels(signed, torch.device("cpu")) == 0).nonzero()[0]))
    return {".codes": codes, ".scales": state_like(parameter, torch.float32, block=BLOCK, zeros=zeros)}


def local_state(tensors: dict[str, Tensor], signed: bool, view=local_tensor) -> State:
    """This rank's part of the tensors of ``make_state``; ``view`` takes it from each tensor, sharing memory."""
    if "" in tensors:
        return view(tensors[""])
    return Quantized(view(tensors[".codes"]), view(tensors[".scales"]), signed)


def state_parts(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return (state.codes, state.scales) if isinstance(state, Quantized) else (state,)


def load_state(state: State, like: Tensor) -> Tensor:
    """The values in FP32, or in the type of ``like`` if that is wider; a new tensor."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return state.load().to(wide) if isinstance(state, Quantized) else state.to(wide, copy=True)


def store_state(state: State, values: Tensor) -> None:
    """Write ``values`` in the type of the state."""
    if isinstance(state, Quantized):
        state.store(values)
    else:
        state.copy_(values)


_ALIGNMENT = 256
"""Bytes; enough for every type and every copy engine."""


def packed_bytes(item: Sequence[State]) -> int:
    """Bytes that `views_like` needs for the states of an item."""
    return sum(_aligned(tensor) for state in item for tensor in state_parts(state))


def views_like(item: Sequence[State], buffer: Tensor) -> list[State]:
    """Contiguous tensors within ``buffer``, uint8, with the types and shapes of the states of an item."""
    views: list[State] = []
    start = 0
    for state in item:
        parts = []
        for tensor in state_parts(state):
            size = tensor.numel() * tensor.element_size()
            parts.append(buffer[start : start + size].view(tensor.dtype).view(tensor.shape))
            start += _aligned(tensor)
        views.append(Quantized(parts[0], parts[1], state.signed) if isinstance(state, Quantized) else parts[0])
    return views


def copy_states(targets: Sequence[State], sources: Sequence[State]) -> None:
    """Copy states of equal shapes and types, without waiting for a GPU."""
    for target, source in zip(targets, sources, strict=True):
        for to, of in zip(state_parts(target), state_parts(source), strict=True):
            _copy_tensor(to, of)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _copy_tensor(target: Tensor, source: Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    # torch would copy a non-contiguous view to a new host tensor first and wait. Copy it by rows, which are contiguous.
    for to, of in zip(target, source, strict=True):
        _copy_tensor(to, of)
