"""Import of weights from a Hugging Face folder, or from one of another program in DCP's format, directly into each
rank's part of the model.

A rank reads only the bytes that it keeps. Nothing is converted on disk, and a tensor is whole in memory only on a rank
that holds it whole.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import catch_user_error
from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.compute.model.quantised_weights import CODE_SHIFT, NF4_LEVELS, base_dtype_of, format_of, scales_in_fp32
from glm46.config.adapter import BASE_FORMATS
from glm46.config.errors import raise_if
from glm46.config.model import ModelShape
from glm46.files.tensor_file import Box, Record, TensorFile, is_finite
from glm46.run.parameters import scales_name
from glm46.storage.checkpoint.stored_values import DiskTensor
from glm46.storage.huggingface.boxes import Interval, Overlap, intervals_of, overlaps
from glm46.storage.huggingface.dcp_folder import DcpFolder
from glm46.storage.huggingface.folder_check import check_base, check_folder
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import MOST_SHOWN

ReportBytes = Callable[[int], None]
"""Called after the part of a tensor was read or written, with its size in the model, in bytes."""

NOT_FINITE = "holds NaN or infinite values: its training diverged; take weights of an earlier step"

_LOG = logging.getLogger(__name__)
_LARGEST_CODE = 247
"""Of the 8-bit floats of NF4's scales."""


@torch.no_grad()
def import_weights(
    folder: Path, shape: ModelShape, tensors: Mapping[str, Tensor], *, report: ReportBytes | None = None
) -> int:
    """Fill this rank's parts of parameters and buffers from a Hugging Face folder. Collective. Returns the bytes that
    this rank read.

    Args:
        tensors: our name -> Tensor or DTensor, any type and device; ranks may hold different names (pipeline stages).
            Quantised frozen weights are as in `compute/model/quantised_weights.py`, beside their scales. Those of 4
            bits are quantised from what the folder has, unless it is the same format; no more than a box at once.

    Raises:
        UserError: on all ranks. Either all faults of the folder, before a tensor is changed; or tensors that hold NaN
            or infinity, and repeats of embedding and head that differ from them.
        CheckpointError: on all ranks, if reading failed on any of them.
    """
    ranks = Ranks.of_this_run()
    with ranks.stage(f"checking {folder}") as stage:
        if ranks.is_first:
            scales = next((tensors[name] for name in map(scales_name, tensors) if name in tensors), None)
            base_dtype = None if scales is None else base_dtype_of(scales)
            _, error = catch_user_error(lambda: check_base(folder, shape, base_dtype))
            stage.value = error and error.faults
    raise_if(stage.values[0] or [])
    with ranks.stage(f"reading {folder}") as stage, FolderReader(folder, shape) as reader:
        stage.value = []
        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        of_weights = {scales_name(name) for name in tensors}
        for name, tensor in tensors.items():
            if report is not None:
                report(local[name].nbytes)
            if name not in of_weights:
                stage.value += reader.fill(name, local[name], global_indices(tensor), local.get(scales_name(name)))
    faults = sorted({f"{folder}: {fault}" for faults in stage.values for fault in faults})
    more = [f"{folder}: {len(faults) - MOST_SHOWN} more tensors are faulty"] if faults[MOST_SHOWN:] else []
    raise_if(faults[:MOST_SHOWN] + more)
    return reader.bytes_read


def quantise_base(weight: Tensor, base_dtype: str) -> tuple[Tensor, Tensor]:
    """Values and scales of some rows of a weight in a format of 4 bits, as `compute/model/quantised_weights.py` has
    them. ``weight``: FP32 [rows, I], of whole groups of columns."""
    if base_dtype == "nf4":
        return encode_nf4(weight)
    parts = Int4(BASE_FORMATS[base_dtype].columns).quantise(weight)
    return parts["_packed"].view(torch.uint8), parts["_scale"].view(torch.int16)


