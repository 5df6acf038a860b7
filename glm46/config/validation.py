"""Build a `RunConfig` from a table, and translate pydantic's errors to faults in the terms of a TOML file."""

import re
import typing
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from glm46.config.faults import Fault, nearest, show, show_type
from glm46.config.overrides import dotted
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.config.section import Schedule, Section
from glm46.config.text_recipe import TextRecipe

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "an array",
    "model_type": "a table",
}
# Keys that are too common to suggest the section of another key of this name.
_EVERYDAY_NAMES = {"name", "enable", "folder", "mode", "steps"}
_POINTS = typing.get_args(typing.get_args(Schedule)[0])[1]
_NUMBER = re.compile(r"[+-]?\d[\d_]*(\.\d+)?([eE][+-]?\d+)?")
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def validate_table(table: dict) -> tuple[RunConfig | None, list[Fault]]:
    """Build the config of a TOML table.

    Returns:
        The config and no fault; or every fault and the config without the faulty keys, so that rules across sections
        can still be checked on the other keys. None if no config remains.
    """
    faults: list[Fault] = []
    remaining = without_lists(table)
    # Each round removes at least one key. Removing a required key makes its section faulty, which the next round
    # removes.
    while True:
        try:
            return RunConfig.model_validate(remaining), faults
        except ValidationError as error:
            found = _translate(error, RunConfig)
        if not faults:
            faults = [fault for fault, _ in found]
        for _, place in found:
            _take_out(remaining, place)
        if "model" not in remaining:
            remaining["model"] = {"flavor": next(iter(PRESETS))}


def translate(error: ValidationError, root: type[Section]) -> list[Fault]:
    """The faults that pydantic found in a table of the class `root`."""
    return [fault for fault, _ in _translate(error, root)]


def section_of(field: FieldInfo | None) -> type[Section] | None:
    """The section class that a field holds, directly, as an optional or as an array; None for a plain value."""
    return None if field is None else _section_in(field.annotation)


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def holds_schedule(field: FieldInfo) -> bool:
    """True if a field takes a schedule, that is a number or points."""
    return _mentions(field.annotation, _POINTS)


def _mentions(annotation: Any, wanted: Any) -> bool:
    return annotation == wanted or any(_mentions(inner, wanted) for inner in typing.get_args(annotation))


