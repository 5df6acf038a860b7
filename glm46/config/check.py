"""All rules across keys, in the order of their files."""

from types import ModuleType

from glm46.config import (
    float8_layers,
    rules_adapter,
    rules_data,
    rules_fields,
    rules_layout,
    rules_model,
    rules_pipeline,
    rules_rl,
    rules_run,
)
from glm46.config.faults import Fault
from glm46.config.rules import broken_rules
from glm46.config.run_config import RunConfig

_FILES: tuple[ModuleType, ...] = (
    rules_run,
    rules_data,
    rules_rl,
    rules_fields,
    rules_model,
    rules_adapter,
    rules_layout,
    rules_pipeline,
    float8_layers,
)


def check_config(config: RunConfig, *, world_size: int | None) -> list[str]:
    """Return the messages of all broken rules; empty if the config is valid.

    Args:
        world_size: processes of the run; None when they are not known yet: rules about them are skipped.
    """
    return [fault.message for fault in find_faults(config, world_size)]


def find_faults(config: RunConfig, world_size: int | None) -> list[Fault]:
    """Return all broken rules, with the keys of each fault; see `check_config`."""
    return broken_rules(config, world_size, _FILES)