def encode_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales in NF4 of a weight, FP32 [O, I] and finite. Of each block the scale is the better one of the
    8-bit floats below and above its largest value."""
    blocks = weight.unflatten(-1, (-1, BASE_FORMATS["nf4"].columns))
    below = blocks.abs().amax(-1).half().clamp(max=torch.finfo(torch.float16).max).view(torch.int16) >> CODE_SHIFT
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    bounds, found = (levels[1:] + levels[:-1]) / 2, []
    for codes in (below, below + 1):
        scales = codes.clamp(1, _LARGEST_CODE).to(torch.uint8)
        in_fp32 = scales_in_fp32(scales).unsqueeze(-1)
        values = torch.bucketize(blocks / in_fp32, bounds, out_int32=True)
        error = (levels[values] * in_fp32 - blocks).square_().sum(-1)
        found.append((values, scales, error))
    (low, low_scales, low_error), (high, high_scales, high_error) = found
    is_low = low_error <= high_error
    values = torch.where(is_low.unsqueeze(-1), low, high).to(torch.uint8).view(weight.shape)
    return values[:, ::2] | values[:, 1::2] << 4, torch.where(is_low, low_scales, high_scales)


class FolderReader:
    """Fills local parts of our tensors from a folder. It checks the folder first, and opens each file on first use.

    Attributes:
        names: of the folder's tensors that the model has.
        found: Hugging Face name -> file and record, scales included.
        scheme: of its quantised weights, or None.
        quantised: Hugging Face name -> shape of these.

    Raises:
        UserError: see `check_folder`.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self.names, self.found, self.scheme, self.quantised, notes, dcp = check_folder(folder, shape)
        self._records: dict[Path, dict[str, Record]] = {}
        for name, (path, record) in self.found.items():
            self._records.setdefault(path, {})[name] = record
        self._open: dict[Path, TensorFile | DcpFolder] = {} if dcp is None else {folder: dcp}
        if not dist.is_initialized() or dist.get_rank() == 0:
            for note in notes:
                _LOG.warning(note)

    def __enter__(self) -> "FolderReader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_moved for file in self._open.values())

    def fill(self, name: str, local: Tensor, held: list[Tensor], scales: Tensor | None = None) -> list[str]:
        """Fill one local part.

        Args:
            held: int64 per dimension, see `global_indices`.
            scales: of a quantised frozen weight; filled too.

        Returns:
            Faults: values that are not finite, repeats that differ.
        """
        columns, intervals = 1 if scales is None else 8 // format_of(scales).bits, [intervals_of(one) for one in held]
        if columns > 1:
            intervals[-1] = [Interval(*(columns * value for value in astuple(one))) for one in intervals[-1]]
        filled, faults = 0, []
        for part in self.names.entries[name].parts:
            differs, finite = False, True
            if part.is_repeat and part.hf_name not in self.found:
                continue
            for overlap in overlaps(part, intervals):
                if part.is_repeat:
                    differs |= not self._equals(part.hf_name, overlap.box, local[overlap.local])
                    continue
                filled += prod(length for _, length in overlap.box)
                if scales is None:
                    self.read(part.hf_name, overlap.box, target := local[overlap.local])
                    finite &= is_finite(target)
                else:
                    finite &= self._read_quantised(part.hf_name, overlap, local, scales)
            if not finite:
                faults.append(f"tensor {part.hf_name} {NOT_FINITE}")
            if differs:
                faults.append(f"tensor {part.hf_name} differs from {name}, which it must repeat")
        assert filled == columns * local.numel(), f"{name}: {filled} of {columns * local.numel()} elements were read"
        return faults

    def read(self, hf_name: str, box: Box, target: Tensor) -> None:
        """Read a box of a weight into memory of any type; quantised values are converted through FP32."""
        shape = self.quantised.get(hf_name)
        if shape is None:
            self._file(hf_name).fill(hf_name, box, target)
        else:
            assert self.scheme is not None
            target.copy_(self.scheme.dequantise(self._parts(hf_name, box), shape, box))

    def is_as_stored(self, hf_name: str, base_dtype: str) -> bool:
        """True if a base in this format has the values of the folder, which holds the weight so."""
        scheme = {"float8": Fp8, "int4": Int4}.get(base_dtype)
        return scheme is not None and isinstance(self.scheme, scheme) and hf_name in self.quantised

    def _read_quantised(self, hf_name: str, overlap: Overlap, values: Tensor, scales: Tensor) -> bool:
        """Read a box of a weight into the format of its scales, without converting it if the folder has the same one;
        returns whether it is finite."""
        base_dtype, (bits, columns, *_) = base_dtype_of(scales), format_of(scales)
        rows: list[Any] = [*overlap.local]
        held = rows.pop()
        if self.is_as_stored(hf_name, base_dtype):
            parts = self._parts(hf_name, overlap.box)
            if isinstance(self.scheme, Int4):
                codes, found = self.scheme.packed_groups(parts, overlap.box, columns)
            else:
                assert isinstance(self.scheme, Fp8)
                codes = parts[""].view(torch.uint8)
                found = self.scheme.scales_of_columns(parts, self.quantised[hf_name], overlap.box, columns)
            is_sound = is_finite(found) and ("" not in parts or is_finite(parts[""].float()))
        else:
            weight = torch.empty([length for _, length in overlap.box], dtype=torch.float32, device=values.device)
            self.read(hf_name, overlap.box, weight)
            is_sound, (codes, found) = is_finite(weight), quantise_base(weight, base_dtype)
        values[(*rows, slice(held.start * bits // 8, held.stop * bits // 8))] = codes.to(values.device)
        scales[(*rows, slice(held.start // columns, held.stop // columns))] = found.view(scales.dtype).to(scales.device)
        return is_sound

    def _equals(self, hf_name: str, box: Box, target: Tensor) -> bool:
        """True if a box of a repeat equals the values read before; in FP8, up to rounding."""
        if hf_name not in self.quantised:
            return torch.equal(target, self._file(hf_name).read(hf_name, box).to(target))
        assert isinstance(self.scheme, Fp8)  # no other scheme quantises repeats
        return self.scheme.matches(target.float().cpu(), self._parts(hf_name, box), self.quantised[hf_name], box)

    def _parts(self, hf_name: str, box: Box) -> dict[str, Tensor]:
        """Tensors that a box of a quantised weight needs, by suffix."""
        assert self.scheme is not None
        boxes = self.scheme.boxes(self.quantised[hf_name], box).items()
        return {suffix: self._file(hf_name + suffix).read(hf_name + suffix, part) for suffix, part in boxes}

    def stored(self, name: str) -> "FolderTensor":
        """One of our tensors, whose parts are read when they are indexed."""
        return FolderTensor(self, name)

    def _file(self, hf_name: str) -> TensorFile | DcpFolder:
        path = self.found[hf_name][0]
        if path not in self._open:
            self._open[path] = TensorFile(path, self._records[path])
        return self._open[path]


class FolderTensor(DiskTensor):
    """One of our tensors in a folder. Indexing raises UserError if it is not finite, or differs from its repeat.

    Its type is that of the stored values; FP32 if they are quantised or of several types.
    """

    def __init__(self, reader: FolderReader, name: str):
        entry = reader.names.entries[name]
        parts = [part.hf_name for part in entry.parts if not part.is_repeat]
        types = {torch.float32 if one in reader.quantised else reader.found[one][1].dtype for one in parts}
        self.shape, self.dtype = entry.shape, types.pop() if len(types) == 1 else torch.float32
        self._reader, self._name = reader, name

    def _fill(self, out: Tensor, ranges: Sequence[range]) -> None:
        held = [torch.arange(places.start, places.stop, places.step) for places in ranges]
        raise_if(self._reader.fill(self._name, out, held))
