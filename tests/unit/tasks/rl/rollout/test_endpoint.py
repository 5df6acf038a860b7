"""The endpoint by OpenAI's API: answers, streams, refusals, and requests that are asked again."""

import asyncio
import json

import pytest

from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.records import Completion, Request, VersionSpan
from glm46.tasks.rl.rollout.session import Session

TOKENIZER = load_tokenizer("builtin")
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CALL = "\nadding<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"


class Served:
    """An endpoint with one episode, and what its program sends."""

    def __init__(self, turns: list[list[int]]):
        self.turns, self.generated, self.said = turns, [], []
        self.endpoint = PolicyEndpoint(lambda: None, self.said.append)

    def ask(self, asked) -> None:
        for one in asked:
            self.generated.append(one.request)
            tokens = self.turns.pop(0)
            one.done(Completion(tokens, [-1.0] * len(tokens), "stop", [VersionSpan(0, 0)], None))

    async def __aenter__(self) -> "Served":
        self._server = await self.endpoint.start()
        prompt = chat_prompt(TOKENIZER, [Message("user", "Hello")], thinking=False)
        session = Session(TOKENIZER, Request(prompt, 3, 2000), thinking=False, most_turns=4)
        self.episode = self.endpoint.open(session, 4, self)
        self.url = self.endpoint.base_url(self.episode)
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()

    async def send(self, table: object, what: str = "chat/completions", method: str = "POST", key: str = "", **headers):
        """Status and body of the response."""
        address, _, path = self.url.removeprefix("http://").partition("/")
        reader, writer = await asyncio.open_connection(*address.split(":"))
        body = table if isinstance(table, bytes) else json.dumps(table).encode()
        headers = {"Authorization": f"Bearer {key or self.episode.key}", "Content-Length": str(len(body)), **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        writer.write(f"{method} /{path}/{what} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), content.decode()


def tokens_of(text: str) -> list[int]:
    parts = [part for part in text.replace("<", "\0<").replace(">", ">\0").split("\0") if part]
    ids = [
        [TOKENIZER.special[part]] if part in TOKENIZER.special else TOKENIZER.encode(part).tolist() for part in parts
    ]
    return [*sum(ids, []), TOKENIZER.special["<|observation|>" if "call" in text else "<|user|>"]]


def test_an_answer_has_text_calls_and_usage_and_is_given_again():
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}}}}
    ]

    async def run():
        async with Served([tokens_of(CALL)]) as of:
            first = await of.send(HELLO | {"tools": tools, "temperature": 0.2})
            return first, await of.send(HELLO | {"tools": tools, "temperature": 0.2}), of

    (status, content), again, of = asyncio.run(run())
    table = json.loads(content)
    (choice,) = table["choices"]
    assert status == 200 and choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "adding"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"n": 5}'} and call["id"] == "call_0_0"
    assert table["usage"]["completion_tokens"] == len(tokens_of(CALL))
    assert json.loads(again[1])["choices"] == table["choices"] and len(of.generated) == 1, "nothing is generated twice"
    assert len(of.said) == 1 and "temperature" in of.said[0]


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
        (404, "there are", HELLO, {"what": "completions"}),
        (411, "Content-Length", HELLO, {"Transfer_Encoding": "chunked"}),
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


def test_an_ended_episode_answers_409_and_models_are_listed():
    async def run():
        async with Served([]) as of:
            listed = await of.send(b"", "models", "GET")
            of.episode.fail("it had to")
            return listed, await of.send(HELLO)

    (status, content), (after, _) = asyncio.run(run())
    assert status == 200 and json.loads(content)["data"][0]["id"] == "policy" and after == 409
