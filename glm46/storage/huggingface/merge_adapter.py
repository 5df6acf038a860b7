"""Merges adapters into a Hugging Face folder, some MB at a time; tensors without an adapter are copied byte for
byte."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from glm46.compute.distributed.collective_errors import catch_user_error
from glm46.compute.distributed.ranks import Ranks
from glm46.compute.model.quantised_weights import in_compute_type
from glm46.config.errors import UserError, raise_if
from glm46.files.durable import create_durably
from glm46.files.tensor_file import Box, Record, TensorFile, is_finite, lay_out
from glm46.run.parameters import base_families
from glm46.storage.huggingface.adapter_origin import read_base_dtype, require_base
from glm46.storage.huggingface.config_json import CONFIG, read_config
from glm46.storage.huggingface.exported_tokenizer import exported_tokenizer
from glm46.storage.huggingface.folder_check import stored_shape
from glm46.storage.huggingface.folder_tensors import INDEX, Places, find_tensors
from glm46.storage.huggingface.fp8 import Scheme
from glm46.storage.huggingface.import_weights import NOT_FINITE, FolderReader, ReportBytes, quantise_base
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import Form
from glm46.storage.huggingface.peft_folder import AdapterFolder
from glm46.storage.huggingface.schemes import CONFIG_KEY, ERRORS_FILE, config_of_scheme, quantised_names
from glm46.storage.huggingface.write_folder import OutputFile, drafted_folder, index_of, json_bytes

MERGE_ERRORS = "merge_errors.json"
_FP8 = torch.float8_e4m3fn
_MOST_ELEMENTS = 1 << 20
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth")
_MOST_LOST = 0.5
"""Warn if the norm of the rounding error exceeds this fraction of the norm of an adapter's change."""


@torch.no_grad()
def merge_adapter(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    target: torch.dtype | Scheme | None = None,
    report: ReportBytes | None = None,
) -> dict[str, dict[str, float]]:
    """Write a model folder with the weights of a PEFT folder added, LoRA or DoRA. Collective.

    Each rank writes every n-th file of the base. Sums are in FP32 and rounded once. The folder's `merge_errors.json`
    holds the returned values.

    Args:
        base: Hugging Face folder, in any type that `import_weights` reads, including FP8 and INT4.
        adapter: see `AdapterFolder`.
        output: must not exist; on a disk that all ranks share.
        target: format of the changed weights: FP32 or BF16, in which FP8 weights are then stored too; or an FP8 scheme,
            in which all projections are then stored. None: as in the base (BF16 for INT4 weights); all other tensors of
            the base stay unchanged. If training held the base in 4 bits, all its weights are quantised like that first,
            also those without an adapter: adapters compensate for the quantisation error.

    Returns:
        By Hugging Face name of each changed weight: "change", the norm of its change over the norm of the weight, and
        "rounding", the norm of the rounding error over the norm of the change.

    Raises:
        UserError: on all ranks: a folder is damaged, they do not fit, the adapter names another base, `output` exists,
            or the disk has too little space.
        CheckpointError: on all ranks, if reading or writing failed on any of them. Nothing is left on the disk.
    """
    ranks = Ranks.of_this_run()
    with ranks.stage(f"checking {base} and {adapter}") as stage:
        merge, error = catch_user_error(lambda: _Merge(base, adapter, target))
        stage.value = error and error.faults
    raise_if(next((list(faults) for faults in stage.values if faults), []))
    assert merge is not None
    require_base(base, adapter, ranks)
    with drafted_folder(output, sum(file.nbytes for file in merge.files), ranks) as draft:
        with ranks.stage(f"writing {draft}") as stage:
            with merge.reader, merge.adapter:
                for file in merge.files[ranks.rank :: ranks.size]:
                    merge.write(draft, file, report)
            stage.value = merge.errors
        errors = {name: ratios for rank_errors in stage.values for name, ratios in rank_errors.items()}
        with ranks.stage(f"writing the small files of {draft}"):
            if ranks.is_first:
                for name, content in merge.small_files(base, errors).items():
                    create_durably(draft / name, [content])
    return errors


def merge_lines(folder: Path, errors: dict[str, dict[str, float]]) -> list[str]:
    """Return lines for a user about a merged folder; ``errors`` is the result of `merge_adapter`."""
    changes = sorted(ratios["change"] for ratios in errors.values())
    worst = max(errors, key=lambda name: errors[name]["rounding"])
    lost = [name for name in errors if errors[name]["rounding"] > _MOST_LOST]
    lines = [
        f"{folder}: {len(errors)} adapted weights, changed by {changes[0]:.1e} to {changes[-1]:.1e} of their norm",
        f"rounding is at most {errors[worst]['rounding']:.3f} of the change, of {worst}; all: {MERGE_ERRORS}",
    ]
    if lost:
        lines.append(
            f"warning: in {len(lost)} weights rounding is over {_MOST_LOST} of the change: the merged model is not "
            "the trained one; use convert merge --dtype float32, or serve the adapter beside the base"
        )
    return lines


