"""Load a checked `RunConfig` from a TOML file and the command line, and write it back as TOML.

Overrides are put into the table of the file before validation, so they are checked like lines of the file. All faults
are reported at once, each with its origin.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli
import tomli_w

from glm46.config.adapter import AdapterConfig
from glm46.config.check import find_faults
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import Fault, nearest
from glm46.config.fields import with_defaults
from glm46.config.model import GONE_KEYS, ModelConfig, ModelShape
from glm46.config.overrides import Override, apply_overrides, key_parts, parse_overrides, take_out
from glm46.config.rules import with_value
from glm46.config.rules_fields import idle_keys
from glm46.config.run_config import RunConfig
from glm46.config.validation import validate_table

_REMEDY = "read the checkpoint with the version of glm46 that saved it"


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    variant: tuple[str, Mapping[str, Any]] = ("", {}),
) -> RunConfig:
    """Load a config from its TOML file.

    Args:
        overrides: tokens of the command line, ``--section.key value`` or ``--section.key=value``; later ones win.
        world_size: processes of the run; None when they are not known yet: rules about them are skipped.
        variant: name of a variant of an ablation, which messages give as origin instead of the command line, and its
            values by dotted key, which win.

    Raises:
        UserError: with every fault of the file, the overrides and the rules across sections.
    """
    table = read_table(path)
    written = copy.deepcopy(table)
    parsed, faults = parse_overrides(overrides)
    varied = [Override(key, value) for key, value in variant[1].items()]
    faults += apply_overrides(table, parsed) + apply_overrides(table, varied)
    overridden = [override.key for override in (*parsed, *varied)]
    config, invalid = validate_table(table)
    # The command line may switch off a feature whose keys the file sets: they have their defaults.
    switched_off = [
        idle.key
        for idle in idle_keys(config)
        if idle.remedy and _any_touches([idle.switch], overridden) and not _any_touches([idle.key], overridden)
    ]
    config = with_defaults(config, switched_off)
    faults += [fault for fault in invalid if not _any_touches(fault.keys, switched_off)]
    in_doubt = [key for fault in faults for key in (*fault.keys, *fault.doubtful)]
    # A rule that reads an uncertain key would report a default that is not in the file.
    faults += [fault for fault in find_faults(config, world_size) if not _any_touches(fault.keys, in_doubt)]
    sources = _Sources(path, written, variant[0] or "command line", overridden)
    raise_if([sources.message(fault, config) for fault in faults])
    return config


def config_from(sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return a config with some sections, for their values and not for a run.

    Raises:
        UserError: with every fault that involves these sections.
    """
    config, faults = validate_table({"model": {"flavor": "debug"}, "training": {"steps": 1, "seq_len": 2}, **sections})
    faults += [fault for fault in find_faults(config, None) if any(key.split(".")[0] in sections for key in fault.keys)]
    raise_if([fault.message for fault in faults])
    return config


def dump_config(config: RunConfig) -> str:
    """Return the config as TOML, defaults included; it loads to an equal config. Absent keys, and keys without effect,
    which are faults when set, are skipped."""
    table = config.model_dump(exclude_none=True)
    for idle in idle_keys(config):
        take_out(table, key_parts(idle.key))
    if not table["model"]["shape"]:  # the flavor says it all
        del table["model"]["shape"]
    return tomli_w.dumps(table)


def stored_config(text: str) -> RunConfig:
    """Load the config of a run from its text in the metadata of a checkpoint or in the folder of the run. Removed and
    other unknown keys are skipped. In the sections that determine what the model computes an unknown key is refused,
    and so is a removed one with a value that this version cannot compute.

    Raises:
        UserError: such a key (see `without_gone_keys`), or a value that this version does not support.
        ValueError, KeyError, TypeError: the text is not the config of a run.
    """
    table = _parsed(text)
    table["model"] = _with_shape_apart(table["model"])
    if "adapter" in table:
        table["adapter"] = _adapter_without_removed(table["adapter"])
    config, faults = validate_table(table)
    model_faults = [
        fault for fault in faults if {key.split(".")[0] for key in fault.keys} & {"model", "moe", "adapter"}
    ]
    raise_if([f"{fault.message}; {_REMEDY}" for fault in model_faults])
    return config


