"""Plans the runs of an ablation: each variant with each seed, with its own config. All are checked before one
starts."""

import itertools
from collections import Counter
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
"""File in the folder of each run; the ranks write the same file."""

FINISHED = "finished"
STOPPED = "stopped"
_STATUS_FILE = "status.txt"

_SET_BY_ABLATE = {
    "debug.seed": "each variant is trained with all seeds; give them with --seeds",
    "job.dump_folder": "each run has a folder of its own in the common one; set that outside of the variants",
}
"""Keys that a variant cannot set, with the rule and the remedy."""


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

    def status(self) -> str:
        """Return `FINISHED`, `STOPPED`, a description of the failure, or "not started"."""
        file = self.folder / _STATUS_FILE
        return file.read_text(encoding="utf-8") if file.exists() else "not started"

    def keep_status(self, status: str) -> None:
        """Write the status for the report and for later calls."""
        replace_durably(self.folder / _STATUS_FILE, [status.encode()])

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read the training rows and the validation rows."""
        file = self.folder / ROWS_FILE
        return rows_by_kind(read_history(file)) if file.exists() else ([], [])


class AblationPlan(NamedTuple):
    """All runs of an ablation."""

    folder: Path
    keys: dict[str, dict[str, Any]]
    """Dotted keys with their values, by variant; the first variant is the baseline."""
    runs: tuple[AblationRun, ...]
    """Runs in the order of training: all variants with the first seed, then all with the next one."""


def plan_ablation(
    file: Path,
    overrides: Sequence[str],
    varied: Sequence[str],
    processes: int | None,
    machine: Machine,
    *,
    seeds: Sequence[int] | None = None,
) -> AblationPlan:
    """Resolve and check every run.

    Args:
        overrides: tokens of the command line, see `load_config`.
        varied: texts ``section.key=VALUE,VALUE``.
        processes: number of processes per run; None: `processes_of_node` decides.
        seeds: values of debug.seed; None: that of the file.

    Raises:
        UserError: with the faults of all variants.
    """
    base = load_config(file, overrides)
    section = base.ablation or AblationConfig()
    variants = _cross(section.variants, [_values(text) for text in varied])
    if len(variants) < 2:
        raise UserError(
            f"{file}: [ablation] and --vary give {counted(len(variants), 'variant')}: two are needed for a comparison; "
            "add --vary section.key=VALUE,VALUE, or [[ablation.variants]] with name and keys"
        )
    keys = {variant.name: flat_keys(variant.keys) for variant in variants}
    if faults := [*_equal_names(file, variants), *_keys_set_by_ablate(file, keys)]:
        raise UserError(*faults)
    folder = Path(base.job.dump_folder)
    by_seed: dict[int, list[AblationRun]] = {seed: [] for seed in seeds or (base.debug.seed,)}
    for name in keys:
        try:
            keys[name] = _emulated(file, overrides, name, keys[name], machine)
            config, count = _resolve(file, overrides, name, keys[name], processes, machine)
        except UserError as error:
            faults += error.faults
            continue
        for seed, runs in by_seed.items():
            runs.append(AblationRun(name, seed, _config_of_run(config, name, seed, folder), count))
    all_runs = tuple(itertools.chain(*by_seed.values()))
    faults += [fault for run in all_runs for fault in _changed_keys(run)]
    if faults:
        raise UserError(*dict.fromkeys(faults))
    return AblationPlan(folder, keys, all_runs)


def _values(text: str) -> tuple[str, list[Any]]:
    """Parse ``optimizer.ns_steps=3,5`` as a key and its values."""
    key, equals, listed = text.partition("=")
    if not equals or "." not in key or not listed:
        raise UserError(
            f"command line: --vary {text}: expected --vary section.key=VALUE,VALUE; quote it if it has spaces"
        )
    values = literal(f"[{listed}]")
    # Bare words are strings, as in an override: Muon,AdamW.
    return key.strip(), values if isinstance(values, list) else [literal(part.strip()) for part in listed.split(",")]


def _cross(variants: Sequence[VariantConfig], varied: Sequence[tuple[str, list[Any]]]) -> list[VariantConfig]:
    """Return the product of the file's variants and the values of each varied key."""
    choices = [[(key, value) for value in values] for key, values in varied]
    starts = [(variant.name, flat_keys(variant.keys)) for variant in variants]
    if not starts and choices:
        starts = [("", {})]
    crossed = []
    for (name, keys), *pairs in itertools.product(starts, *choices):
        texts = [f"{key}={value if isinstance(value, str) else show(value)}" for key, value in pairs]
        full_name = folder_name(",".join(filter(None, [name, *texts])))
        crossed.append(VariantConfig(name=full_name, keys=keys | dict(pairs)))
    return crossed


