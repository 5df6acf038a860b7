"""Imports weights from a Hugging Face folder, or from another program's folder in DCP's format, directly into each
rank's part of the model.

A rank reads only the bytes that it keeps. Nothing is converted on disk, and a full tensor is in memory only on a rank
that holds all of it.
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
from glm46.storage.checkpoint.boxes import Interval, SharedBox, intervals_of, overlaps
from glm46.storage.checkpoint.stored_values import DiskTensor
from glm46.storage.huggingface.dcp_folder import DcpFolder
from glm46.storage.huggingface.folder_check import check_base, check_folder
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import MOST_SHOWN

ReportBytes = Callable[[int], None]
"""Progress callback: called for each tensor with the size of this rank's part in the model, in bytes."""

NOT_FINITE = "holds NaN or infinite values: its training diverged; take weights of an earlier step"

_LOG = logging.getLogger(__name__)
_LARGEST_CODE = 247
"""Largest finite code of the 8-bit floats that store NF4's scales."""


@torch.no_grad()
def import_weights(
    folder: Path, shape: ModelShape, tensors: Mapping[str, Tensor], *, report: ReportBytes | None = None
) -> int:
    """Fill this rank's parts of parameters and buffers from a Hugging Face folder. Collective. Returns the bytes that
    this rank read.

    Args:
        tensors: Tensor or DTensor by our name, any type and device; ranks may hold different names (pipeline stages).
            Quantised frozen weights are stored as in `compute/model/quantised_weights.py`, next to their scales.
            Weights of 4 bits are quantised from the folder's values, box by box, unless the folder has the same format.

    Raises:
        UserError: on all ranks. Either all faults of the folder, before a tensor is changed; or tensors that hold NaN
            or infinity, and repeats that differ from the embedding or head.
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
        scale_names = {scales_name(name) for name in tensors}
        for name, tensor in tensors.items():
            if report is not None:
                report(local[name].nbytes)
            if name not in scale_names:
                stage.value += reader.fill(name, local[name], global_indices(tensor), local.get(scales_name(name)))
    faults = sorted({f"{folder}: {fault}" for faults in stage.values for fault in faults})
    summary = [f"{folder}: {len(faults) - MOST_SHOWN} more tensors are faulty"] if faults[MOST_SHOWN:] else []
    raise_if(faults[:MOST_SHOWN] + summary)
    return reader.bytes_read


def quantise_base(weight: Tensor, base_dtype: str) -> tuple[Tensor, Tensor]:
    """Quantise some rows of a weight to a format of 4 bits. Returns values and scales as described in
    `compute/model/quantised_weights.py`. ``weight``: FP32 [rows, I], with complete groups of columns."""
    if base_dtype == "nf4":
        return encode_nf4(weight)
    parts = Int4(BASE_FORMATS[base_dtype].columns).quantise(weight)
    return parts["_packed"].view(torch.uint8), parts["_scale"].view(torch.int16)


def encode_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight, FP32 [O, I] and finite, to NF4. Returns values and scales. The scale of each block is the
    better one of the 8-bit floats below and above its largest value."""
    blocks = weight.unflatten(-1, (-1, BASE_FORMATS["nf4"].columns))
    below = blocks.abs().amax(-1).half().clamp(max=torch.finfo(torch.float16).max).view(torch.int16) >> CODE_SHIFT
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    bounds = (levels[1:] + levels[:-1]) / 2
    candidates = []
    for codes in (below, below + 1):
        scales = codes.clamp(1, _LARGEST_CODE).to(torch.uint8)
        fp32_scales = scales_in_fp32(scales).unsqueeze(-1)
        values = torch.bucketize(blocks / fp32_scales, bounds, out_int32=True)
        error = (levels[values] * fp32_scales - blocks).square_().sum(-1)
        candidates.append((values, scales, error))
    (low, low_scales, low_error), (high, high_scales, high_error) = candidates
    is_low = low_error <= high_error
    values = torch.where(is_low.unsqueeze(-1), low, high).to(torch.uint8).view(weight.shape)
    return values[:, ::2] | values[:, 1::2] << 4, torch.where(is_low, low_scales, high_scales)


