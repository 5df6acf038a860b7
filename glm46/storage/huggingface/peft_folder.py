"""Reads PEFT folders, ours and those saved by PEFT: into adapters on any mesh, and as products for a merge.

PEFT has two layouts for experts. With a tensor for each expert, gate and up have separate A and B. The fused layout,
which PEFT saves, has `experts.base_layer.lora_A` [E R, D] and `.lora_B` [2F, R E] for gate and up, and
`experts.lora_A`, `.lora_B` for down; rows of A are grouped by expert, columns of B by rank. We hold one A for gate and
up, so separate ones become A = [A_gate; A_up], B = [[B_gate, 0], [0, B_up]] of twice the rank, as in PEFT, and then of
the plain rank again if both halves of A are equal. Sources: peft 0.21.2 `tuners/lora/layer.py` (ParamWrapper),
`utils/transformers_weight_conversion.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from glm46.compute.model.adapters import merged_rows
from glm46.config.errors import UserError, raise_if
from glm46.config.model import ModelShape
from glm46.files.tensor_file import Record, TensorFile, is_finite, read_records
from glm46.storage.huggingface.names import MOST_SHOWN, HFEntry, HFNames, HFPart, listed
from glm46.storage.huggingface.peft_config import PeftConfig
from glm46.storage.huggingface.peft_export import CONFIG, PREFIX, SUFFIXES, WEIGHTS, is_adaptable, module_of

_FUSED = (".mlp.experts", ".mlp.experts.base_layer")
_INDEXER = ".self_attn.indexer."
_FIRST_NEW = (0, 19)
"""First version of PEFT that saves A and B of experts in the layout that is read here. Older ones exchange them."""


@dataclass(frozen=True)
class AdapterProduct:
    """The adapter of one matrix, or of gate and up of one expert; all in FP32."""

    lora_A: Tensor
    """[R, I]: first factor."""
    lora_B: Tensor
    """[O, R]: second factor, with the folder's scale: the change of the weight is B A."""
    magnitude: Tensor | None
    """[O]: magnitudes of DoRA, else None."""


