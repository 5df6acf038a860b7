"""INT4 weights of a Hugging Face folder: eight values in an int32, and one scale per group of 128 weights of a row.

The format is `pack-quantized` of compressed-tensors, which vLLM and SGLang read with W4A16 kernels: ``X.weight_packed``
int32 [O, I / 8], ``X.weight_scale`` BF16 [O, I / 128], ``X.weight_shape`` int64 [2]; symmetric, values -8 to 7.
Sources: compressed-tensors 0.20 `compressors/pack_quantized/base.py` and `helpers.py`, `quantization/quant_scheme.py`
(W4A16); vLLM `compressed_tensors_wNa16.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from glm46.files.tensor_file import Box
from glm46.storage.huggingface.names import HFNames

_LARGEST = 7
_LOWEST = -8
_IN_INT32 = 8
_FIRST_FACTOR = 0.7
_FACTORS = 8
_MOST_ELEMENTS = 1 << 18
"""Number of weights per search step, so that the search stays in the cache: half the time of 1 << 22."""


@dataclass(frozen=True)
class Int4:
    """Weights [O, I] with I a multiple of `group`."""

    group: int = 128
    format = "pack-quantized"
    suffixes = ("_packed", "_scale", "_shape")

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a weight of this shape can be stored."""
        return shape[1] % self.group == 0

    def stored(self, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return type and shape of each tensor that stores a weight, by suffix of the weight's name."""
        rows, columns = shape
        packed = (rows, columns // _IN_INT32)
        scales = (rows, columns // self.group)
        return {"_packed": (torch.int32, packed), "_scale": (torch.bfloat16, scales), "_shape": (torch.int64, (2,))}

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantise a weight. Returns the tensors that store it, by suffix.

        Each group takes the scale with the smallest sum of squared errors among `_FACTORS` candidates, which may clip
        its largest values, and the two that map its largest value to 7 or 8 exactly. With those two, quantising a
        dequantised weight in FP32 gives the same bytes.

        Args:
            weight: FP32 [O, I], finite.
        """
        rows = max(1, _MOST_ELEMENTS // weight.shape[1])
        parts = [self._quantise_rows(part) for part in weight.split(rows)]
        values, scales = (torch.cat(same_kind) for same_kind in zip(*parts, strict=True))
        return {"_packed": _pack(values), "_scale": scales, "_shape": torch.tensor(weight.shape)}

    def _quantise_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.reshape(weight.shape[0], -1, self.group)
        largest = groups.abs().amax(-1)
        factors = torch.linspace(_FIRST_FACTOR, 1.0, _FACTORS).tolist()
        candidates = [largest / 8, largest / 7, *(largest / 7.5 * factor for factor in factors)]
        unit = torch.where(largest > 0, largest, torch.ones_like(largest))  # squares of large weights overflow
        best = torch.full_like(largest, torch.inf)
        scales = torch.ones_like(largest)
        for candidate in candidates:
            candidate = candidate.bfloat16().float()
            candidate[candidate == 0] = 1.0  # a group of zeros, or of numbers too small for BF16
            back = _rounded(groups, candidate) * (candidate / unit).unsqueeze(-1)
            error = (back - groups / unit.unsqueeze(-1)).square_().sum(-1)
            is_better = error < best
            best = torch.where(is_better, error, best)
            scales = torch.where(is_better, candidate, scales)
        values = _rounded(groups, scales).to(torch.int8).view(weight.shape)
        return values, scales.bfloat16()

    def boxes(self, shape: tuple[int, ...], box: Box) -> dict[str, Box]:
        """Return the boxes of the stored tensors that a box of the weight needs."""
        rows, (start, length) = box
        first = start // self.group
        groups = -(-(start + length) // self.group) - first
        words = self.group // _IN_INT32
        return {"_packed": (rows, (first * words, groups * words)), "_scale": (rows, (first, groups))}

    def dequantise(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], box: Box) -> Tensor:
        """Return the FP32 weights of a box, from the parts of its `boxes`."""
        values = _unpack(parts["_packed"]).float()
        scales = parts["_scale"].float().repeat_interleave(self.group, dim=1)
        skipped = box[1][0] % self.group
        return (values * scales)[:, skipped : skipped + box[1][1]]

    def packed_groups(self, parts: Mapping[str, Tensor], box: Box, group: int) -> tuple[Tensor, Tensor]:
        """Return the stored values of a box, uint8 [rows, columns / 2], and their scales, one per ``group`` columns,
        from the parts of its `boxes`. The folder's group size must be a multiple of ``group``."""
        start = box[1][0] % self.group
        length = box[1][1]
        pairs = parts["_packed"].contiguous().view(torch.uint8)[:, start // 2 : (start + length) // 2]
        scales = parts["_scale"].repeat_interleave(self.group // group, dim=1)
        return pairs, scales[:, start // group : (start + length) // group]

    def weights_in(
        self, records: Mapping[str, Any], names: HFNames
    ) -> tuple[dict[str, tuple[int, ...]], set[str], list[str]]:
        """Return the quantised weights of a folder by name, with their shapes; the names of the tensors that store
        them; and faults. ``records``: record with `dtype` and `shape` by Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {}
        stored_names: set[str] = set()
        faults = []
        for stored_name, record in records.items():
            name = stored_name.removesuffix("_packed")
            if name == stored_name or not name.endswith(".weight"):
                continue
            stored_names |= {name + suffix for suffix in self.suffixes} & set(records)
            shape = (*record.shape[:-1], prod(record.shape[-1:]) * _IN_INT32)
            shapes[name] = shape
            if name in names.places and names.places[name][0].row.fp8_family is None:
                faults.append(f"tensor {name} is INT4; only projections may be")
            if len(shape) != 2 or not self.fits(shape):
                faults.append(f"tensor {stored_name} is {list(record.shape)}, no rows of groups of {self.group}")
                continue
            for suffix, (dtype, want) in self.stored(shape).items():
                part = records.get(name + suffix)
                if part is None:
                    faults.append(f"tensor {name} is INT4, but {name}{suffix} is missing")
                elif part.shape != want or not _may_hold(suffix, part.dtype, dtype):
                    faults.append(f"tensor {name}{suffix} is {list(part.shape)} {part.dtype}, it must be {list(want)}")
        return shapes, stored_names, faults

    def group_of_config(self) -> dict[str, Any]:
        """Return the group of layers for `quantization_config`: weights only."""
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group}
        weights |= {"dynamic": False, "actorder": None}
        return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}


def _may_hold(suffix: str, dtype: torch.dtype, want: torch.dtype) -> bool:
    if suffix == "_scale":
        return dtype in (torch.float32, torch.bfloat16, torch.float16)
    return suffix == "_shape" or dtype == want


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales.unsqueeze(-1)).round_().clamp_(_LOWEST, _LARGEST)


def _pack(values: Tensor) -> Tensor:
    """Pack int8 [O, I] of -8 to 7 as int32 [O, I / 8]; element i, with 8 added, is in the four bits from 4 i on."""
    nibbles = (values - _LOWEST).to(torch.uint8)
    return (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).view(torch.int32)


def _unpack(packed: Tensor) -> Tensor:
    """Unpack int32 [O, I / 8] to int8 [O, I]."""
    pairs = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(packed.shape[0], -1)
    return nibbles.to(torch.int8) + _LOWEST
