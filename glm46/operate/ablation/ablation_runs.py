"""The runs of an ablation: every variant with every seed, each with its own resolved config, checked before any run
starts."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from glm46.config.ablation import AblationConfig, VariantConfig, flat_keys, folder_name
from glm46.config.errors import UserError
from glm46.config.faults import counted, show
from glm46.config.loader import dump_config, load_config, stored_config
from glm46.config.overrides import literal
from glm46.config.run_config import RunConfig
from glm46.engine.observe.history import ROWS_FILE, read_history, rows_by_kind
from glm46.files.durable import replace_durably
from glm46.operate.estimate.machine import Machine, processes_of_node
from glm46.operate.estimate.requirement import fp8_faults
from glm46.operate.launch.one_node import describe_refusal

CONFIG_FILE = "config.toml"
"""In the folder of each run; the ranks write the same file."""

FP8_ERRORS = "fp8_errors.json"
_RESULT = "result.json"
_TAIL_BYTES = 1 << 16
"""Of metrics.jsonl, with its last rows."""

_IDLE = ("job", "metrics", "profiling", "inference", "validation", "ablation", "checkpoint.enable", "checkpoint.folder")
"""Sections and keys that do not change what is trained, or that the comparison needs to be equal."""


class AblationRun(NamedTuple):
    """One variant with one seed."""

    variant: str
    seed: int
    config: RunConfig
    processes: int

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def title(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def result(self) -> dict[str, Any]:
        """The end of the run in an earlier call or this one; empty if it was not started."""
        try:
            return json.loads((self.folder / _RESULT).read_bytes())
        except (OSError, ValueError):
            return {}

    def keep_result(self, status: str, error: str | None, seconds: float) -> None:
        """Write how it ended, see `Outcome`."""
        content = {"status": status, "error": error, "seconds": round(seconds, 1), "processes": self.processes}
        replace_durably(self.folder / _RESULT, [json.dumps(content).encode()])

    def fp8_errors(self) -> dict[str, dict[str, float]]:
        """See `measure_quantisation`; empty if they were not measured."""
        file = self.folder / FP8_ERRORS
        return json.loads(file.read_bytes()) if file.exists() else {}

    def rows(self, last_bytes: int | None = None) -> tuple[list[dict], list[dict]]:
        """Training rows and validation rows, or those in the last bytes of the file."""
        file = self.folder / ROWS_FILE
        return rows_by_kind(read_history(file, last_bytes)) if file.exists() else ([], [])

    def trained_tokens(self) -> int:
        """Tokens of the last row."""
        rows, _ = self.rows(_TAIL_BYTES)
        return rows[-1]["tokens"] if rows else 0


class AblationPlan(NamedTuple):
    """All runs of an ablation."""

    folder: Path
    keys: dict[str, dict[str, Any]]
    """By variant, dotted keys with their values; the first variant is the baseline."""
    runs: tuple[AblationRun, ...]
    """In the order in which they are trained: all variants with the first seed, then with the next one."""


def plan_ablation(
    file: Path, overrides: Sequence[str], varied: Sequence[str], processes: int | None, machine: Machine
) -> AblationPlan:
    """Resolve and check every run.

    Args:
        overrides: tokens of the command line, see `load_config`.
        varied: texts ``section.key=VALUE,VALUE``.
        processes: of each run; None: as `processes_of_node` has it.

    Raises:
        UserError: with the faults of all variants.
    """
    base = load_config(file, overrides)
    section = base.ablation or AblationConfig()
    choices = [_values(text) for text in varied]
    variants = _cross(section.variants, choices)
    keys = {variant.name: flat_keys(variant.keys) for variant in variants}
    if len(variants) < 2:
        raise UserError(
            f"{file}: [ablation] and --vary give {counted(len(variants), 'variant')}: two are needed for a comparison; "
            "add --vary section.key=VALUE,VALUE, or [[ablation.variants]] with name and keys"
        )
    faults = [*_equal_names(file, variants), *_keys_without_effect(file, keys)]
    configs: dict[str, RunConfig] = {}
    counts: dict[str, int] = {}
    for name, own in keys.items() if not faults else ():
        try:
            keys[name] = own = _emulated(file, overrides, name, own, machine)
            configs[name], counts[name] = _resolve(file, overrides, name, own, processes, machine)
        except UserError as error:
            faults += error.faults
    faults += _equal_configs(file, configs)
    if faults:
        raise UserError(*_one_for_each(faults, [key for key, _ in choices]))
    folder = Path(base.job.dump_folder)
    seeds = section.seeds or (base.debug.seed,)
    runs = tuple(
        AblationRun(name, seed, _config_of_run(config, name, seed, folder), counts[name])
        for seed in seeds
        for name, config in configs.items()
    )
    if changed := [fault for run in runs for fault in _changes(run)]:
        raise UserError(*changed)
    return AblationPlan(folder, keys, runs)


def _values(text: str) -> tuple[str, list[Any]]:
    """``optimizer.ns_steps=3,5`` as a key and its values."""
    key, equals, listed = text.partition("=")
    if not equals or "." not in key or not listed:
        raise UserError(
            f"command line: --vary {text}: expected --vary section.key=VALUE,VALUE; quote it if it has spaces"
        )
    whole = literal(f"[{listed}]")
    # Bare words are strings, as in an override: Muon,AdamW.
    return key.strip(), whole if isinstance(whole, list) else [literal(part.strip()) for part in listed.split(",")]


def _cross(variants: Sequence[VariantConfig], varied: Sequence[tuple[str, list[Any]]]) -> list[VariantConfig]:
    """The product of the variants of the file and the values of each varied key."""
    crossed = []
    for start, *choice in itertools.product(variants or (None,), *([(key, one) for one in of] for key, of in varied)):
        if start is None and not choice:
            continue
        texts = [f"{key}={value if isinstance(value, str) else show(value)}" for key, value in choice]
        name = folder_name(",".join([*([start.name] if start else []), *texts]))
        crossed.append(VariantConfig(name=name, keys=(flat_keys(start.keys) if start else {}) | dict(choice)))
    return crossed


def _one_for_each(faults: Sequence[str], varied: Sequence[str]) -> list[str]:
    """The faults, but of each varied key only the first, with the number of the others."""
    found: dict[str, list[str]] = {}
    for fault in dict.fromkeys(faults):
        stated = re.findall(r"^[\w.]*", fault.partition(": ")[2])[0]
        key = next((key for key in varied if key == stated or key.startswith(f"{stated}.")), fault)
        found.setdefault(key, []).append(fault)
    return [
        f"{first} (and so in {counted(len(more), 'more variant')})" if more else first
        for first, *more in found.values()
    ]


def _equal_names(file: Path, variants: Sequence[VariantConfig]) -> Iterator[str]:
    names = [variant.name for variant in variants]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield (
            f"{file}, variant {name}: {names.count(name)} variants have this name; names must differ: remove one, or "
            "name it otherwise under [[ablation.variants]]"
        )


def _keys_without_effect(file: Path, keys: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, own in keys.items():
        for key, value in own.items():
            if key == "debug.seed":
                rule, remedy = "each variant is trained with all seeds", "state them with --seeds or ablation.seeds"
            elif any(key == idle or key.startswith((f"{idle}.", f"{idle}[")) for idle in _IDLE):
                rule, remedy = "does not change what is trained", "set it for all variants, outside of them"
            else:
                continue
            yield f"{file}, variant {name}: {key} = {show(value)}: {rule}; {remedy}"


def _emulated(
    file: Path, overrides: Sequence[str], name: str, keys: Mapping[str, Any], machine: Machine
) -> dict[str, Any]:
    """The keys of a variant, with float8.emulate if this machine has no kernels for its recipe."""
    if "float8.recipe_name" not in keys or "float8.emulate" in keys:
        return dict(keys)
    emulated = {**keys, "float8.emulate": True}
    config = load_config(file, overrides, variant=(f"{file}, variant {name}", emulated))
    needs_it = fp8_faults(config.float8.model_copy(update={"emulate": False}), machine)
    return emulated if needs_it else dict(keys)


def _resolve(
    file: Path, overrides: Sequence[str], name: str, keys: Mapping[str, Any], processes: int | None, machine: Machine
) -> tuple[RunConfig, int]:
    """The config of a variant, and its number of processes."""
    variant = (f"{file}, variant {name}", keys)
    config = load_config(file, overrides, variant=variant)
    if refusal := describe_refusal(config, machine, processes):
        raise UserError(f"{file}, variant {name}: this machine cannot train it; remove or change it\n{refusal}")
    count = processes or processes_of_node(config.parallelism, machine)
    load_config(file, overrides, variant=variant, world_size=count)
    return config, count


def _equal_configs(file: Path, configs: Mapping[str, RunConfig]) -> Iterator[str]:
    first: dict[str, str] = {}
    for name, config in configs.items():
        text = dump_config(config)
        if text in first:
            yield f"{file}, variants {first[text]} and {name}: all keys have equal values; change or remove one of them"
        first.setdefault(text, name)


def _config_of_run(config: RunConfig, name: str, seed: int, folder: Path) -> RunConfig:
    def own(path: str) -> str:
        return str(Path(path, name, f"seed-{seed}")) if Path(path).is_absolute() else path

    job = {"dump_folder": str(folder / name / f"seed-{seed}")}
    job["description"] = f"{config.job.description}: {name}, seed {seed}"
    return config.model_copy(update={
        "job": config.job.model_copy(update=job),
        "checkpoint": config.checkpoint.model_copy(update={"folder": own(config.checkpoint.folder)}),
        "metrics": config.metrics.model_copy(update={"save_tb_folder": own(config.metrics.save_tb_folder)}),
        "debug": config.debug.model_copy(update={"seed": seed}),
        "ablation": None,
    })  # fmt: skip


def _changes(run: AblationRun) -> Iterator[str]:
    """Differences from the earlier call that started a run: the number of processes, and keys."""
    before = run.result().get("processes", run.processes)
    if before != run.processes:
        yield (
            f"command line: --nproc {run.processes}: {run.folder} was started with {counted(before, 'process')}, "
            f"so speeds would not compare; give --nproc {before}, remove {run.folder}, or set another job.dump_folder"
        )
    known = run.folder / CONFIG_FILE
    if not known.exists():
        return
    try:
        started = stored_config(known.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        remedy = f"remove {run.folder}, or set another job.dump_folder"
        raise UserError(f"{known}: cannot be read: {error}; {remedy}") from error
    before, now = (flat_keys(tomli.loads(dump_config(config))) for config in (started, run.config))
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key):
            ours, theirs = (show(keys[key]) if key in keys else "absent" for keys in (now, before))
            yield (
                f"{known}: {key} = {ours}: this run of an earlier call was started with {theirs}; set that, remove "
                f"{run.folder}, or set another job.dump_folder"
            )