class FolderReader:
    """Fills local parts of our tensors from a folder. It checks the folder first, and opens each file on first use.

    Attributes:
        names: table of the folder's tensors that the model has.
        found: file and record by Hugging Face name, scales included.
        scheme: scheme of its quantised weights, or None.
        quantised: shapes of the quantised weights by Hugging Face name.

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
            held: the global indices of the local part, int64 per dimension, see `global_indices`.
            scales: the scales if the weight is quantised and frozen; filled too.

        Returns:
            Faults: values that are not finite, repeats that differ.
        """
        columns = 1 if scales is None else 8 // format_of(scales).bits
        intervals = [intervals_of(index) for index in held]
        if columns > 1:
            intervals[-1] = [Interval(*(columns * value for value in astuple(index))) for index in intervals[-1]]
        filled = 0
        faults = []
        for part in self.names.entries[name].parts:
            differs = False
            all_finite = True
            if part.is_repeat and part.hf_name not in self.found:
                continue
            for overlap in overlaps(part.start, part.hf_shape, intervals):
                if part.is_repeat:
                    differs |= not self._equals(part.hf_name, overlap.box, local[overlap.local])
                    continue
                filled += prod(length for _, length in overlap.box)
                if scales is None:
                    self.read(part.hf_name, overlap.box, target := local[overlap.local])
                    all_finite &= is_finite(target)
                else:
                    all_finite &= self._read_quantised(part.hf_name, overlap, local, scales)
            if not all_finite:
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
        """Return True if the folder holds the weight in this base format, so that its values can stay unchanged."""
        scheme = {"float8": Fp8, "int4": Int4}.get(base_dtype)
        return scheme is not None and isinstance(self.scheme, scheme) and hf_name in self.quantised

    def _read_quantised(self, hf_name: str, overlap: SharedBox, values: Tensor, scales: Tensor) -> bool:
        """Read a box of a weight into the format of its scales, without conversion if the folder has the same format.
        Returns whether it is finite."""
        base_dtype, (bits, columns, *_) = base_dtype_of(scales), format_of(scales)
        rows: list[Any] = [*overlap.local]
        columns_held = rows.pop()
        if self.is_as_stored(hf_name, base_dtype):
            parts = self._parts(hf_name, overlap.box)
            if isinstance(self.scheme, Int4):
                codes, box_scales = self.scheme.packed_groups(parts, overlap.box, columns)
            else:
                assert isinstance(self.scheme, Fp8)
                codes = parts[""].view(torch.uint8)
                box_scales = self.scheme.scales_of_columns(parts, self.quantised[hf_name], overlap.box, columns)
            finite = is_finite(box_scales) and ("" not in parts or is_finite(parts[""].float()))
        else:
            weight = torch.empty([length for _, length in overlap.box], dtype=torch.float32, device=values.device)
            self.read(hf_name, overlap.box, weight)
            finite, (codes, box_scales) = is_finite(weight), quantise_base(weight, base_dtype)
        values[(*rows, slice(columns_held.start * bits // 8, columns_held.stop * bits // 8))] = codes.to(values.device)
        scales[(*rows, slice(columns_held.start // columns, columns_held.stop // columns))] = box_scales.view(
            scales.dtype
        ).to(scales.device)
        return finite

    def _equals(self, hf_name: str, box: Box, target: Tensor) -> bool:
        """Return True if a box of a repeat equals the values read earlier; in FP8, up to rounding."""
        if hf_name not in self.quantised:
            return torch.equal(target, self._file(hf_name).read(hf_name, box).to(target))
        assert isinstance(self.scheme, Fp8)  # no other scheme quantises repeats
        return self.scheme.matches(target.float().cpu(), self._parts(hf_name, box), self.quantised[hf_name], box)

    def _parts(self, hf_name: str, box: Box) -> dict[str, Tensor]:
        """Return the tensors that a box of a quantised weight needs, by suffix."""
        assert self.scheme is not None
        boxes = self.scheme.boxes(self.quantised[hf_name], box).items()
        return {suffix: self._file(hf_name + suffix).read(hf_name + suffix, part) for suffix, part in boxes}

    def tensors(self) -> "dict[str, FolderTensor]":
        """Return the model's tensors by glm46 name; each is read when it is indexed."""
        return {name: FolderTensor(self, name) for name in self.names.entries}

    def _file(self, hf_name: str) -> TensorFile | DcpFolder:
        path = self.found[hf_name][0]
        if path not in self._open:
            self._open[path] = TensorFile(path, self._records[path])
        return self._open[path]


class FolderTensor(DiskTensor):
    """One of our tensors in a folder. Indexing raises UserError if it is not finite, or differs from its repeat.

    Its dtype is the dtype of the stored values; FP32 if they are quantised or of several types.
    """

    def __init__(self, reader: FolderReader, name: str):
        entry = reader.names.entries[name]
        hf_names = [part.hf_name for part in entry.parts if not part.is_repeat]
        types = {torch.float32 if part in reader.quantised else reader.found[part][1].dtype for part in hf_names}
        self.shape = entry.shape
        self.dtype = types.pop() if len(types) == 1 else torch.float32
        self._reader = reader
        self._name = name

    def _fill(self, out: Tensor, ranges: Sequence[range]) -> None:
        held = [torch.arange(places.start, places.stop, places.step) for places in ranges]
        raise_if(self._reader.fill(self._name, out, held))