def without_lists(value: Any) -> Any:
    """A copy with tuples for lists: strict mode takes no list for a tuple, and faulty keys are removed from the
    copy."""
    if isinstance(value, dict):
        return {key: without_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(without_lists(item) for item in value)
    return value


def _translate(error: ValidationError, root: type[Section]) -> list[tuple[Fault, tuple[str | int, ...]]]:
    """One fault per faulty key with the place to remove; the branches of a union are one fault."""
    by_place: dict[tuple[str | int, ...], list[dict]] = {}
    details = {}
    for item in error.errors(include_url=False):
        place, section, field = _locate(item["loc"], root)
        by_place.setdefault(place, []).append(item)
        details[place] = (section, field)
    return [(_describe(place, *details[place], items), _removable(place, items)) for place, items in by_place.items()]


def _locate(loc: tuple, root: type[Section]) -> tuple[tuple[str | int, ...], type[Section], FieldInfo | None]:
    """Cut a location after its key: the parts behind it are pydantic's own labels."""
    section: type[Section] | None = root
    parent, field = root, None
    for depth, part in enumerate(loc):
        if section is None:
            return loc[:depth], parent, field
        if isinstance(part, int):
            continue
        parent, field = section, section.model_fields.get(part)
        section = section_of(field)
    return tuple(loc), parent, field


def _removable(place: tuple, items: list[dict]) -> tuple:
    # A missing key cannot be removed, so its section is.
    return place[:-1] if items[0]["type"] == "missing" else place


def _take_out(table: dict, place: tuple) -> None:
    # Arrays are tuples here: an array with a faulty entry is removed as a whole.
    cut = next((depth for depth, part in enumerate(place) if isinstance(part, int)), len(place))
    for part in place[: cut - 1]:
        table = table.get(part, {})
    if cut:
        table.pop(place[cut - 1], None)


def _describe(place: tuple, section: type[Section], field: FieldInfo | None, items: list[dict]) -> Fault:
    key, item = dotted(place), items[0]
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        meant, hint = _meant(place, section)
        return Fault((key,), f"{key}: unknown key; {hint}", doubtful=(meant,))
    if kind == "missing":
        if place == ("model",):
            key, place = "model.flavor", ("model", "flavor")
        return Fault((key,), f"{key}: required, but absent{_meaning(place[-1], field)}")
    if field is not None and holds_schedule(field):
        return Fault((key,), _describe_schedule(key, items))
    if kind in _EXPECTED:
        rule = f"expected {_EXPECTED[kind]}, got {show_type(value)}{_conversion(kind, value)}"
    elif kind == "finite_number":
        rule = f"must be a finite number{_meaning(place[-1], field)}"
    elif kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        rule = f"{words} {context[name]:g}{_meaning(place[-1], field)}"
    elif kind == "literal_error":
        rule = f"expected one of {context['expected'].replace(' or ', ', ')}{_close(value, field)}"
    elif kind == "string_pattern_mismatch":
        rule = f"must match {context['pattern']}{_meaning(place[-1], field)}"
    else:
        rule = item["msg"].removeprefix("Value error, ")
    return Fault((key,), f"{key} = {show(value)}: {rule}")


def _describe_schedule(key: str, items: list[dict]) -> str:
    """The message for a schedule: about the number or about the points, whichever the value resembles."""
    number = next((item for item in items if item["loc"][-1] == "float"), None)
    value = items[0]["input"] if number is None else number["input"]
    if items[0]["type"] == "value_error":
        return f"{key} = {show(value)}: {items[0]['msg'].removeprefix('Value error, ')}"
    if isinstance(value, tuple):
        inner = next((item for item in items if item is not number), items[0])
        where = dotted(tuple(part for part in inner["loc"] if isinstance(part, int)))
        what = _EXPECTED.get(inner["type"], "a finite number")
        if inner["type"] in ("missing", "too_long"):
            return f"{key}{where}: expected a point [tokens, value] of two numbers"
        hint = _conversion(inner["type"], inner["input"])
        return f"{key}{where} = {show(inner['input'])}: expected {what}{hint}; a point is [tokens, value]"
    hint = _conversion("float_type", value)
    return f"{key} = {show(value)}: expected a number or points [[tokens, value], ...], got {show_type(value)}{hint}"


def _conversion(kind: str, value: Any) -> str:
    """A hint how to write the value that was probably meant; empty if unknown."""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value):_}"
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return f'; write "{show(value)}" with quotes'
    if isinstance(value, str):
        text = value.strip()
        if kind == "bool_type" and text.lower() in ("true", "false"):
            return f"; write {text.lower()} without quotes, in lower case"
        if kind in ("int_type", "float_type") and _NUMBER.fullmatch(text):
            return f"; write {text} without quotes"
    return ""


def _meant(place: tuple, section: type[Section]) -> tuple[str, str]:
    """The key that an unknown key probably stands for, or its whole section, and the hint for the message."""
    wanted = str(place[-1])
    # A recipe has no other sections.
    fields = RunConfig.model_fields.items() if section is not TextRecipe else ()
    elsewhere = [name for name, field in fields if wanted in section_of(field).model_fields]
    if elsewhere and wanted not in _EVERYDAY_NAMES:
        meant = f"{elsewhere[0]}.{wanted}"
        return meant, f"did you mean '{meant}'?"
    near = nearest(wanted, section.model_fields, 0.7)
    if near:
        return dotted((*place[:-1], near)), f"did you mean '{near}'?"
    kind = "sections" if section is RunConfig else "keys"
    return dotted(place[:-1]) or wanted, f"valid {kind} are {', '.join(section.model_fields)}"


def _meaning(name: str, field: FieldInfo | None) -> str:
    """The first sentence of a key's documentation, in parentheses."""
    if name == "flavor":
        return f"; one of {', '.join(PRESETS)}"
    text = (field.description or "") if field else ""
    sentence = " ".join(text.replace("``", "'").split()).split(". ")[0].rstrip(".")
    return f" ({sentence})" if sentence else ""


def _close(value: Any, field: FieldInfo | None) -> str:
    near = nearest(str(value), choices_in(field.annotation) if field else (), 0.6)
    return f"; did you mean '{near}'?" if near else ""


def choices_in(annotation: Any) -> list[str]:
    """The values that a type allows, if it lists them."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for inner in typing.get_args(annotation) for choice in choices_in(inner)]
