"""Rule that every key that is set has an effect. `Needs` in the type of a field defines when it has an effect."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from glm46.config.faults import show
from glm46.config.overrides import dotted, key_parts
from glm46.config.presets import with_presets
from glm46.config.rules import Broken, Faults, fault, rule, with_value
from glm46.config.run_config import RunConfig
from glm46.config.section import Needs, Section


class IdleKey(NamedTuple):
    """A key without effect."""

    place: tuple[str | int, ...]
    """The parts of the key, see `overrides.key_parts`."""
    is_stated: bool
    """True if the config sets the key to anything except a default that is "off"."""
    switch: str
    """Dotted key whose value disables the key."""
    remedy: str
    """Switch with a value that enables the key; empty if the switch must be absent."""
    reason: str
    """See `Needs.absent`."""


@rule
def stated_keys_have_an_effect(config: RunConfig) -> Faults:
    """Every key that is set has an effect."""
    yield from idle_faults(config)


def idle_faults(root: Section) -> Iterator[Broken]:
    """Yield the faults of keys of a config or a recipe that are set without effect."""
    for idle in idle_keys(root):
        key = dotted(idle.place)
        name = f"[{key}]" if with_value(root, key).startswith("[") else key
        current = with_value(root, idle.switch)
        if not idle.is_stated:
            continue
        if not idle.remedy:
            yield fault(f"`{key}`: has no effect with `{idle.switch}`{idle.reason}; remove {name}")
        elif current.endswith(")"):  # the value comes from a preset
            yield fault(f"`{key}`: has no effect with `{idle.switch}`; set {idle.remedy}, or remove {name}")
        else:
            yield fault(f"`{key}`: has no effect without {idle.remedy}; set that, or remove {name}", idle.switch)


def idle_keys(root: Section) -> Iterator[IdleKey]:
    """Yield every key of a config or a recipe that has no effect, set or not, each once."""
    yield from _idle_keys(with_presets(root) if isinstance(root, RunConfig) else root, root, "")


def _idle_keys(full: Section, section: Section, prefix: str) -> Iterator[IdleKey]:
    """Yield the keys without effect of a section under a prefix, with the values of ``full``."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        place = f"{prefix}{name}"
        if isinstance(value, Section):
            yield from _idle_keys(full, value, f"{place}.")
        for index, entry in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(entry, Section):
                yield from _idle_keys(full, entry, f"{place}[{index}].")
        is_off = value is None or (value == field.default and (not value or value == "auto"))
        for need in (mark for mark in field.metadata if isinstance(mark, Needs)):
            switch, unless = (_whole(section, prefix, key) for key in (need.key, need.unless or ""))
            values = _find(full, switch)
            if (unless and any(_find(full, unless))) or any(_suffices(need, switch_value) for switch_value in values):
                continue
            is_stated = name in section.model_fields_set and not (is_off or (need.absent and not value))
            remedy = _remedy(need, switch, values)
            switch = switch.partition("[]")[0]
            yield IdleKey(tuple(key_parts(place)), is_stated, switch, remedy, need.absent)
            break


def _whole(section: Section, prefix: str, key: str) -> str:
    """Return the dotted key from the root that a key of `Needs` in a section stands for."""
    first = key.partition("[")[0].partition(".")[0]
    return prefix + key if first in type(section).model_fields else key


def _find(root: Section, key: str) -> list[Any]:
    """Return the values of a key; an empty list if its table is absent."""
    places: list[Any] = [root]
    for part in key_parts(key):
        if isinstance(part, int):
            places = [place[part] for place in places]
            continue
        entries = [entry for place in places for entry in (place if isinstance(place, tuple) else (place,))]
        places = [getattr(entry, part) for entry in entries if entry is not None]
    return places


def _suffices(need: Needs, value: object) -> bool:
    if need.absent:
        return value is None
    if need.above is not None:
        return isinstance(value, (int, float)) and value > need.above
    return bool(value) if need.value is None else value in _choices(need)


def _choices(need: Needs) -> tuple[Any, ...]:
    return need.value if isinstance(need.value, tuple) else (need.value,)


def _remedy(need: Needs, switch: str, values: list[Any]) -> str:
    if need.absent:
        return ""
    if need.value is not None:
        other = f" or {need.unless}" if need.unless else ""
        return f"{switch} = {' or '.join(map(show, _choices(need)))}{other}"
    if False in values:  # 0 too
        return f"{switch} = true" if values[0] is False else f"{switch} above {need.above or 0}"
    return switch if need.above is None else f"{switch} above {need.above}"
