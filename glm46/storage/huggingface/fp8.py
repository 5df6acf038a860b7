"""FP8 weights of a Hugging Face folder: an E4M3 tensor and a tensor of scales next to it.

Export writes two formats, both as `compressed-tensors`, which vLLM and SGLang read: "block", one scale per 128 x 128
weights (`X.weight_scale` [O / 128, I / 128]), and "channel", one per row ([O, 1]), as in GLM-4.5-FP8. Import reads both
and the older `quant_method = "fp8"` with `X.weight_scale_inv`, which is "block" under another name.
Sources: vLLM `compressed_tensors.py`, `utils.py` and `fp8_utils.py`; compressed-tensors `quant_scheme.py` (FP8_BLOCK,
FP8_DYNAMIC).

Scales are powers of two. A dequantised weight is then exact in BF16 and FP32, and quantising it again gives the same
bytes. This costs no precision: E4M3 has the same relative step in every binade of its normal range.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm46.files.tensor_file import Box
from glm46.storage.huggingface.names import HFEntry, HFNames, HFPart

_BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_ROUNDS_TO_LARGEST = 464.0
"""Largest number that rounds to 448: half a step above it. If the largest number of a block is between half of this
value and this value, its rounded value is too, so quantising again finds the same scale."""
_SCALE_TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Scheme:
    """Granularity of the scales of a weight [O, I]."""

    block: tuple[int, int] | None = (_BLOCK, _BLOCK)
    """Rows and columns with one scale; None: one scale per row."""
    suffix: str = "_scale"
    """Suffix that turns a weight's name into the name of its scales."""

    format = "float-quantized"

    @property
    def suffixes(self) -> tuple[str, str]:
        """Name suffixes of the tensors that store a weight."""
        return "", self.suffix

    def grid(self, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale, in a weight with this number of columns."""
        return (1, columns) if self.block is None else self.block

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        return tuple(-(-size // step) for size, step in zip(shape, self.grid(shape[1]), strict=True))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a weight of this shape is stored in FP8. vLLM and SGLang refuse to fuse matrices with a size
        that is not a multiple of the block (`validate_fp8_block_shape`), such as the dense layer of GLM-4.5-Air with
        10,944 rows."""
        return self.block is None or not any(size % step for size, step in zip(shape, self.block, strict=True))

    def stored(self, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return type and shape of each tensor that stores a weight, by suffix of the weight's name."""
        return {"": (torch.float8_e4m3fn, shape), self.suffix: (torch.float32, self.scale_shape(shape))}

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantise a weight, FP32 [O, I] and finite. Returns values in E4M3 [O, I] and scales in FP32, by suffix."""
        rows, columns = self.grid(weight.shape[1])
        grid = self.scale_shape(tuple(weight.shape))
        padded = weight.new_zeros(grid[0] * rows, grid[1] * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(grid[0], rows, grid[1], columns)
        largest = blocks.abs().amax((1, 3))
        # frexp: largest / 464 = m * 2**e with m in [0.5, 1): the next power of two is 2**e, or itself for 0.5.
        mantissa, exponent = torch.frexp(largest / _ROUNDS_TO_LARGEST)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scales = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest))
        values = (blocks / scales.view(grid[0], 1, grid[1], 1)).clamp(-_LARGEST, _LARGEST)
        values = values.view_as(padded)[: weight.shape[0], : weight.shape[1]]
        return {"": values.to(torch.float8_e4m3fn).contiguous(), self.suffix: scales}

    def boxes(self, shape: tuple[int, ...], box: Box) -> dict[str, Box]:
        """Return the boxes of the stored tensors that a box of the weight needs."""
        scale_box = tuple(
            (start // step, -(-(start + length) // step) - start // step)
            for (start, length), step in zip(box, self.grid(shape[1]), strict=True)
        )
        return {"": box, self.suffix: scale_box}

    def dequantise(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], box: Box) -> Tensor:
        """Return the FP32 weights of a box, from the parts of its `boxes`."""
        return parts[""].float().mul_(self.scales_of_columns(parts, shape, box))

    def scales_of_columns(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], box: Box, group: int = 1
    ) -> Tensor:
        """Return the FP32 scales [rows, columns / group] of a box with one scale per group of columns; see
        `dequantise`."""
        scales = parts[self.suffix].float()
        for dim, ((start, length), step) in enumerate(zip(box, self.grid(shape[1]), strict=True)):
            places = torch.arange(start, start + length, group if dim else 1) // step - start // step
            scales = scales.index_select(dim, places)
        return scales

    def matches(self, weight: Tensor, parts: Mapping[str, Tensor], shape: tuple[int, ...], box: Box) -> bool:
        """Return True if FP8 values of a box equal the weights up to one step of E4M3: other tools round
        differently."""
        step = self.scales_of_columns(parts, shape, box).mul_(2.0**-9)
        difference = self.dequantise(parts, shape, box).sub_(weight)
        return bool((difference.abs_() <= weight.abs() / 8 + step).all())

    def weights_in(
        self, records: Mapping[str, Any], names: HFNames
    ) -> tuple[dict[str, tuple[int, ...]], set[str], list[str]]:
        """Find the quantised weights, see `Int4.weights_in`. Tensors that are not part of the model are not checked
        here."""
        shapes: dict[str, tuple[int, ...]] = {}
        stored_names = set()
        faults = []
        for name, record in records.items():
            if record.dtype != torch.float8_e4m3fn:
                continue
            shapes[name] = record.shape
            scale = records.get(name + self.suffix)
            is_refused = name in names.places and not _may_be_fp8(*names.places[name])
            if is_refused or len(record.shape) != 2:
                faults.append(
                    f"tensor {name} is FP8; only projections, wq_b and wk of indexers, and shared_head.head may be"
                )
            elif scale is None:
                faults.append(f"tensor {name} is FP8, but {name}{self.suffix} is missing")
            elif scale.shape != self.scale_shape(record.shape) or scale.dtype not in _SCALE_TYPES:
                faults.append(
                    f"tensor {name}{self.suffix} is {list(scale.shape)} {scale.dtype}, it must be "
                    f"{list(self.scale_shape(record.shape))} in FP32 or BF16"
                )
            stored_names |= {name, name + self.suffix}
        return shapes, stored_names, faults

    def group_of_config(self) -> dict[str, Any]:
        """Return the group of layers for `quantization_config`. Activations are quantised dynamically, so no
        calibration is needed."""
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = common | {"dynamic": False, "strategy": "channel"}
        inputs = common | {"dynamic": True}
        if self.block is not None:
            weights |= {"strategy": "block", "block_structure": list(self.block)}
        inputs |= {"strategy": "group", "group_size": self.block[1]} if self.block else {"strategy": "token"}
        return {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}


def _may_be_fp8(entry: HFEntry, part: HFPart) -> bool:
    """Return True if a tensor may be FP8: GLM-4.5-FP8 and -Air-FP8 have the repeat of the head in FP8, but not the
    head. Indexers may have their keys in either type, and their weights of heads in BF16 alone."""
    if entry.row.part == "indexer":
        return entry.name.endswith((".wq_b.weight", ".wk.weight"))
    return entry.row.fp8_family is not None or (part.is_repeat and entry.name == "lm_head.weight")
