"""The endpoint by OpenAI's API: answers, streams, refusals, and requests that are asked again.

Arguments of tool calls in the types that a tool describes, by pydantic's own schemas where it writes them.
"""

import asyncio
import json
from ipaddress import ip_address
from typing import Literal, Optional

import pytest
from pydantic import BaseModel

from glm46.storage.chats.conversation import ToolCall
from glm46.tasks.rl.rollout.tool_arguments import calls_key, typed_call
from tests.processes import HANG_SECONDS
from tests.unit.tasks.rl.rollout.served_episode import Served, tokens_of

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CALL = "\nadding<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"


IN_CHUNKS = {"Transfer_Encoding": "chunked", "Content_Length": None}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}}}}


def in_chunks(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x;name=1\r\n%b\r\n" % (len(part), part) for part in (*parts, b"")).removesuffix(b"\r\n")


def test_an_answer_has_text_calls_and_usage_and_is_given_again():
    async def run():
        async with Served([tokens_of(CALL)]) as of:
            first = await of.send(HELLO | {"tools": [TOOL], "temperature": 0.2})
            return first, await of.send(HELLO | {"tools": [TOOL], "temperature": 0.2}), of

    (status, content), again, of = asyncio.run(run())
    table = json.loads(content)
    (choice,) = table["choices"]
    assert status == 200 and choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "adding"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"n": 5}'} and call["id"] == "call_0_0"
    assert table["usage"]["completion_tokens"] == len(tokens_of(CALL))
    assert json.loads(again[1])["choices"] == table["choices"] and len(of.generated) == 1, "nothing is generated twice"
    assert len(of.said) == 1 and "temperature" in of.said[0]


def test_an_argument_that_is_nested_too_deep_stays_a_text():
    nested = "[" * 100_000
    lists = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "array"}}}}}

    async def run():
        async with Served([tokens_of(CALL.replace("5", nested))]) as of:
            return await asyncio.wait_for(of.send(HELLO | {"tools": [lists]}), HANG_SECONDS)

    status, content = asyncio.run(run())
    (call,) = json.loads(content)["choices"][0]["message"]["tool_calls"]
    assert status == 200 and json.loads(call["function"]["arguments"]) == {"n": nested}


def test_a_turn_that_cannot_be_recorded_ends_its_episode():
    async def run():
        async with Served([tokens_of("\nHi")]) as of:
            of.episode.session.end = lambda turn, completion: 1 / 0
            return await asyncio.wait_for(of.send(HELLO), HANG_SECONDS), of.episode

    (status, content), episode = asyncio.run(run())
    assert status == 503 and "cannot be recorded: ZeroDivisionError" in content
    assert episode.has_failed.is_set() and "ZeroDivisionError" in episode.fault


def test_a_stream_holds_the_same_answer():
    async def run():
        async with Served([tokens_of("\nHi")]) as of:
            return await of.send(HELLO | {"stream": True, "stream_options": {"include_usage": True}})

    status, content = asyncio.run(run())
    events = content.strip().split("\n\n")
    assert status == 200 and events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"]["content"] == "Hi"
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["completion_tokens"] == len(tokens_of("\nHi"))


