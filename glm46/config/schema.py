"""Documentation of the keys: a JSON schema for editors, and one row per key for ``train --help``."""

import typing
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from glm46.config.faults import show
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.config.section import Section
from glm46.config.validation import choices_in, holds_schedule, section_of

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "string"}


@dataclass(frozen=True)
class KeyRow:
    """Documentation of one key."""

    key: str
    """Name inside its section."""
    values: str
    """Type, choices and range."""
    default: str
    meaning: str


@dataclass(frozen=True)
class SectionRows:
    """One table of the TOML file."""

    name: str
    """As in the file's header, ``training`` or ``data.sources``."""
    meaning: str
    rows: tuple[KeyRow, ...]


def json_schema() -> dict[str, Any]:
    """The JSON schema of a TOML file, with which editors complete and check keys."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A glm46 run"
    flavor = schema["$defs"]["Model"]["properties"]["flavor"]
    flavor["enum"] = list(PRESETS)
    return schema


def describe_keys() -> list[SectionRows]:
    """Every section and key, in the order of the file."""
    return [rows for name, field in RunConfig.model_fields.items() for rows in _describe(name, section_of(field))]


def _describe(name: str, section: type[Section]) -> list[SectionRows]:
    rows, inner = [], []
    for key, field in section.model_fields.items():
        nested = section_of(field)
        if nested is None:
            default = "of the preset" if name == "model" and key in ModelShape.model_fields else _default(field)
            rows.append(KeyRow(key, _values(key, field), default, _one_line(field.description)))
        else:
            inner += _describe(f"{name}.{key}", nested)
    # The docstring of the class begins with the header of the table, which is `name`.
    meaning = _one_line(section.__doc__).partition(": ")[2]
    return [SectionRows(name, meaning, tuple(rows)), *inner]


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "absent" if field.default is None else show(field.default)


def _values(key: str, field: FieldInfo) -> str:
    if key == "flavor":
        return " | ".join(PRESETS)
    if holds_schedule(field):
        return "number or [[tokens, value], ...]"
    if choices := choices_in(field.annotation):
        return " | ".join(choices)
    kind = next(_TYPES[inner] for inner in _leaves(field.annotation) if inner in _TYPES)
    return " ".join([kind, *_bounds(field)])


def _leaves(annotation: Any) -> list[Any]:
    """The types inside optionals and Annotated."""
    if not typing.get_args(annotation):
        return [annotation]
    return [leaf for inner in typing.get_args(annotation) for leaf in _leaves(inner)]


def _bounds(field: FieldInfo) -> list[str]:
    limits = [*field.metadata, *_annotations(field.annotation)]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [(sign, getattr(limit, name)) for limit in limits for name, sign in signs.items() if hasattr(limit, name)]
    return [f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}" for sign, value in found]


def _annotations(annotation: Any) -> list[Any]:
    """The metadata of optional Annotated types, with Field objects unpacked."""
    found = []
    for item in getattr(annotation, "__metadata__", ()):
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found + [carried for inner in typing.get_args(annotation) for carried in _annotations(inner)]
