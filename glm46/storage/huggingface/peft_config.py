"""Reads the config of a PEFT folder: rank and scale of each module, and the keys that are refused."""

import re
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, TypeVar

from glm46.config.errors import UserError, raise_if
from glm46.files.file_content import read_json_object
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.huggingface.peft_export import CONFIG

_Value = TypeVar("_Value")

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "lora_bias": (),
    "fan_in_fan_out": (),
    "modules_to_save": (),
    "layer_replication": (),
    "use_qalora": (),
    "use_bdlora": (),
    "alora_invocation_tokens": (),
    "trainable_token_indices": (),
}
"""Keys that change the computation or the base weights, with the values that do not. An absent, None, false or empty
value never does."""


@dataclass(frozen=True)
class PeftConfig:
    """Rank and scale of each module, and whether it is DoRA."""

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    version: tuple[int, int] | None = None
    """First two numbers of the version of PEFT that saved the folder; None if the folder does not have it."""

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Read the config of a folder. Raises UserError if it is missing or damaged, or has a key that changes the
        computation and is not supported."""
        file = folder / CONFIG
        if not file.is_file():
            runs = (
                folder,
                folder.parent,
                folder.parent.parent,
            )  # the path may be a run, its checkpoints, or one checkpoint
            if adapters := next(filter(None, (sorted(run.glob(f"huggingface/step-*/{CONFIG}")) for run in runs)), []):
                newest = f"the newest adapter of this run is {adapters[-1].parent}; give that"
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
                _version_of(raw.get("peft_version")),
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
        """Return rank of a module's tensors and factor of their product. ``module`` is its Hugging Face name, such as
        model.layers.1.self_attn.q_proj; for fused experts, the name of the weight."""
        rank = _of(self.rank_pattern, module, self.rank)
        alpha = _of(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (sqrt(rank) if self.use_rslora else rank)


def _version_of(version: object) -> tuple[int, int] | None:
    """Parse the first two numbers of a version such as "0.19.1.dev0@commit"; None if it is absent or something else."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version) if isinstance(version, str) else None
    return (int(match[1]), int(match[2])) if match else None


def _of(patterns: dict[str, _Value], module: str, default: _Value) -> _Value:
    """Return the value of the first pattern that matches, like `get_pattern_key` of peft 0.21.2."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
