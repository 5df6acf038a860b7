"""Rules across sections: registration of the functions of `rules_*.py`, and the messages of the faults that they yield.

A rule about one key is in the type of its field, and a common rule about two keys in its metadata (`field_rules`). A
rule reads only the config; `check.py` has the order of the files.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from glm46.config.faults import Fault, show
from glm46.config.fields import values_at
from glm46.config.presets import PRESETS, resolve_shape, with_presets
from glm46.config.run_config import RunConfig
from glm46.config.section import Section

_KEY = re.compile(r"`([a-z_0-9.\[\]]+)`")


class Broken(NamedTuple):
    """A broken rule, see `fault`."""

    text: str
    also: tuple[str, ...]


Faults = Iterator[Broken]
"""What a function with `rule` yields. Keys and values are filled in later, see `fault`."""

_RULES: dict[str, list[tuple[tuple[str, ...], Callable[..., Faults]]]] = defaultdict(list)
"""Rules by the name of their file, each with the names of its parameters."""


def fault(text: str, *also: str) -> Broken:
    """Return a fault with the message ``key = value: rule; remedy``.

    Args:
        text: the message, one line. A key in backticks stands for ``key = value``, or ``[key]`` of a section, with the
            value of the preset where the config has none. These are the keys of the fault. The remedy is last; one of
            the form ``; take VALUE`` or ``; set section.key = value`` is applied by tests, which load the file again.
        also: more keys that it involves.
    """
    return Broken(text, also)


def rule(check: Callable[..., Faults]) -> Callable[..., Faults]:
    """Register a function as a rule. The names of its parameters select what it reads: ``config``, ``world_size`` (None
    if the number of processes is not known yet), ``shape`` of a known preset, a section that may be absent, such as
    ``rl``, or ``algorithm``, which is [rl] with its preset. It is not called for a config that lacks one of them."""
    _RULES[check.__module__].append((tuple(inspect.signature(check).parameters), check))
    return check


def broken_rules(config: RunConfig, world_size: int | None, files: tuple[ModuleType, ...]) -> list[Fault]:
    """Return the faults of a config under the rules of some files, in the order of the files."""
    arguments: dict[str, Any] = {
        "config": config,
        "rl": config.rl,
        "rollout": config.rollout,
        "adapter": config.adapter,
        "preference": config.preference,
        "algorithm": None if config.rl is None else config.rl.resolved(),
        "shape": resolve_shape(config.model) if config.model.flavor in PRESETS else None,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None} | {"world_size": world_size}
    return [
        described(config, broken)
        for file in files
        for names, check in _RULES[file.__name__]
        if arguments.keys() >= set(names)
        for broken in check(*(arguments[name] for name in names))
    ]


def described(config: Section, broken: Broken) -> Fault:
    """Return the fault of a broken rule, with the values of its keys in the message."""
    message = _KEY.sub(lambda key: with_value(config, key[1]), broken.text)
    return Fault(tuple(dict.fromkeys((*_KEY.findall(broken.text), *broken.also))), message)


def messages(config: Section, faults: Faults) -> list[str]:
    """Return the messages of faults."""
    return [described(config, broken).message for broken in faults]


def with_value(config: Section, key: str) -> str:
    """Return ``key = value``, with the preset that the value comes from; ``[key]`` for a section, and only the key if
    the value is absent."""
    value = next(iter(values_at(config, key)), None)
    origin = ""
    if value is None and isinstance(config, RunConfig):
        value = next(iter(values_at(with_presets(config), key)), None)
        origin = f' (of rl.algorithm = "{config.rl.algorithm}")' if config.rl and key.startswith("rl.") else ""
    if isinstance(value, Section):
        return f"[{key}]"
    return key if value is None else f"{key} = {show(value)}{origin}"
