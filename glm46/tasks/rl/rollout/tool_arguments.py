"""Converts arguments of tool calls from text, as the policy writes them, to the types in a tool's JSON Schema."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from glm46.storage.chats.conversation import ToolCall

_MAX_DEPTH = 32
"""Maximum depth of nested schemas and references that are followed."""
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def typed_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Convert the arguments of a call to the types that its tool describes. An argument that cannot be converted, or
    whose type is not described, stays a text."""
    parameters = _parameters(call.name, tools)
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return call
    arguments = {
        name: _typed(value, properties.get(name), parameters) if isinstance(value, str) else value
        for name, value in call.arguments.items()
    }
    return ToolCall(call.name, arguments)


def calls_key(calls: Sequence[ToolCall]) -> str:
    """Return the calls of a turn as JSON that is the same for equal values, whatever the order of keys and the form of
    numbers (105.0 and 105). Empty without calls."""
    if not calls:
        return ""
    return json.dumps([[call.name, _plain(call.arguments)] for call in calls], sort_keys=True)


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the schema of the arguments of a tool; empty if it has no schema."""
    for tool in tools:
        function = tool.get("function") or tool
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def _typed(text: str, schema: object, root: Mapping[str, Any]) -> object:
    """Return the value of a text in the type of a schema, or the text itself."""
    types = _allowed_types(schema, _References(root), 0)
    if types is None:
        return text
    try:
        value = _json_value(text)
        calls_key([ToolCall("", {"": value})])  # too deep a value cannot be compared either
    except (ValueError, RecursionError):
        return text
    # A text may look like another value. Only null has one meaning where both are allowed.
    if "string" in types and not (value is None and "null" in types):
        return text
    return value


def _json_value(text: str) -> object:
    """Parse JSON text. Raises ValueError for NaN and infinite numbers, which JSON does not have."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


class _References:
    """Types of referenced schemas, each computed once: a schema may refer to itself, even several times."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._types: dict[str, frozenset[str] | None] = {}

    def types(self, reference: str, depth: int) -> frozenset[str] | None:
        """Return the JSON types of a reference; None if they are not described, or while they are being computed."""
        if reference not in self._types:
            self._types[reference] = None
            self._types[reference] = _allowed_types(_referenced(reference, self._root), self, depth)
        return self._types[reference]


def _allowed_types(schema: object, references: _References, depth: int) -> frozenset[str] | None:
    """Return the JSON types that a schema allows; None if it does not describe them."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    rules: list[frozenset[str] | None] = [_stated_types(schema)]
    choices = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    rules += [_union([_allowed_types(branch, references, depth + 1) for branch in branches]) for branches in choices]
    if isinstance(schema.get("allOf"), list):
        rules += [_allowed_types(part, references, depth + 1) for part in schema["allOf"]]
    if isinstance(schema.get("$ref"), str):
        rules.append(references.types(schema["$ref"], depth + 1))
    constraints = [types for types in rules if types is not None]
    return frozenset.intersection(*constraints) if constraints else None


def _stated_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema itself names, by ``type`` or by the values of ``enum`` or ``const``."""
    if "type" in schema:
        declared = schema["type"]
        names = declared if isinstance(declared, list) else [declared]
        types = frozenset(name for name in names if isinstance(name, str) and name in _TYPES)
        return types | {"null"} if types and schema.get("nullable") is True else types or None
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"])) or None
    return frozenset({_type_of(schema["const"])}) if "const" in schema else None


def _union(branches: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the union of the types of all branches; None if a branch does not describe them."""
    described = [types for types in branches if types is not None]
    return frozenset[str]().union(*described) if described and len(described) == len(branches) else None


def _type_of(value: object) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _referenced(reference: str, root: Mapping[str, Any]) -> object:
    """Return the schema that a reference inside a tool's description names; None if there is no such schema."""
    address, _, pointer = reference.partition("#")
    if address or not (pointer == "" or pointer.startswith("/")):
        return None
    schema: object = root
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _plain(value: object) -> object:
    """Convert whole floats in a JSON value to integers, as JavaScript clients write them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value
