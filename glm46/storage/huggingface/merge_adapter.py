"""Adapters merged into a Hugging Face folder, some MB at a time; what has no adapter is copied byte for byte."""

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
"""Norm of the rounding error over that of an adapter's change, from which on there is a warning."""


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

    Each rank writes every n-th file of the base. Sums are in FP32 and rounded once. `merge_errors.json` in the folder
    holds what is returned.

    Args:
        base: Hugging Face folder, in any type that `import_weights` reads, FP8 and INT4 included.
        adapter: see `AdapterFolder`.
        output: must not exist; on a disk that all ranks share.
        target: of the changed weights: FP32 or BF16, in which FP8 weights are then stored too; or a scheme of FP8, in
            which all projections are then stored. None: as in the base, whose other tensors always stay as they are;
            of INT4 weights BF16. If training held the base in 4 bits, its weights are quantised so first, those without
            an adapter too: adapters make up for what was lost.

    Returns:
        Hugging Face name of each changed weight -> "change", the norm of its change over that of the weight, and
        "rounding", the norm of what rounding took or added over that of the change.

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
        errors = {name: of for of_rank in stage.values for name, of in of_rank.items()}
        with ranks.stage(f"writing the small files of {draft}"):
            if ranks.is_first:
                for name, content in merge.small_files(base, errors).items():
                    create_durably(draft / name, [content])
    return errors


def merge_lines(folder: Path, errors: dict[str, dict[str, float]]) -> list[str]:
    """Lines for a user about a merged folder; ``errors`` is the result of `merge_adapter`."""
    changes = sorted(of["change"] for of in errors.values())
    worst = max(errors, key=lambda name: errors[name]["rounding"])
    lost = [name for name in errors if errors[name]["rounding"] > _MOST_LOST]
    lines = [
        f"{folder}: {len(errors)} weights changed, by {changes[0]:.1e} to {changes[-1]:.1e} of their norm",
        f"rounding is at most {errors[worst]['rounding']:.3f} of the change, of {worst}; all: {MERGE_ERRORS}",
    ]
    if lost:
        lines.append(
            f"warning: in {len(lost)} weights rounding is over {_MOST_LOST} of the change: the merged model is not "
            "the trained one; use convert merge --dtype float32, or serve the adapter beside the base"
        )
    return lines


