"""Build a `RunConfig` from a table, and translate pydantic's errors to faults in terms of a TOML file."""

import copy
import re
import typing
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from glm46.config.faults import Fault, nearest, show
from glm46.config.overrides import dotted, key_parts, literal, take_out
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.config.section import Section
from glm46.config.text_recipe import TextRecipe

# Replacements for messages of pydantic that are about Python types.
_RULES = {"tuple_type": "must be an array", "model_type": "must be a table"}
# Keys that are too common to suggest the section of another key of this name.
_EVERYDAY_NAMES = {"name", "enable", "folder", "mode", "steps"}


def validate_table(table: dict[str, Any]) -> tuple[RunConfig, list[Fault]]:
    """Build the config of a TOML table.

    Returns:
        The config and no fault; or every fault and the config without the faulty keys, so that rules across sections
        can still be checked on the other keys.
    """
    faults: list[Fault] = []
    remaining = copy.deepcopy(table)
    # Each round removes at least one key. Removing a required key makes its section faulty, which the next round
    # removes.
    while True:
        try:
            return RunConfig.model_validate(remaining), faults
        except ValidationError as error:
            faults = faults or translate(error, RunConfig)
            errors = error.errors(include_url=False)
        for item in errors:
            # A missing key cannot be removed, so its section is.
            place = item["loc"][:-1] if item["type"] == "missing" else item["loc"]
            # An array with a faulty entry is removed as a whole, so that no other entry changes its number.
            table_path = tuple(takewhile(lambda part: isinstance(part, str), place))
            take_out(remaining, place if item["type"] == "extra_forbidden" else table_path)
        remaining.setdefault("model", {"flavor": next(iter(PRESETS))})


def translate(error: ValidationError, root: type[Section]) -> list[Fault]:
    """Return the faults that pydantic reports for a table of the class `root`."""
    errors = error.errors(include_url=False)
    # pydantic counts only entries that passed: an array of one wrong entry is not empty too.
    return [
        _describe(item, root)
        for item in errors
        if item["type"] != "too_short" or item["ctx"]["actual_length"] == len(item["input"])
    ]


def section_of(field: FieldInfo | None) -> type[Section] | None:
    """Return the section class of a field (direct, optional or in an array); None for a plain value."""
    return None if field is None else _section_in(field.annotation)


def _section_in(annotation: object) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _describe(item: ErrorDetails, root: type[Section]) -> Fault:
    place = item["loc"]
    kind = item["type"]
    value = item["input"]
    if kind == "missing" and place == ("model",):
        place = ("model", "flavor")
    section = root
    field = None
    for name in (part for part in place if isinstance(part, str)):
        section = section_of(field) or root
        field = section.model_fields.get(name)
    key = dotted(place)
    if kind == "extra_forbidden":
        if reason := section.refused.get(str(place[-1])):
            return Fault((key,), f"{key}: unknown key; {reason}")
        if removed := section.removed.get(str(place[-1])):
            return Fault((key,), f"{key}: was removed; {removed.instead}")
        if moved := section.moved.get(str(place[-1])):
            new_key = dotted((*place[:-1], *key_parts(moved)))
            # Rules would report the default in the new place.
            return Fault((key,), f"{key}: was moved; write it as {new_key}", doubtful=(new_key,))
        intended, hint = _meant(place, section)
        return Fault((key,), f"{key}: unknown key; {hint}", doubtful=(intended,))
    if kind == "missing":
        return Fault((key,), f"{key}: required, but absent{_meaning(place[-1], field)}")
    rule = _RULES.get(kind) or re.sub(r"^\w+ should ", "must ", item["msg"].removeprefix("Value error, "))
    hint = _tables(kind, key, section_of(field)) or _conversion(kind, value) or _meaning(place[-1], field)
    if kind == "literal_error":
        near = nearest(value, re.findall("'(.*?)'", item["ctx"]["expected"]), 0.7) if isinstance(value, str) else None
        hint = f"; did you mean '{near}'?" if near else hint
    return Fault((key,), f"{key} = {show(value)}: {rule}{hint if kind != 'value_error' else ''}")


def _conversion(kind: str, value: object) -> str:
    """Return a hint how to write the value that was probably meant; empty if unknown."""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value):_}"
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return f'; write "{show(value)}" with quotes'
    if kind == "tuple_type" and isinstance(value, (str, int, float)):
        return f"; write {show([value])}"
    parsed = literal(value.strip().lower()) if isinstance(value, str) else None
    if kind in ("int_type", "float_type", "bool_type") and isinstance(parsed, (int, float)):
        return f"; write {show(parsed)} without quotes" if isinstance(parsed, bool) == (kind == "bool_type") else ""
    return ""


def _tables(kind: str, key: str, section: type[Section] | None) -> str:
    """Return a hint how to write an array of tables; empty for other keys."""
    if kind != "tuple_type" or section is None:
        return ""
    first = next(iter(section.model_fields))
    return f"; write a table [[{key}]] for each entry, or on the command line --{key} '[{{{first} = ...}}]'"


def _meant(place: tuple[str | int, ...], section: type[Section]) -> tuple[str, str]:
    """Return the key that an unknown key probably stands for, or its whole section, and the hint for the message."""
    unknown = str(place[-1])
    # A recipe has no other sections to suggest.
    is_rare = unknown not in _EVERYDAY_NAMES and section is not TextRecipe
    close = nearest(unknown, section.model_fields, 0.85) or next(
        (name for name in section.model_fields if name.endswith(f"_{unknown}")), None
    )
    if close:
        return dotted((*place[:-1], close)), f"did you mean '{close}'?"
    elsewhere = [
        f"{name}.{unknown}" for name, other in _sections(RunConfig) if unknown in other.model_fields and is_rare
    ]
    if elsewhere and elsewhere[0].count(".") == 1:
        return elsewhere[0], f"did you mean '{elsewhere[0]}'?"
    # TorchTitan and others repeat the name of the section: checkpoint.enable_checkpoint.
    short = re.sub(rf"^{place[-2]}_|_{place[-2]}$", "", unknown) if len(place) > 1 else unknown
    near = short if short in section.model_fields else nearest(unknown, section.model_fields, 0.7)
    if near:
        return dotted((*place[:-1], near)), f"did you mean '{near}'?"
    if elsewhere:
        return elsewhere[0], f"did you mean '{elsewhere[0]}'?"
    kind = "sections" if section is RunConfig else "keys"
    return dotted(place[:-1]) or unknown, f"valid {kind} are {', '.join(section.model_fields)}"


def _sections(root: type[Section], above: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the tables below a section with their dotted names, without arrays of tables; outer ones first."""
    sections = [
        (f"{above}{name}", section)
        for name, field in root.model_fields.items()
        if typing.get_origin(field.annotation) is not tuple and (section := section_of(field))
    ]
    yield from sections
    for name, section in sections:
        yield from _sections(section, f"{name}.")


def _meaning(name: int | str, field: FieldInfo | None) -> str:
    """Return the first sentence of a key's documentation, in parentheses."""
    if name == "flavor":
        return f"; one of {', '.join(PRESETS)}"
    text = (field.description or "") if field else ""
    sentence = " ".join(text.replace("``", "'").split()).split(". ")[0].rstrip(".")
    return f" ({sentence})" if sentence else ""
