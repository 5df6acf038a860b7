"""Overrides of the command line: ``--section.key value`` or ``--section.key=value`` replaces a key of the file.

The value is read as a TOML literal. Anything else is a string, so that ``--optimizer.name AdamW`` needs no quotes.
``--section.key=`` without a value removes the key from the file, so that its default holds.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

import tomli

from glm46.config.faults import Fault, counted, show

_ABSENT = object()
_KEY = re.compile(r"[A-Za-z0-9_-]+(\[\d+\])?(\.[A-Za-z0-9_-]+(\[\d+\])?)*")

# A budget on the command line replaces the budget of the file in either unit, so that one flag can shorten any run.
# Both units in one place are still a fault.
ALTERNATIVES = {"training.steps": "training.tokens", "training.tokens": "training.steps"}


@dataclass(frozen=True)
class Override:
    """One key of the command line and its value."""

    key: str
    value: Any


def parse_overrides(tokens: Sequence[str]) -> tuple[list[Override], list[Fault]]:
    """Split argv tokens into overrides; tokens that are not overrides become faults."""
    overrides = []
    faults = []
    remaining = list(tokens)
    while remaining:
        token = remaining.pop(0)
        name, equals, text = token.removeprefix("--").partition("=")
        if not token.startswith("--") or not _KEY.fullmatch(name):
            faults.append(Fault((), f"{show(token)}: expected --section.key value; quote a value that has spaces"))
        elif equals:
            overrides.append(Override(name, _ABSENT if text == "" else literal(text)))
        elif not remaining or remaining[0].startswith("--"):
            faults.append(Fault((), f"--{name}: no value given; write --{name} VALUE", doubtful=(name,)))
        else:
            overrides.append(Override(name, literal(remaining.pop(0))))
    return overrides, faults


def apply_overrides(table: dict[str, Any], overrides: Sequence[Override]) -> list[Fault]:
    """Put overrides into the table, in order, in place; missing tables are created."""
    faults = []
    set_keys = {override.key for override in overrides if override.value is not _ABSENT}
    for override in overrides:
        fault = _apply(table, override)
        if fault:
            faults.append(fault)
        other = ALTERNATIVES.get(override.key)
        if other and override.key in set_keys and other not in set_keys:
            _apply(table, Override(other, _ABSENT))
    return faults


def key_parts(key: str) -> list[str | int]:
    """Split a dotted key: ``data.sources[0].weight`` becomes ``["data", "sources", 0, "weight"]``."""
    return [int(part[1:-1]) if part.startswith("[") else part for part in re.findall(r"\[\d+\]|[^.\[\]]+", key)]


def dotted(parts: Sequence[str | int]) -> str:
    """Join the parts of a dotted key, the inverse of `key_parts`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def take_out(table: dict[str, Any], place: Sequence[str | int]) -> None:
    """Remove the key at a place, if the table has it."""
    outer: Any = table
    for part in place[:-1]:
        if isinstance(outer, dict) and part not in outer:
            return
        outer = outer[part]
    if place:
        outer.pop(place[-1], None)


def literal(text: str) -> object:
    """Parse a text as a TOML value; return the text itself if it is not one."""
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    # More than one key: the text has a line break. No key takes a date, so a date is read as a string.
    if set(parsed) != {"value"} or isinstance(parsed["value"], (date, time)):
        return text
    return parsed["value"]


def _apply(table: dict[str, Any], override: Override) -> Fault | None:
    *path, last = key_parts(override.key)
    place: Any = table
    for depth, part in enumerate(path):
        # Create missing tables, but not missing entries of an array: the other entries would be unknown.
        if isinstance(place, dict) and isinstance(part, str) and isinstance([*path, last][depth + 1], str):
            place.setdefault(part, {})
        if not _holds(place, part):
            inner = isinstance(part, str) and not isinstance(place, list)
            return _no_such_place(override.key, path[: depth + inner], place)
        place = place[part]
    is_key = isinstance(place, dict) and isinstance(last, str)
    if not is_key and not _holds(place, last):
        return _no_such_place(override.key, path, place)
    if override.value is not _ABSENT:
        place[last] = override.value
    elif is_key:
        place.pop(last, None)
    else:
        del place[last]
    return None


def _holds(place: object, part: str | int) -> bool:
    if isinstance(part, str):
        return isinstance(place, dict) and part in place
    return isinstance(place, list) and part < len(place)


def _no_such_place(key: str, path: list[str | int], place: object) -> Fault:
    name = dotted(path)
    if isinstance(place, list):
        rest = key.removeprefix(f"{name}.")
        if rest != key:
            first, _, others = rest.partition(".")
            named = (f"{name}[{first}]", others) if first.isdigit() else (f"{name}[0]", f"{rest} for the first one")
            rule = f"{name} is an array of {counted(len(place), 'table')}; write {'.'.join(filter(None, named))}"
            return Fault((), f"{key}: {rule}", doubtful=(key,))
        entries = "1 entry" if len(place) == 1 else f"{len(place)} entries"
        rule = f"{name} has {entries}, counted from 0"
    elif isinstance(place, dict):
        rule = f"{name} is not an array in the file"
    else:
        rule = f"{name} = {show(place)} is not a table"
    return Fault((), f"{key}: {rule}; set the whole value of {name} instead", doubtful=(key,))
