"""Documentation of the keys: a JSON schema for editors, and one row per key for ``train --help keys``."""

from typing import Any, NamedTuple

from glm46.config.faults import show
from glm46.config.field_rules import FieldRule
from glm46.config.model import ModelShape, ShapeConfig
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.config.section import Section

_CLASSES = {section.__name__: section for section in Section.__subclasses__()} | {ShapeConfig.__name__: ModelShape}
"""Section classes by the names that a schema gives them."""

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class KeyRow(NamedTuple):
    """Documentation of one key."""

    key: str
    """Name inside its section."""
    values: str
    """Type, choices and range of the value."""
    default: str
    meaning: str


class SectionRows(NamedTuple):
    """One table of the TOML file."""

    header: str
    """Header as in the file, ``[training]`` or ``[[data.sources]]``."""
    meaning: str
    rows: list[KeyRow]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a TOML file, with which editors complete and check keys."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A glm46 run"
    flavor = schema["$defs"]["ModelConfig"]["properties"]["flavor"]
    flavor["enum"] = list(PRESETS)
    return schema


def describe_keys() -> list[SectionRows]:
    """Return the documentation of every section and key, in the order of the file; [model.shape] is one key."""
    schema = json_schema()
    names = filter(None, map(_section, schema["properties"].values()))
    return [rows for name in names for rows in _describe(name, schema["$defs"])]


def describe_shape() -> list[SectionRows]:
    """Return the documentation of the keys of [model.shape], which is not part of `describe_keys`."""
    return _describe(ShapeConfig.__name__, json_schema()["$defs"])


def _section(spec: dict[str, Any]) -> str | None:
    """Return the name of the section class of a key (direct, optional or in an array); None for a plain value."""
    inner = [spec, spec.get("items", {}), *spec.get("anyOf", ())]
    return next((option["$ref"].rpartition("/")[2] for option in inner if "$ref" in option), None)


def _describe(name: str, sections: dict[str, dict[str, Any]]) -> list[SectionRows]:
    section = sections[name]
    header, meaning = _title(section)
    rows = []
    inner = []
    for key, spec in section["properties"].items():
        if (nested := _section(spec)) == ShapeConfig.__name__:
            rows.append(KeyRow(key, "a table", "absent", _meaning(name, key, spec)))
            continue
        if nested:
            place, _ = _title(sections[nested])
            if place.strip("[]").startswith(header.strip("[]")):
                inner += _describe(nested, sections)
            else:  # described in another section
                rows.append(KeyRow(key, f"a table like {place}", "absent", _meaning(name, key, spec)))
            continue
        default = spec.get("default")
        text = "absent" if default is None else show(default)
        if key in section.get("required", ()):
            text = "required"
        rows.append(KeyRow(key, _values(spec), text, _meaning(name, key, spec)))
    return [SectionRows(header, meaning, rows), *inner]


def _meaning(name: str, key: str, spec: dict[str, Any]) -> str:
    """Return the documentation of a key of a section class, followed by its rules."""
    rules = [str(mark) for mark in _CLASSES[name].model_fields[key].metadata if isinstance(mark, FieldRule)]
    return " ".join([*spec["description"].split(), *rules])


def _title(section: dict[str, Any]) -> tuple[str, str]:
    """Return the header of a table and its meaning: the docstring of a section class begins with the header."""
    header, _, meaning = " ".join(section["description"].split()).partition(": ")
    return header, meaning


def _values(spec: dict[str, Any]) -> str:
    """Return the type, choices and range of a key or of the entries of an array, from its schema."""
    if "enum" in spec:
        return " | ".join(spec["enum"])
    if "anyOf" in spec:
        return " or ".join(_values(option) for option in spec["anyOf"] if option.get("type") != "null")
    if "prefixItems" in spec:
        return f"[{', '.join(map(_values, spec['prefixItems']))}]"
    if spec["type"] == "array":
        return f"[{_values(spec['items'])}, ...]"
    bounds = [(sign, spec[name]) for name, sign in _BOUNDS.items() if name in spec]
    limits = [f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}" for sign, value in bounds]
    return f"{'true or false' if spec['type'] == 'boolean' else spec['type']} {' and '.join(limits)}".rstrip()