class AdapterFolder:
    """A PEFT folder, checked against a model; its values are read on request.

    Attributes:
        folder: path of the folder.
        weights: our names of the adapted weights.
        product: returns the adapter of a matrix, see `_product`; the last two results are cached.

    Raises:
        UserError: all faults of the config; if the config is sound, all faults of names and shapes.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self.folder = folder
        self._config = PeftConfig.read(folder)
        self._records = read_records(folder / WEIGHTS)
        self._names = HFNames(shape, repeat_shared=False)
        self._parts: dict[str, list[str]] = {}
        """By our name of a weight, the modules of the file that adapt it: one for each part, or one in the fused
        form."""
        raise_if([f"{folder / WEIGHTS}: {fault}" for fault in self._find()])
        self._file = TensorFile(folder / WEIGHTS, self._records)
        self._read_fused = lru_cache(maxsize=2)(self._fused)  # cached: gate and up, and down, of one layer
        # Callers read the rows of one matrix, and gate and up, one after the other.
        self.product = lru_cache(maxsize=2)(self._product)

    def __enter__(self) -> "AdapterFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def weights(self) -> list[str]:
        return list(self._parts)

    def is_stacked(self, weight: str) -> bool:
        """Return True if a weight is a stack of experts."""
        return self._names.entries[weight].row.is_expert

    @property
    def is_dora(self) -> bool:
        return self._config.use_dora

    def _find(self) -> list[str]:
        """Assign every tensor to a weight. Returns the faults."""
        modules: dict[str, dict[str, Record]] = {}
        unknown = []
        for key, record in self._records.items():
            kind = next((kind for kind, suffix in SUFFIXES.items() if key.endswith(suffix)), None)
            if kind is None or not key.startswith(PREFIX):
                unknown.append(key)
            else:
                modules.setdefault(key.removeprefix(PREFIX).removesuffix(SUFFIXES[kind]), {})[kind] = record
        kinds = ["lora_A", "lora_B", *(["magnitude"] if self._config.use_dora else [])]
        missing = []
        indexers = []
        faults = []
        shape_faults: list[str] = []
        for module, records in modules.items():
            unknown += [PREFIX + module + SUFFIXES[kind] for kind in records if kind not in kinds]
            missing += [PREFIX + module + SUFFIXES[kind] for kind in kinds if kind not in records]
            if module.endswith(_FUSED):
                if {"lora_A", "lora_B"} <= set(records):
                    faults += self._take_fused(module, records)
            elif _INDEXER in module:
                indexers.append(module)
            elif f"{module}.weight" in self._names.places and is_adaptable(self._names.places[f"{module}.weight"][0]):
                entry, part = self._names.places[f"{module}.weight"]
                self._parts.setdefault(entry.name, []).append(module)
                shape_faults += self._shape_faults(module, part, records)
            else:
                unknown += [PREFIX + module + SUFFIXES[kind] for kind in records if kind in kinds]
        for weight, weight_modules in self._parts.items():
            part_modules = [module_of(part) for part in self._names.entries[weight].parts]
            if not weight_modules[0].endswith(_FUSED):
                absent = sorted(set(part_modules) - set(weight_modules))
                missing += [PREFIX + module + SUFFIXES["lora_A"] for module in absent]
        faults += _name_faults(indexers, missing, unknown)
        if len(shape_faults) > 1:
            others = f"{len(shape_faults) - 1} more tensors have other shapes too"
            remedy = f"give the model that the adapter was trained on, and its own {CONFIG}"
            shape_faults = [f"{shape_faults[0]}; {others}; {remedy}"]
        return [*shape_faults, *faults][:MOST_SHOWN]

    def _shape_faults(self, module: str, part: HFPart, records: Mapping[str, Record]) -> list[str]:
        rows, columns = part.hf_shape
        rank, _ = self._config.rank_and_scale(module)
        sizes = {"lora_A": (rank, columns), "lora_B": (rows, rank), "magnitude": (rows,)}
        return [
            f"{PREFIX}{module}{SUFFIXES[kind]} is {list(record.shape)}, the model and {CONFIG} have {list(sizes[kind])}"
            for kind, record in records.items()
            if record.shape != sizes[kind]
        ]

    def _take_fused(self, module: str, records: Mapping[str, Record]) -> list[str]:
        """Assign tensors in the fused form. PEFT names them by the order of wrapping, so their shapes decide. If both
        layouts of a weight have the same shapes, the version of PEFT decides."""
        shapes = records["lora_A"].shape, records["lora_B"].shape
        description = f"{PREFIX}{module}: A {list(shapes[0])} and B {list(shapes[1])}"
        layer = module.removesuffix(".base_layer").removeprefix("model.")
        entries = [self._names.entries.get(f"{layer}.{name}") for name in ("gate_up", "down")]
        for entry in entries:
            if entry is None:
                continue
            experts, rows, columns = entry.shape
            rank, _ = self._config.rank_and_scale(_fused_name(entry))
            fits_new = shapes == ((experts * rank, columns), (rows, rank * experts))
            fits_old = shapes == ((experts * rank, rows), (columns, rank * experts))
            version = self._config.version
            if fits_new and fits_old and version is None:
                return [
                    f"{description} fit the layouts of PEFT before and from 0.19 on, since {rows} is both sizes "
                    f"of the weight; state the version that saved the adapter as peft_version in {CONFIG}"
                ]
            if fits_old and (not fits_new or (version is not None and version < _FIRST_NEW)):
                return [
                    f"{description} are exchanged, as PEFT 0.17 and 0.18 save them; load and save the adapter with the "
                    "version that wrote it on a model with one Linear per expert"
                ]
            if fits_new:
                self._parts[entry.name] = [module]
                return [f"{PREFIX}{module}: DoRA in the fused form is not known"] if self._config.use_dora else []
        return [f"{description} fit no experts of this model with ranks of {CONFIG}"]

    def _value(self, module: str, kind: str) -> Tensor:
        """Read a full tensor of the file as FP32."""
        key = PREFIX + module + SUFFIXES[kind]
        values = self._file.read(key, tuple((0, size) for size in self._records[key].shape)).float()
        if not is_finite(values):
            raise UserError(f"{self.folder / WEIGHTS}: {key} holds NaN or infinite values; export an earlier step")
        return values

    def _fused(self, weight: str) -> tuple[Tensor, Tensor, float]:
        """Return A [E, R, I], B [E, O, R] and scale of a weight in the fused form."""
        (module,), entry = self._parts[weight], self._names.entries[weight]
        rank, scale = self._config.rank_and_scale(_fused_name(entry))
        experts, rows, columns = entry.shape
        by_expert = self._value(module, "lora_B").view(rows, rank, experts).permute(2, 0, 1).contiguous()
        return self._value(module, "lora_A").view(experts, rank, columns), by_expert, scale

    def _product(self, weight: str, expert: int = 0, *, scale: float = 1.0) -> AdapterProduct:
        """Return the adapter of a matrix, or of one expert's part of a stack. Raises UserError if a value is not
        finite.

        Args:
            weight: one of `weights`.
            scale: B is divided by it.
        """
        entry = self._names.entries[weight]
        blocks = len(entry.row.hf_names)
        magnitude = None
        if self._parts[weight][0].endswith(_FUSED):
            expert_a, expert_b, factor = self._read_fused(weight)
            lora_a = expert_a[expert]
            lora_b = expert_b[expert] * (factor / scale)
        else:
            modules = [module_of(part) for part in entry.parts[expert * blocks : (expert + 1) * blocks]]
            factors = [self._config.rank_and_scale(module)[1] / scale for module in modules]
            lora_a = torch.cat([self._value(module, "lora_A") for module in modules])
            diagonal = [self._value(m, "lora_B") * factor for m, factor in zip(modules, factors, strict=True)]
            lora_b = torch.block_diag(*diagonal)
            if self.is_dora:
                magnitude = torch.cat([self._value(module, "magnitude") for module in modules])
        half = lora_a.shape[0] // 2
        if blocks == 2 and lora_a.shape[0] == 2 * half and torch.equal(lora_a[:half], lora_a[half:]):
            lora_a = lora_a[:half]
            lora_b = lora_b[:, :half] + lora_b[:, half:]
        return AdapterProduct(lora_a, lora_b, magnitude)

    def merged(self, hf_name: str, values: Tensor, first: int = 0) -> Tensor:
        """Return rows of a weight with its adapter: W + B A, and with magnitudes m (W + B A) / |W + B A| for each row.

        Args:
            hf_name: Hugging Face name of the weight.
            values: FP32 [rows, I]: rows of the base weight, from row `first` on.

        Returns:
            FP32 [rows, I] on the device of `values`.
        """
        entry, part = self._names.places[hf_name]
        product = self.product(entry.name, part.start[0] if entry.row.is_expert else 0)
        rows = slice(part.start[-2] + first, part.start[-2] + first + values.shape[0])
        magnitude = None if product.magnitude is None else product.magnitude[rows].to(values.device)
        b = product.lora_B[rows].to(values.device)
        a = product.lora_A.to(values.device)
        return merged_rows(values, a, b, magnitude, 1.0)

    def merge_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the adapters to full weights in memory, matrix by matrix, each sum in FP32 and rounded once. Raises
        UserError if a value of the adapter is not finite.

        Args:
            tensors: full tensor of any type and device by our name; holds all of `weights`.
        """
        for weight in self.weights:
            for part in self._names.entries[weight].parts:
                matrix = tensors[weight][part.index()]
                matrix.copy_(self.merged(part.hf_name, matrix.float()))


def _name_faults(indexers: list[str], missing: list[str], unknown: list[str]) -> list[str]:
    """Return the faults of modules of indexers, and of missing and unknown tensors."""
    faults = []
    if indexers:
        faults.append(
            f"{len(indexers)} modules of indexers have adapters: {listed(indexers)}; indexers are frozen, so no "
            "loss trains these adapters; train the adapter without wq_b, wk and weights_proj in target_modules"
        )
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {listed(missing)}")
    if unknown:
        faults.append(
            f"{len(unknown)} tensors adapt nothing in this model: {listed(unknown)}; adapters may be on the "
            "projections of attention, dense layers and experts, but not on MTP layers"
        )
    return faults


def _fused_name(entry: HFEntry) -> str:
    return f"model.{entry.name}_proj"
