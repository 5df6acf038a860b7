"""An endpoint with one episode of a scripted policy, for tests."""

import asyncio
import json

from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.records import Completion, Request
from glm46.tasks.rl.rollout.session import Session

TOKENIZER = load_tokenizer("builtin")


class Served:
    """An endpoint with one episode, and what its program sends."""

    def __init__(
        self, turns: list[list[int]], *, thinking: bool = False, keeps_thoughts: bool = False,
        tokenizer: Tokenizer = TOKENIZER, effort: str = "",
    ):  # fmt: skip
        self.tokenizer = tokenizer
        self.options = {"thinking": thinking, "keeps_thoughts": keeps_thoughts}
        self.effort = effort
        self.turns, self.generated, self.said = turns, [], []
        self.endpoint = PolicyEndpoint(self.said.append)

    def ask(self, asked) -> None:
        for one in asked:
            self.generated.append(one.request)
            tokens = self.turns.pop(0)
            one.done(Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens), None))

    async def __aenter__(self) -> "Served":
        self._server = await self.endpoint.start()
        prompt = chat_prompt(self.tokenizer, [Message("user", "Hello")], **self.options, effort=self.effort)
        session = Session(self.tokenizer, Request(prompt, 3, 2000), most_turns=4, **self.options)
        session.effort = self.effort
        self.episode = self.endpoint.open(session, 4, self)
        self.url = self.endpoint.base_url(self.episode)
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()

    async def send(
        self, table: object, what: str = "chat/completions", method: str = "POST", key: str = "", *, ends: bool = False,
        **headers,
    ):  # fmt: skip
        """Status and body of the response. Headers that are None are skipped."""
        address, _, path = self.url.removeprefix("http://").partition("/")
        reader, writer = await asyncio.open_connection(*address.split(":"))
        body = table if isinstance(table, bytes) else json.dumps(table).encode()
        headers = {"Authorization": f"Bearer {key or self.episode.key}", "Content_Length": str(len(body)), **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items() if value)
        writer.write(f"{method} /{path}/{what} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        if ends:
            writer.write_eof()
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), content.decode()


def tokens_of(text: str) -> list[int]:
    parts = [part for part in text.replace("<", "\0<").replace(">", ">\0").split("\0") if part]
    ids = [
        [TOKENIZER.special[part]] if part in TOKENIZER.special else TOKENIZER.encode(part).tolist() for part in parts
    ]
    return [*sum(ids, []), TOKENIZER.special["<|observation|>" if "call" in text else "<|user|>"]]
