"""Reading of PEFT folders, ours and those that PEFT saved: into adapters on any mesh, and as products for a merge.

PEFT has two layouts for experts. With a tensor for each expert, gate and up have A and B of their own. The fused one,
which PEFT saves, has `experts.base_layer.lora_A` [E R, D] and `.lora_B` [2F, R E] for gate and up, and
`experts.lora_A`, `.lora_B` for down; rows of A are grouped by expert, columns of B by rank. We hold one A of gate and
up, so those of a folder become A = [A_gate; A_up], B = [[B_gate, 0], [0, B_up]] of twice the rank, as in PEFT, and then
of the plain rank again if both halves of A are equal. Sources: peft 0.21.2 `tuners/lora/layer.py` (ParamWrapper),
`utils/transformers_weight_conversion.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compute.model.adapters import merged_rows
from glm46.config.errors import UserError, raise_if
from glm46.config.model import ModelShape
from glm46.files.file_content import read_json_object
from glm46.files.tensor_file import Record, TensorFile, is_finite, read_records
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.huggingface.names import MOST_SHOWN, HFEntry, HFNames, HFPart, listed
from glm46.storage.huggingface.peft_export import CONFIG, PREFIX, SUFFIXES, WEIGHTS, is_adaptable, module_of

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "lora_bias": (), "fan_in_fan_out": (), "modules_to_save": (), "layer_replication": (), "use_qalora": (),
    "use_bdlora": (), "alora_invocation_tokens": (), "trainable_token_indices": (),
}  # fmt: skip
"""Keys that change the computation or the base weights -> values that do not. A value that is absent, None, false or
empty never does."""

_FUSED = (".mlp.experts", ".mlp.experts.base_layer")


@dataclass(frozen=True)
class PeftConfig:
    """Rank and scale of each module, and whether it is DoRA."""

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """The config of a folder. Raises UserError if it is missing or damaged, or has a key that changes the
        computation and is not supported."""
        file = folder / CONFIG
        if not file.is_file():
            runs = (folder, folder.parent, folder.parent.parent)  # given a run, its checkpoints, or one of them
            if found := next(filter(None, (sorted(run.glob(f"huggingface/step-*/{CONFIG}")) for run in runs)), []):
                newest = f"the newest adapter of this run is {found[-1].parent}; give that"
                raise UserError(f"{folder}: is no PEFT folder; {newest}")
            require_kind(folder, Kind.PEFT)
        raw = read_json_object(file, "save the adapter again")
        try:
            faults = [
                f"{file}: {key} = {raw[key]!r} is not supported; expected {' or '.join(map(repr, plain)) or 'none'}"
                for key, plain in _PLAIN.items()
                if raw.get(key) not in (None, False, [], {}, *plain)
            ]
            config = cls(
                int(raw["r"]),
                float(raw["lora_alpha"]),
                bool(raw.get("use_rslora")),
                bool(raw.get("use_dora")),
                {key: int(rank) for key, rank in dict(raw.get("rank_pattern") or {}).items()},
                {key: float(alpha) for key, alpha in dict(raw.get("alpha_pattern") or {}).items()},
            )
            [re.compile(key) for key in (*config.rank_pattern, *config.alpha_pattern)]
        except (ValueError, KeyError, TypeError, OverflowError, re.error) as error:
            raise UserError(f"{file}: damaged ({type(error).__name__}: {error}); save the adapter again") from error
        ranks = [config.rank, *config.rank_pattern.values()]
        alphas = [config.alpha, *config.alpha_pattern.values()]
        if any(rank < 1 for rank in ranks) or not all(isfinite(alpha) for alpha in alphas):
            faults.append(
                f"{file}: r = {config.rank}, lora_alpha = {config.alpha}: ranks must be at least 1, alphas finite"
            )
        raise_if(faults)
        return config

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Rank of a module's tensors and factor of their product. ``module`` is its Hugging Face name, such as
        model.layers.1.self_attn.q_proj; of joined experts, that of the weight."""
        rank, alpha = _of(self.rank_pattern, module, self.rank), _of(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (sqrt(rank) if self.use_rslora else rank)


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches, as in `get_pattern_key` of peft 0.21.2."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass(frozen=True)
class AdapterProduct:
    """The adapter of one matrix, or of gate and up of one expert; all in FP32."""

    lora_A: Tensor
    """[R, I]"""
    lora_B: Tensor
    """[O, R], with the folder's scale: the change of the weight is B A."""
    magnitude: Tensor | None
    """[O] of DoRA, else None."""


class AdapterFolder:
    """A PEFT folder, checked against a model; its values are read when they are asked for.

    Attributes:
        folder: as given.
        weights: our names of the adapted weights.
        product: the adapter of a matrix, see `_product`; the last two are kept.

    Raises:
        UserError: all faults of the config; if it has none, all faults of names and shapes.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self.folder = folder
        self._config = PeftConfig.read(folder)
        self._records = read_records(folder / WEIGHTS)
        self._names = HFNames(shape, repeat_shared=False)
        self._parts: dict[str, list[str]] = {}
        """Our name of a weight -> modules of the file that adapt it: one for each part, or one in the fused form."""
        raise_if([f"{folder / WEIGHTS}: {fault}" for fault in self._find()])
        self._file = TensorFile(folder / WEIGHTS, self._records)
        self._read_fused = lru_cache(maxsize=2)(self._fused)  # gate and up, and down, of one layer
        self.product = lru_cache(maxsize=2)(self._product)  # the rows of a matrix, and gate and up, come in turn

    def __enter__(self) -> "AdapterFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def weights(self) -> list[str]:
        return list(self._parts)

    def is_stacked(self, weight: str) -> bool:
        """True if a weight is a stack of experts."""
        return self._names.entries[weight].row.is_expert

    @property
    def is_dora(self) -> bool:
        return self._config.use_dora

    def _find(self) -> list[str]:
        """Assign every tensor to a weight; returns the faults."""
        modules: dict[str, dict[str, Record]] = {}
        unknown = []
        for key, record in self._records.items():
            kind = next((kind for kind, suffix in SUFFIXES.items() if key.endswith(suffix)), None)
            if kind is None or not key.startswith(PREFIX):
                unknown.append(key)
            else:
                modules.setdefault(key.removeprefix(PREFIX).removesuffix(SUFFIXES[kind]), {})[kind] = record
        kinds = ["lora_A", "lora_B", *(["magnitude"] if self._config.use_dora else [])]
        missing, faults = [], []
        for module, found in modules.items():
            unknown += [PREFIX + module + SUFFIXES[kind] for kind in found if kind not in kinds]
            missing += [PREFIX + module + SUFFIXES[kind] for kind in kinds if kind not in found]
            if module.endswith(_FUSED):
                if {"lora_A", "lora_B"} <= set(found):
                    faults += self._take_fused(module, found)
            elif f"{module}.weight" in self._names.places and is_adaptable(self._names.places[f"{module}.weight"][0]):
                entry, part = self._names.places[f"{module}.weight"]
                self._parts.setdefault(entry.name, []).append(module)
                faults += self._shape_faults(module, part, found)
            else:
                unknown += [PREFIX + module + SUFFIXES[kind] for kind in found if kind in kinds]
        for weight, found_modules in self._parts.items():
            of_parts = [module_of(part) for part in self._names.entries[weight].parts]
            if not found_modules[0].endswith(_FUSED):
                absent = sorted(set(of_parts) - set(found_modules))
                missing += [PREFIX + module + SUFFIXES["lora_A"] for module in absent]
        if missing:
            faults.append(f"{len(missing)} tensors are missing: {listed(missing)}")
        if unknown:
            faults.append(
                f"{len(unknown)} tensors adapt nothing in this model: {listed(unknown)}; adapters may be on the "
                "projections of attention, dense layers and experts, but not on MTP layers"
            )
        return faults[:MOST_SHOWN]

    def _shape_faults(self, module: str, part: HFPart, found: Mapping[str, Record]) -> list[str]:
        rows, columns = part.hf_shape
        rank, _ = self._config.rank_and_scale(module)
        expected = {"lora_A": (rank, columns), "lora_B": (rows, rank), "magnitude": (rows,)}
        return [
            f"{PREFIX}{module}{SUFFIXES[kind]} is {list(one.shape)}, the model and {CONFIG} have {list(expected[kind])}"
            for kind, one in found.items()
            if one.shape != expected[kind]
        ]

    def _take_fused(self, module: str, found: Mapping[str, Record]) -> list[str]:
        """Assign tensors in the fused form. PEFT names them by the order of wrapping, so their shapes decide."""
        a, b = found["lora_A"].shape, found["lora_B"].shape
        layer = module.removesuffix(".base_layer").removeprefix("model.")
        entries = [self._names.entries.get(f"{layer}.{name}") for name in ("gate_up", "down")]
        for entry in entries:
            if entry is None:
                continue
            experts, rows, columns = entry.shape
            rank, _ = self._config.rank_and_scale(_fused_name(entry))
            if (a, b) == ((experts * rank, columns), (rows, rank * experts)):
                self._parts[entry.name] = [module]
                return [f"{PREFIX}{module}: DoRA in the fused form is not known"] if self._config.use_dora else []
            if (a, b) == ((experts * rank, rows), (columns, rank * experts)):
                return [
                    f"{PREFIX}{module}: A {list(a)} and B {list(b)} are exchanged, as PEFT 0.17 and 0.18 save them; "
                    "load and save the adapter with the version that wrote it on a model with one Linear per expert"
                ]
        return [f"{PREFIX}{module}: A {list(a)} and B {list(b)} fit no experts of this model with ranks of {CONFIG}"]

    def _value(self, module: str, kind: str) -> Tensor:
        """A whole tensor of the file, FP32."""
        key = PREFIX + module + SUFFIXES[kind]
        values = self._file.read(key, tuple((0, size) for size in self._records[key].shape)).float()
        if not is_finite(values):
            raise UserError(f"{self.folder / WEIGHTS}: {key} holds NaN or infinite values; export an earlier step")
        return values

    def _fused(self, weight: str) -> tuple[Tensor, Tensor, float]:
        """A [E, R, I], B [E, O, R] and scale of a weight in the fused form."""
        (module,), entry = self._parts[weight], self._names.entries[weight]
        rank, scale = self._config.rank_and_scale(_fused_name(entry))
        experts, rows, columns = entry.shape
        by_expert = self._value(module, "lora_B").view(rows, rank, experts).permute(2, 0, 1).contiguous()
        return self._value(module, "lora_A").view(experts, rank, columns), by_expert, scale

    def _product(self, weight: str, expert: int = 0, *, scale: float = 1.0) -> AdapterProduct:
        """The adapter of a matrix, or of one expert's part of a stack. Raises UserError if a value is not finite.

        Args:
            weight: one of `weights`.
            scale: B is divided by it.
        """
        entry = self._names.entries[weight]
        blocks, magnitude = len(entry.row.hf_names), None
        if self._parts[weight][0].endswith(_FUSED):
            of_a, of_b, factor = self._read_fused(weight)
            lora_a, lora_b = of_a[expert], of_b[expert] * (factor / scale)
        else:
            modules = [module_of(part) for part in entry.parts[expert * blocks : (expert + 1) * blocks]]
            factors = [self._config.rank_and_scale(module)[1] / scale for module in modules]
            lora_a = torch.cat([self._value(module, "lora_A") for module in modules])
            of_blocks = [self._value(m, "lora_B") * factor for m, factor in zip(modules, factors, strict=True)]
            lora_b = torch.block_diag(*of_blocks)
            if self.is_dora:
                magnitude = torch.cat([self._value(module, "magnitude") for module in modules])
        half = lora_a.shape[0] // 2
        if blocks == 2 and lora_a.shape[0] == 2 * half and torch.equal(lora_a[:half], lora_a[half:]):
            lora_a, lora_b = lora_a[:half], lora_b[:, :half] + lora_b[:, half:]
        return AdapterProduct(lora_a, lora_b, magnitude)

    def merged(self, hf_name: str, values: Tensor, first: int = 0) -> Tensor:
        """Rows of a weight with its adapter: W + B A, and with magnitudes m (W + B A) / |W + B A| for each row.

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
        b, a = product.lora_B[rows].to(values.device), product.lora_A.to(values.device)
        return merged_rows(values, a, b, magnitude, 1.0)

    def merge_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the adapters to whole weights in memory, matrix by matrix, each sum in FP32 and rounded once. Raises
        UserError if a value of the adapter is not finite.

        Args:
            tensors: our name -> whole tensor of any type and device; holds all of `weights`.
        """
        for weight in self.weights:
            for part in self._names.entries[weight].parts:
                matrix = tensors[weight][part.index()]
                matrix.copy_(self.merged(part.hf_name, matrix.float()))


def _fused_name(entry: HFEntry) -> str:
    return f"model.{entry.name}_proj"
