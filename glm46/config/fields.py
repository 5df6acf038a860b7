"""The fields of a config, one after the other, and values by their keys."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast

from pydantic.fields import FieldInfo

from glm46.config.hub_address import HubKey, OnHub, is_hub_address
from glm46.config.overrides import key_parts
from glm46.config.section import Section
from glm46.config.store_address import is_store_address

_parts = lru_cache(maxsize=4096)(key_parts)  # a search of layouts looks up each key thousands of times
SectionType = TypeVar("SectionType", bound=Section)


class FieldValue(NamedTuple):
    """A field of a section of a config."""

    section: Section
    prefix: str
    """Dotted key of the section, with a dot at its end."""
    name: str
    info: FieldInfo
    value: object

    @property
    def key(self) -> str:
        """Dotted key of the field."""
        return self.prefix + self.name

    def whole_key(self, key: str) -> str:
        """Return the dotted key from the root that a key of the same section, or else of the root, stands for."""
        first = key.partition("[")[0].partition(".")[0]
        return self.prefix + key if first in type(self.section).model_fields else key


def fields_of(section: Section, prefix: str = "") -> Iterator[FieldValue]:
    """Yield the fields of a section and of the sections in it, outer ones first."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        yield FieldValue(section, prefix, name, info, value)
        if isinstance(value, Section):
            yield from fields_of(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if isinstance(entry, Section):
                    yield from fields_of(entry, f"{prefix}{name}[{index}].")


def values_at(root: object, key: str) -> list[object]:
    """Return the values of a dotted key, one for each entry of an array without an index; an empty list if its table is
    absent."""
    places = [root]
    for part in _parts(key):
        if isinstance(part, int):
            places = [place[part] for place in places if isinstance(place, tuple)]
            continue
        entries = [entry for place in places for entry in (place if isinstance(place, tuple) else (place,))]
        places = [
            entry.get(part) if isinstance(entry, dict) else getattr(entry, part, None)
            for entry in entries
            if entry is not None
        ]
    return places


def with_defaults(config: SectionType, keys: Iterable[str]) -> SectionType:
    """Return a config whose keys at some places have their defaults, as if they were not set."""
    for key in keys:
        config = cast(SectionType, _with_default(config, key_parts(key)))
    return config


def _with_default(place: object, path: Sequence[str | int]) -> object:
    first, *inner = path
    if isinstance(place, tuple):
        index = int(first)
        return (*place[:index], _with_default(place[index], inner), *place[index + 1 :])
    assert isinstance(place, Section)
    name = str(first)
    if inner:
        return place.model_copy(update={name: _with_default(getattr(place, name), inner)})
    default = type(place).model_fields[name].get_default(call_default_factory=True)
    section = place.model_copy(update={name: default})
    section.model_fields_set.remove(name)
    return section


def hub_keys(section: Section) -> Iterator[HubKey]:
    """Yield the keys of a section and its tables whose value is an id of the hub, or the URL of an object store."""
    for field in fields_of(section):
        marks = [mark for mark in field.info.metadata if isinstance(mark, OnHub)]
        if not marks or not isinstance(field.value, str):
            continue
        if is_hub_address(field.value) or is_store_address(field.value):
            yield HubKey(field.key, marks[0], field.value)