def _equal_names(file: Path, variants: Sequence[VariantConfig]) -> Iterator[str]:
    for name, count in Counter(variant.name for variant in variants).items():
        if count > 1:
            yield (
                f"{file}, variant {name}: {count} variants have this name; names must differ: remove one, or name it "
                "otherwise under [[ablation.variants]]"
            )


def _keys_set_by_ablate(file: Path, keys: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, values in keys.items():
        for key in values.keys() & _SET_BY_ABLATE.keys():
            yield f"{file}, variant {name}: {key} = {show(values[key])}: {_SET_BY_ABLATE[key]}"
        for key in values:
            if key.startswith("ablation."):
                yield (
                    f"{file}, variant {name}: {key} = {show(values[key])}: a variant has no [ablation] itself; set "
                    "it for all variants"
                )


def _emulated(
    file: Path, overrides: Sequence[str], name: str, keys: Mapping[str, Any], machine: Machine
) -> dict[str, Any]:
    """Return the keys of a variant, with float8.emulate if this machine has no kernels for its recipe."""
    if "float8.recipe_name" not in keys or "float8.emulate" in keys:
        return dict(keys)
    emulated = {**keys, "float8.emulate": True}
    config = load_config(file, overrides, variant=(f"{file}, variant {name}", emulated))
    needs_it = fp8_faults(config.float8.model_copy(update={"emulate": False}), machine)
    return emulated if needs_it else dict(keys)


def _resolve(
    file: Path, overrides: Sequence[str], name: str, keys: Mapping[str, Any], processes: int | None, machine: Machine
) -> tuple[RunConfig, int]:
    """Return the config of a variant, and its number of processes."""
    variant = (f"{file}, variant {name}", keys)
    config = load_config(file, overrides, variant=variant)
    if refusal := describe_refusal(config, machine, processes):
        raise UserError(f"{file}, variant {name}: this machine cannot train it; remove or change it\n{refusal}")
    count = processes or processes_of_node(config.parallelism, machine)
    load_config(file, overrides, variant=variant, world_size=count)
    return config, count


def _config_of_run(config: RunConfig, name: str, seed: int, folder: Path) -> RunConfig:
    def inside(path: str) -> str:
        return str(Path(path, name, f"seed-{seed}")) if Path(path).is_absolute() else path

    job = {
        "dump_folder": str(folder / name / f"seed-{seed}"),
        "description": f"{config.job.description}: {name}, seed {seed}",
    }
    changes = {
        "job": config.job.model_copy(update=job),
        "checkpoint": config.checkpoint.model_copy(update={"folder": inside(config.checkpoint.folder)}),
        "metrics": config.metrics.model_copy(update={"save_tb_folder": inside(config.metrics.save_tb_folder)}),
        "debug": config.debug.model_copy(update={"seed": seed}),
        "ablation": None,
    }
    return config.model_copy(update=changes)


def _changed_keys(run: AblationRun) -> Iterator[str]:
    """Yield a fault for each key that differs from an earlier call's config of the same run."""
    file = run.folder / CONFIG_FILE
    if not file.exists():
        return
    try:
        started = stored_config(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        remedy = f"remove {run.folder}, or set another job.dump_folder"
        raise UserError(f"{file}: cannot be read: {error}; {remedy}") from error
    before = flat_keys(tomli.loads(dump_config(started)))
    now = flat_keys(tomli.loads(dump_config(run.config)))
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key):
            new_value = show(now[key]) if key in now else "absent"
            old_value = show(before[key]) if key in before else "absent"
            yield (
                f"{file}: {key} = {new_value}: this run of an earlier call was started with {old_value}; set that, "
                f"remove {run.folder}, or set another job.dump_folder"
            )