@pytest.mark.parametrize(
    ("status", "said", "table", "options"),
    [
        (400, "n: not possible", HELLO | {"n": 2}, {}),
        (400, "stop: not possible", HELLO | {"stop": ["x"]}, {}),
        (400, "response_format: not possible", HELLO | {"response_format": {"type": "json_object"}}, {}),
        (400, "max_tokens", HELLO | {"max_tokens": "5"}, {}),
        (400, "not JSON", b"{", {}),
        (400, "not an object", [], {}),
        (400, "no messages", {}, {}),
        (400, "unknown role", {"messages": [{"role": ["user"]}]}, {}),
        (400, "chat format", {"messages": [{"role": "user", "content": "\ud800"}]}, {}),
        (400, "context_length_exceeded", {"messages": [{"role": "user", "content": "much " * 2100}]}, {}),
        (401, "OPENAI_API_KEY", HELLO, {"key": "other"}),
        (400, "content is neither text", {"messages": [{"role": "user", "content": {"a": 1}}]}, {}),
        (400, "not JSON", b"[" * 100_000, {}),
        (404, "there are", HELLO, {"what": "completions"}),
        (400, "tool_choice: not possible", HELLO | {"tools": [TOOL], "tool_choice": "required"}, {}),
        (400, "max_tokens", HELLO | {"max_completion_tokens": 0}, {}),
        (400, "messages: not a list", {"messages": "hi"}, {}),
        (400, "tools: not a list", HELLO | {"tools": "[]"}, {}),
        (400, "NaN is no value of JSON", b'{"messages": [], "seed": NaN}', {}),
        (400, "structured_outputs: not possible", HELLO | {"structured_outputs": {"choice": ["a"]}}, {}),
        (400, "continue_final_message: not possible", HELLO | {"continue_final_message": True}, {}),
        (401, "OPENAI_API_KEY", HELLO, {"Authorization": "Basic x"}),
        (401, "OPENAI_API_KEY", HELLO, {"Authorization": None}),
        (411, "gzip: not known", HELLO, {"Transfer_Encoding": "gzip"}),
        (413, "8,388,609 bytes", in_chunks(b" " * (2**23 + 1), 2**20) + b"\r\n", IN_CHUNKS),
        (401, "OPENAI_API_KEY", in_chunks(b" " * 10, 5) + b"\r\n", {"Authorization": None, **IN_CHUNKS}),
        (413, "are the most", b" " * (2**23 + 1), {}),
    ],
)
def test_other_requests_are_refused(status, said, table, options):
    async def run():
        async with Served([]) as of:
            return await of.send(table, **options)

    found, content = asyncio.run(run())
    assert found == status and said in content
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_a_body_in_chunks_and_a_choice_of_no_tool_are_the_same_request():
    async def run():
        async with Served([tokens_of("\nHi")]) as of:
            (listener,) = of._server.sockets
            assert ip_address(listener.getsockname()[0]).is_loopback
            chunks = in_chunks(json.dumps(HELLO).encode(), 7)
            ends = [b"\r\n", b"X-Checked: yes\r\n\r\n"]
            sent = [await of.send(chunks + end, **IN_CHUNKS) for end in ends]
            no_tool = [{"tool_choice": "none"}, {"tool_choice": "none", "tools": []}]
            sent += [await of.send(HELLO | table) for table in no_tool]
            return sent, of

    answers, of = asyncio.run(run())
    assert [status for status, _ in answers] == [200] * 4 and len(of.generated) == 1
    assert all(json.loads(content)["choices"][0]["message"]["content"] == "Hi" for _, content in answers)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"5\r\nabc",
        b"-5\r\nabcde\r\n0\r\n\r\n",
        b"x\r\n",
        b"3\r\nabc\r\n",
        b"-1\r\n0\r\n\r\n",
        b"0_0\r\n\r\n",
        b"0x0\r\n\r\n",
    ],
)
def test_chunks_without_an_end_are_no_request(body):
    async def run():
        async with Served([tokens_of("\nHi")]) as of:
            with pytest.raises(IndexError):  # the connection is closed without a response
                await of.send(body, ends=True, **IN_CHUNKS)
            return await of.send(HELLO)

    assert asyncio.run(run())[0] == 200, "the endpoint goes on"


@pytest.mark.parametrize("length", ["-5", "0_2", "+0", "0x0", "f"])
def test_a_length_that_http_does_not_know_is_no_request(length):
    async def run():
        async with Served([]) as of:
            with pytest.raises(IndexError):  # the connection is closed without a response
                await of.send(b"", "models", "GET", Content_Length=length)
            return await of.send(b"", "models", "GET")

    assert asyncio.run(run())[0] == 200, "the endpoint goes on"


def test_an_episode_ends_when_its_program_states_too_long_a_body_not_when_it_is_read():
    async def run():
        async with Served([]) as of:
            address, _, path = of.url.removeprefix("http://").partition("/")
            _, writer = await asyncio.open_connection(*address.split(":"))
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {of.episode.key}\r\n"
            writer.write(f"{head}Content-Length: {2**23 + 1}\r\n\r\n".encode())
            await asyncio.wait_for(of.episode.has_failed.wait(), HANG_SECONDS)
            writer.close()
            return of.episode.fault

    assert "8,388,609 bytes" in asyncio.run(run())


def test_an_ended_episode_answers_409_and_models_are_listed():
    async def run():
        async with Served([]) as of:
            listed = await of.send(b"", "models", "GET")
            of.episode.fail("it had to")
            return listed, await of.send(HELLO)

    (status, content), (after, _) = asyncio.run(run())
    assert status == 200 and json.loads(content)["data"][0]["id"] == "policy" and after == 409


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