class _Merge:
    """The files of a merged folder, and the writing of each. Raises UserError like `merge_adapter`."""

    def __init__(self, base: Path, adapter: Path, target: torch.dtype | Scheme | None):
        shape = stored_shape(base)
        self.reader = FolderReader(base, shape)
        is_int4 = isinstance(self.reader.scheme, Int4)
        self._target = target = torch.bfloat16 if is_int4 and target is None else target
        if self.reader.names.form is not Form.PER_EXPERT:
            raise UserError(f"{base}: has {self.reader.names.form.value}; give what convert to-hf writes from it")
        scheme = self.reader.scheme if target is None else target
        self.scheme = cast(Any, scheme if isinstance(scheme, Scheme) else None)
        """`Scheme` of the output's FP8 weights; None if it has no FP8 weights."""
        self.adapter = AdapterFolder(adapter, shape)
        self._stored = find_tensors(base)  # includes tensors that the model does not have
        places = self.reader.names.places.items()
        weights = set(self.adapter.weights)
        if is_int4:
            self._stored = _unpacked(self._stored, self.reader.quantised)
        self._changed = frozenset(name for name, (entry, _) in places if entry.name in weights)
        self._base_dtype = read_base_dtype(adapter) or ""
        families = base_families(shape, self._base_dtype) if self._base_dtype in ("int4", "nf4") else frozenset()
        self._rounded = frozenset(
            name
            for name, (entry, _) in places
            if entry.row.fp8_family in families
            and not entry.name.startswith("mtp.")
            and not self.reader.is_as_stored(name, self._base_dtype)
        )
        self._in_fp8 = quantised_names(self.reader.names, self.scheme) if target is not None else frozenset()
        self._config = read_config(base) if target is None else self._changed_config(base)
        self._positions = shape.max_position_embeddings
        self._has_index = (base / INDEX).is_file()
        self.errors: dict[str, dict[str, float]] = {}
        in_files: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
        for name, (path, record) in self._stored.items():
            if self._is_scale(name):
                continue
            dtype = self._type_of(name, record)
            in_files.setdefault(path.name, []).append((name, dtype, record.shape))
            if dtype == _FP8:
                scales = self.scheme.scale_shape(record.shape)
                suffix = self.scheme.suffix
                in_files[path.name].append((name + suffix, self._scale_type(name), scales))
        self.files = [OutputFile(name, *lay_out(tensors)) for name, tensors in in_files.items()]

    def _is_scale(self, name: str) -> bool:
        suffix = self.reader.scheme.suffix if isinstance(self.reader.scheme, Scheme) else None
        weight = self._stored.get(name.removesuffix(suffix)) if suffix and name.endswith(suffix) else None
        return weight is not None and weight[1].dtype == _FP8

    def _type_of(self, name: str, record: Record) -> torch.dtype:
        """Return the type of a tensor in the output."""
        if self._target is None:
            return record.dtype
        if isinstance(self._target, Scheme):
            if name in self._in_fp8:
                return _FP8
            return torch.bfloat16 if record.dtype == _FP8 or name in self.reader.quantised else record.dtype
        is_changed = record.dtype == _FP8 or name in self._changed | self._rounded | self.reader.quantised.keys()
        return self._target if is_changed else record.dtype

    def _scale_type(self, name: str) -> torch.dtype:
        scales = self._stored.get(name + self.scheme.suffix) if self.scheme else None
        return scales[1].dtype if scales else torch.float32

    def write(self, draft: Path, file: OutputFile, report: ReportBytes | None) -> None:
        """Write one file."""
        (draft / file.name).write_bytes(file.header)
        with TensorFile(draft / file.name, file.records, writable=True) as written:
            for name, (path, record) in self._stored.items():
                if path.name != file.name or self._is_scale(name):
                    continue
                is_as_before = file.records[name].dtype == record.dtype and name not in self._changed | self._rounded
                if is_as_before and (record.dtype != _FP8 or self.scheme == self.reader.scheme):
                    self._copy(name, written)
                else:
                    self._change(name, written)
                if report is not None:
                    report(record.nbytes // (2 if record.dtype == torch.uint8 else 1))

    def _copy(self, name: str, written: TensorFile) -> None:
        """Copy a tensor, with its scales if it is in FP8."""
        names = [name] if written.records[name].dtype != _FP8 else [name, name + self.scheme.suffix]
        for key in names:
            path, record = self._stored[key]
            with TensorFile(path, {key: record}) as source:
                for box in _rows(record.shape, 1):
                    written.write(key, box, source.read(key, box))

    def _change(self, name: str, written: TensorFile) -> None:
        """Write a weight with its adapter, or in another type."""
        record = written.records[name]
        is_changed = name in self._changed
        block = self.scheme.block[0] if record.dtype == _FP8 and self.scheme.block else 1
        squares = torch.zeros(3, dtype=torch.float64)  # of the weight, its change, and the rounding error
        for box in _rows(record.shape, block):
            weight = torch.empty([length for _, length in box], dtype=torch.float32)
            self.reader.read(name, box, weight)
            if name in self._rounded:
                weight = in_compute_type(*quantise_base(weight, self._base_dtype), torch.float32)
            merged = self.adapter.merged(name, weight, box[0][0]) if is_changed else weight
            if not is_finite(merged):
                raise ValueError(f"tensor {name} {NOT_FINITE}")
            rounded = self._write(name, box, merged, written)
            parts = (weight, merged - weight, rounded - merged)
            squares += torch.tensor([part.norm().item() ** 2 for part in parts], dtype=torch.float64)
        if is_changed:
            weight_norm, change, rounding = squares.tolist()
            ratios = {"change": (change, weight_norm), "rounding": (rounding, change)}
            self.errors[name] = {key: sqrt(part / norm) if norm else 0.0 for key, (part, norm) in ratios.items()}

    def _write(self, name: str, box: Box, values: Tensor, written: TensorFile) -> Tensor:
        """Write rows of a weight, FP32 [rows, I]; returns the values that a reader of the file gets, in FP32."""
        dtype = written.records[name].dtype
        if dtype != _FP8:
            rounded = values.to(dtype)
            written.write(name, box, rounded)
            return rounded.float()
        parts = self.scheme.quantise(values)
        shape = written.records[name].shape
        for suffix, part in self.scheme.boxes(shape, box).items():
            parts[suffix] = parts[suffix].to(written.records[name + suffix].dtype)
            written.write(name + suffix, part, parts[suffix])
        stored: Tensor = self.scheme.dequantise(parts, shape, ((0, values.shape[0]), box[1]))
        return stored

    def small_files(self, base: Path, errors: dict[str, dict[str, float]]) -> dict[str, bytes]:
        """Return the content of all files without tensors, by name."""
        others = (path for path in base.iterdir() if path.is_file() and path.suffix not in _NOT_COPIED)
        contents = {path.name: path.read_bytes() for path in others if path.name not in (INDEX, ERRORS_FILE)}
        contents = exported_tokenizer(contents, max_length=self._positions)
        contents |= {CONFIG: json_bytes(self._config), MERGE_ERRORS: json_bytes(errors)}
        if self._has_index:
            contents[INDEX] = index_of({file.name: file.records for file in self.files})
        return contents

    def _changed_config(self, base: Path) -> dict[str, Any]:
        config = read_config(base)
        config.pop(CONFIG_KEY, None)
        if isinstance(self._target, Scheme):
            return config | {CONFIG_KEY: config_of_scheme(self._target, self.reader.names)}
        key = "dtype" if "dtype" in config else "torch_dtype"
        return config | {key: str(self._target).removeprefix("torch.")}


def _unpacked(stored: Places, quantised: Mapping[str, tuple[int, ...]]) -> Places:
    """Replace the tensors of each INT4 weight by one entry in the file of its packed values: uint8, two values a
    byte."""
    parts = {f"{name}{suffix}" for name in quantised for suffix in Int4.suffixes}
    places = {name: place for name, place in stored.items() if name not in parts}
    for name, shape in quantised.items():
        path, record = stored[f"{name}_packed"]
        places[name] = path, replace(record, dtype=torch.uint8, shape=shape)
    return places


def _rows(shape: tuple[int, ...], block: int) -> Iterator[Box]:
    """Yield boxes of complete rows that cover a tensor, some MB each; all but the last have a multiple of `block`
    rows."""
    if not shape:
        yield ()
        return
    step = max(1, _MOST_ELEMENTS // max(1, prod(shape[1:])) // block) * block
    for first in range(0, shape[0], step):
        yield ((first, min(step, shape[0] - first)), *((0, size) for size in shape[1:]))