def _with_shape_apart(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return [model] of a checkpoint with the keys of its shape in [model.shape]; earlier versions had them in [model].
    Raises UserError like `without_gone_keys`."""
    if not isinstance(stored, Mapping):
        raise TypeError("model is not a table")
    model = {key: value for key, value in stored.items() if key in ModelConfig.model_fields}
    outside = {key: value for key, value in stored.items() if key not in model}
    return model | {"shape": without_gone_keys(outside | model.get("shape", {}))}


def without_gone_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of a checkpoint without `GONE_KEYS`. Raises UserError if one of them has another value, or
    another key is unknown: this version does not compute the function that the weights were trained for."""
    unknown = {key: value for key, value in stored.items() if key not in ModelShape.model_fields}
    changed = {key: value for key, value in unknown.items() if (key, value) not in GONE_KEYS.items()}
    raise_if([_not_computed(f"model.shape.{key}", value) for key, value in changed.items()])
    return {key: value for key, value in stored.items() if key not in unknown}


def _adapter_without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return [adapter] of a checkpoint without the keys of `AdapterConfig.removed`. Raises UserError if one of them has
    a value that this version cannot compute."""
    kept = dict(stored)
    if kept.pop("rank_stabilized", False):
        # The scale was alpha / sqrt(rank), and is alpha / rank now.
        kept["alpha"] = stored["alpha"] * stored["rank"] ** 0.5
    removed = {key: kept.pop(key) for key in AdapterConfig.removed if key in kept}
    raise_if(
        [
            _not_computed(f"adapter.{key}", value)
            for key, value in removed.items()
            if AdapterConfig.removed[key].value not in (..., value)
        ]
    )
    return kept


def _not_computed(key: str, value: object) -> str:
    return f"{key} = {value!r} of the checkpoint: this version computes the model without it; {_REMEDY}"


def read_table(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file, without any check of its keys.

    Raises:
        UserError: the file cannot be read, or is not TOML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}{_similar_file(path)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8 text; save the TOML file as UTF-8") from error
    try:
        return _parsed(text)
    except tomli.TOMLDecodeError as error:
        lines = text.splitlines()
        quoted = f"; the line reads: {lines[error.lineno - 1].strip()}" if error.lineno <= len(lines) else ""
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid TOML: {error.msg}{quoted}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML: {error}; write it with less nesting") from error


def _parsed(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises ValueError if it is not TOML, or nested too deeply."""
    try:
        return tomli.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    near = nearest(path.stem, {file.stem for file in path.parent.glob("*.toml") if file != path}, 0.7)
    return f"; did you mean {path.with_name(near)}.toml?" if near else "; name the TOML file of a run"


def _is_inside(key: str, outer: str) -> bool:
    return key == outer or key.startswith((outer + ".", outer + "["))


def _any_touches(keys: Sequence[str], others: Sequence[str]) -> bool:
    return any(_is_inside(key, other) or _is_inside(other, key) for key in keys for other in others)


class _Sources(NamedTuple):
    """The places in which the keys of a config are set."""

    file: Path
    written: dict[str, Any]
    """Table of the file."""
    overrider: str
    """The command line, or the name of a variant."""
    overridden: Sequence[str]

    def message(self, fault: Fault, config: RunConfig) -> str:
        """Return the message of a fault after the origin of its keys: the file, the overrider or both. Absent keys
        belong to the file. A default that the overrider makes a fault is marked as one, because the user could not find
        it otherwise."""
        is_inside = [any(_is_inside(key, other) for other in self.overridden) for key in fault.keys]
        names = []
        if any(not inside and _states(self.written, key) for inside, key in zip(is_inside, fault.keys, strict=True)):
            names.append(str(self.file))
        if not fault.keys or _any_touches(fault.keys, self.overridden):
            names.append(self.overrider)
        message = fault.message
        if names == [self.overrider] and fault.keys and not _any_touches(fault.keys[:1], self.overridden):
            value = with_value(config, fault.keys[0])
            if " = " in value and message.startswith(value):
                message = message.replace(value, f"{value} (the default)", 1)
        return f"{' and '.join(names) or self.file}: {message}"


def _states(table: dict[str, Any], key: str) -> bool:
    place: Any = table
    for part in key_parts(key):
        try:
            place = place[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True
