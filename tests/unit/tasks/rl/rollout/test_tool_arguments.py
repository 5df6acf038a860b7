"""Arguments of tool calls in the types that a tool describes, by pydantic's own schemas where it writes them."""

import json
from typing import Literal, Optional

import pytest
from pydantic import BaseModel

from glm46.storage.chats.conversation import ToolCall
from glm46.tasks.rl.rollout.tool_arguments import calls_key, typed_call


class Point(BaseModel):
    x: int


class Arguments(BaseModel):
    count: Optional[int] = None  # noqa: UP045
    word: Optional[str] = None  # noqa: UP045
    either: int | str = 0
    level: Literal[1, 5] = 1
    point: Point = Point(x=1)
    points: list[Point] | None = None
    ratio: float = 0.0


def typed(name: str, text: str, parameters: dict) -> object:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return typed_call(ToolCall("f", {name: text}), tools).arguments[name]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "5", 5),
        ("count", "null", None),
        ("count", "five", "five"),
        ("word", "5", "5"),
        ("word", "null", None),
        ("either", "5", "5"),
        ("level", "5", 5),
        ("point", '{"x": 2}', {"x": 2}),
        ("points", '[{"x": 2}]', [{"x": 2}]),
        ("ratio", "1e2", 100.0),
    ],
)
def test_texts_become_the_values_that_pydantic_accepts(name, text, value):
    found = typed(name, text, Arguments.model_json_schema())
    assert found == value and type(found) is type(value)
    if value != "five":
        Arguments.model_validate({name: found}, strict=True)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '["a"]', ["a"]),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}, {"minimum": 1}]}, "5", 5),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "5", 5),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"const": 5}, "5", 5),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"enum": [True]}, "true", True),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": "string"}, "5", "5"),
        ({}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {}]}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "https://example.org/a"}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"type": {"a": 1}, "enum": 3}, "5", "5"),
        (True, "5", "5"),
    ],
)
def test_other_words_of_json_schema(schema, text, value):
    definitions = {"a/b": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    found = typed("n", text, {"properties": {"n": schema}, "$defs": definitions})
    assert found == value and type(found) is type(value)


def test_schemas_that_refer_to_each_other_many_times_are_read_once():
    definitions = {f"level{number}": {"anyOf": [{"$ref": f"#/$defs/level{number + 1}"}] * 9} for number in range(14)}
    definitions["level14"] = {"type": "integer"}
    definitions["loop"] = {"anyOf": [{"$ref": "#/$defs/loop"}] * 9}
    schema = {"properties": {"n": {"$ref": "#/$defs/level0"}, "m": {"$ref": "#/$defs/loop"}}, "$defs": definitions}
    assert typed("n", "5", schema) == 5
    assert typed("m", "5", schema) == "5"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_number_of_json_stays_a_text(text):
    assert typed("n", text, {"properties": {"n": {"type": "number"}}}) == text
    assert typed("n", f"[{text}]", {"properties": {"n": {"type": "array"}}}) == f"[{text}]"


def test_calls_are_equal_if_their_json_is():
    def key(text: str) -> str:
        return calls_key([ToolCall("f", json.loads(text))])

    assert key('{"n": 105.0, "a": [1e2, -0.0]}') == key('{"a": [100, 0], "n": 105}')
    assert key('{"n": 1}') != key('{"n": true}') and key('{"n": 1}') != key('{"n": "1"}')
    assert key('{"n": 9007199254740993}') != key('{"n": 9007199254740992}')
    assert calls_key([]) == ""
