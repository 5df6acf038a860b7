"""The rule that a key which is set has an effect. `Needs` in the type of a field says when it has one."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from glm46.config.faults import Fault, Faults, show
from glm46.config.overrides import dotted
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.section import Needs, Section


class IdleKey(NamedTuple):
    """A key without effect."""

    place: tuple[str | int, ...]
    """The parts of the key, see `overrides.key_parts`."""
    value: Any
    is_stated: bool
    """True if the config sets the key, to something else than a default that is "off"."""
    switch: str
    """Dotted key whose value disables the key."""
    remedy: str
    """The switch with a value that enables the key."""


_OFF = (None, False, 0, "", (), "auto")
"""Defaults that can be stated where they have no effect."""


def stated_keys_have_an_effect(config: Section) -> Faults:
    """Every key that is set has an effect."""
    for idle in idle_keys(config):
        key = dotted(idle.place)
        if idle.is_stated:
            message = f"{key} = {show(idle.value)}: has no effect without {idle.remedy}; set that, or remove {key}"
            yield Fault((key, idle.switch), message)


def idle_keys(root: Section) -> Iterator[IdleKey]:
    """Every key of a run or a recipe that has no effect, set or not; each once."""
    yield from _idle_keys(root, root, ())


def _idle_keys(root: Section, section: Section, prefix: tuple[str | int, ...]) -> Iterator[IdleKey]:
    for name, field in type(section).model_fields.items():
        value, place = getattr(section, name), (*prefix, name)
        if isinstance(value, Section):
            yield from _idle_keys(root, value, place)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if isinstance(entry, Section):
                    yield from _idle_keys(root, entry, (*place, index))
        is_stated = name in section.model_fields_set and not (value == field.default and value in _OFF)
        for need in field.metadata:
            if not isinstance(need, Needs):
                continue
            found = _find(root, section, need.key)
            if need.unless is not None and any(_find(root, section, need.unless)):
                continue
            if not any(_suffices(need, one) for one in found):
                is_sibling = need.key.partition("[")[0].partition(".")[0] in type(section).model_fields
                switch = f"{dotted(prefix)}.{need.key}".removeprefix(".") if is_sibling else need.key
                yield IdleKey(place, value, is_stated, switch.partition("[]")[0], _remedy(need, switch, found))
                break


def _find(root: Section, section: Section, key: str) -> list[Any]:
    """The values of a key: of this section if it has the field, else of the root; none if its table is absent."""
    first, *parts = key.replace("[]", "").split(".")
    places: list[Any] = [getattr(section if first in type(section).model_fields else root, first)]
    if first == "model":  # keys that the table does not set come from the preset
        places = [resolve_shape(place) for place in places if place.flavor in PRESETS]
    for part in parts:
        entries = [entry for place in places for entry in (place if isinstance(place, tuple) else (place,))]
        entries = [entry for entry in entries if entry is not None]
        places = [getattr(entry, part) for entry in entries]
    return places


def _suffices(need: Needs, found: Any) -> bool:
    if need.above is not None:
        return found > need.above
    return bool(found) if need.value is None else found in _choices(need)


def _choices(need: Needs) -> tuple[Any, ...]:
    return need.value if isinstance(need.value, tuple) else (need.value,)


def _remedy(need: Needs, switch: str, found: list[Any]) -> str:
    if need.value is not None:
        other = f" or {need.unless}" if need.unless else ""
        return f"{switch} = {' or '.join(map(show, _choices(need)))}{other}"
    if False in found:  # 0 too
        return f"{switch} = true" if found[0] is False else f"{switch} above {need.above or 0}"
    return switch if need.above is None else f"{switch} above {need.above}"