class _Merge:
    """The files of a merged folder, and the writing of each. Raises UserError as `merge_adapter` does."""

    def __init__(self, base: Path, adapter: Path, target: torch.dtype | Scheme | None):
        shape = stored_shape(base)
        self.reader = FolderReader(base, shape)
        is_int4 = isinstance(self.reader.scheme, Int4)
        self._target = target = torch.bfloat16 if is_int4 and target is None else target
        if self.reader.names.form is not Form.PER_EXPERT:
            raise UserError(f"{base}: has {self.reader.names.form.value}; give what convert to-hf writes from it")
        own = self.reader.scheme if target is None else target
        self.scheme = cast(Any, own if isinstance(own, Scheme) else None)
        """`Scheme` of the output's FP8 weights; None if there are none."""
        self.adapter = AdapterFolder(adapter, shape)
        self._stored = find_tensors(base)  # those included that the model does not have
        places, weights = self.reader.names.places.items(), set(self.adapter.weights)
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
        self._has_index = (base / INDEX).is_file()
        self.errors: dict[str, dict[str, float]] = {}
        in_files: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
        for name, (path, record) in self._stored.items():
            if self._is_scale(name):
                continue
            dtype = self._type_of(name, record)
            in_files.setdefault(path.name, []).append((name, dtype, record.shape))
            if dtype == _FP8:
                scales, suffix = self.scheme.scale_shape(record.shape), self.scheme.suffix
                in_files[path.name].append((name + suffix, self._scale_type(name), scales))
        self.files = [OutputFile(name, *lay_out(tensors)) for name, tensors in in_files.items()]

    def _is_scale(self, name: str) -> bool:
        suffix = self.reader.scheme.suffix if isinstance(self.reader.scheme, Scheme) else None
        weight = self._stored.get(name.removesuffix(suffix)) if suffix and name.endswith(suffix) else None
        return weight is not None and weight[1].dtype == _FP8

    def _type_of(self, name: str, record: Record) -> torch.dtype:
        """Type of a tensor in the output."""
        if self._target is None:
            return record.dtype
        if isinstance(self._target, Scheme):
            if name in self._in_fp8:
                return _FP8
            return torch.bfloat16 if record.dtype == _FP8 or name in self.reader.quantised else record.dtype
        is_changed = record.dtype == _FP8 or name in self._changed | self._rounded | self.reader.quantised.keys()
        return self._target if is_changed else record.dtype

    def _scale_type(self, name: str) -> torch.dtype:
        known = self._stored.get(name + self.scheme.suffix) if self.scheme else None
        return known[1].dtype if known else torch.float32

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
        """Copy a tensor, and the scales of an FP8 one."""
        names = [name] if written.records[name].dtype != _FP8 else [name, name + self.scheme.suffix]
        for one in names:
            path, record = self._stored[one]
            with TensorFile(path, {one: record}) as source:
                for box in _rows(record.shape, 1):
                    written.write(one, box, source.read(one, box))

    def _change(self, name: str, written: TensorFile) -> None:
        """Write a weight with its adapter, or in another type."""
        record, is_changed = written.records[name], name in self._changed
        block = self.scheme.block[0] if record.dtype == _FP8 and self.scheme.block else 1
        squares = torch.zeros(3, dtype=torch.float64)  # of the weight, its change, what rounding changed
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
            whole, change, rounding = squares.tolist()
            ratios = {"change": (change, whole), "rounding": (rounding, change)}
            self.errors[name] = {key: sqrt(part / of) if of else 0.0 for key, (part, of) in ratios.items()}

    def _write(self, name: str, box: Box, values: Tensor, written: TensorFile) -> Tensor:
        """Write rows of a weight, FP32 [rows, I]; returns what a reader of the file gets, in FP32."""
        dtype = written.records[name].dtype
        if dtype != _FP8:
            rounded = values.to(dtype)
            written.write(name, box, rounded)
            return rounded.float()
        parts, shape = self.scheme.quantise(values), written.records[name].shape
        for suffix, part in self.scheme.boxes(shape, box).items():
            parts[suffix] = parts[suffix].to(written.records[name + suffix].dtype)
            written.write(name + suffix, part, parts[suffix])
        return self.scheme.dequantise(parts, shape, ((0, values.shape[0]), box[1]))

    def small_files(self, base: Path, errors: dict[str, dict[str, float]]) -> dict[str, bytes]:
        """Name -> content of all files without tensors."""
        others = (path for path in base.iterdir() if path.is_file() and path.suffix not in _NOT_COPIED)
        contents = {path.name: path.read_bytes() for path in others if path.name not in (INDEX, ERRORS_FILE)}
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
    """INT4 weights as one tensor each, in the file of their packed values: uint8, two values a byte."""
    parts = {f"{name}{suffix}" for name in quantised for suffix in Int4.suffixes}
    found = {name: place for name, place in stored.items() if name not in parts}
    for name, shape in quantised.items():
        path, record = stored[f"{name}_packed"]
        found[name] = path, replace(record, dtype=torch.uint8, shape=shape)
    return found


def _rows(shape: tuple[int, ...], block: int) -> Iterator[Box]:
    """Boxes of whole rows that cover a tensor, some MB each; all but the last have a multiple of `block` rows."""
    if not shape:
        yield ()
        return
    step = max(1, _MOST_ELEMENTS // max(1, prod(shape[1:])) // block) * block
    for first in range(0, shape[0], step):
        yield ((first, min(step, shape[0] - first)), *((0, size) for size in shape[1:]))
