"""Configs that runs of this version and of others have stored, in their checkpoints and folders."""

from collections.abc import Mapping
from typing import Any

import tomli

from glm46.config.errors import raise_if
from glm46.config.model import GONE_KEYS, ModelConfig
from glm46.config.run_config import RunConfig
from glm46.config.validation import validate_table

_REMEDY = "read the checkpoint with the version of glm46 that saved it"


def stored_config(text: str) -> RunConfig:
    """The config of a run from the text in a checkpoint's meta or in its folder. Keys that this version does not have
    are skipped, but not those of the sections that a model computes by.

    Raises:
        UserError: such a key, see `without_gone_keys`, or a value that this version does not have.
        ValueError, KeyError, TypeError: the text is not the config of a run.
    """
    table = tomli.loads(text)
    table["model"] = without_gone_keys(table["model"])
    config, faults = validate_table(table)
    of_function = [fault for fault in faults if {key.split(".")[0] for key in fault.keys} & {"model", "moe", "adapter"}]
    raise_if([f"{fault.message}; {_REMEDY}" for fault in of_function])
    return config


def without_gone_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A shape or [model] of a checkpoint, without `GONE_KEYS`. Raises UserError if one of them has another value, or
    there is an unknown key: the weights were trained for another function than this version computes."""
    unknown = {key: value for key, value in stored.items() if key not in ModelConfig.model_fields}
    raise_if([
        f"model.{key} = {value!r} of the checkpoint: this version computes the model without it; {_REMEDY}"
        for key, value in unknown.items() if (key, value) not in GONE_KEYS.items()
    ])  # fmt: skip
    return {key: value for key, value in stored.items() if key not in unknown}
