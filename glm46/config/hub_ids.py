"""The keys of a config that are ids of the Hugging Face hub."""

from collections.abc import Iterator

from glm46.config.hub_address import HubKey, OnHub, is_hub_address
from glm46.config.overrides import dotted
from glm46.config.section import Section


def hub_keys(section: Section, prefix: tuple[str | int, ...] = ()) -> Iterator[HubKey]:
    """Yield the keys of a section and its tables whose value is an id of the hub."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        place = (*prefix, name)
        if isinstance(value, Section):
            yield from hub_keys(value, place)
        for index, entry in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(entry, Section):
                yield from hub_keys(entry, (*place, index))
        marks = [mark for mark in field.metadata if isinstance(mark, OnHub)]
        if marks and isinstance(value, str) and is_hub_address(value):
            yield HubKey(dotted(place), marks[0], value)
