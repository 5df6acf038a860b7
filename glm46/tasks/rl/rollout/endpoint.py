"""Serves the policy by OpenAI's chat API and Anthropic's messages API to the programs of episodes, and records what
they ask in their sessions."""

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from string import hexdigits
from typing import NamedTuple

from glm46.tasks.rl.rollout.chat_api import OVERRIDDEN, RefusedRequest, completion_response, parsed
from glm46.tasks.rl.rollout.messages_api import COUNT_TOKENS, message_response
from glm46.tasks.rl.rollout.open_requests import OpenRequest, Requests
from glm46.tasks.rl.rollout.records import Completion
from glm46.tasks.rl.rollout.session import NoRoom, Session, Turn

_LOOPBACK = "127.0.0.1"
_MOST_BYTES, _MOST_DISCARDED = 2**23, 2**30
"""Of the body of a request, and of one that is read only to be refused."""
_READ_SECONDS = 60.0
_MOST_READING = 1024
"""Connections whose request is not read yet; the oldest one is closed for another."""
_REQUESTS_PER_TURN, _MORE_REQUESTS = 20, 100
"""Of an episode: a program that asks more often is ended."""
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 409: "Conflict",
            411: "Length Required", 413: "Content Too Large", 503: "Service Unavailable"}  # fmt: skip
_PATHS = (("POST", "chat/completions"), ("POST", "messages"), ("POST", COUNT_TOKENS), ("GET", "models"))


class _Waiting(NamedTuple):
    """A turn that is generated."""

    episode: "Episode"
    asked: OpenRequest
    answered: asyncio.Event


@dataclass(eq=False)
class Episode:
    """A running program and its session."""

    name: str
    key: str
    """The secret that its requests bear."""
    session: Session
    engine: Requests
    """Answers its turns."""
    most_requests: int
    is_open: bool = True
    no_room: str = ""
    """Why a request found no room, the first one that did."""
    requests: int = 0
    fault: str = ""
    has_failed: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, fault: str) -> None:
        """End it; the first reason counts."""
        self.fault = self.fault or fault
        self.is_open = False
        self.has_failed.set()


class PolicyEndpoint:
    """The server, for one event loop.

    Args:
        say: takes a line for the log, at most once for each key that requests have without effect.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._said = say, set[str]()
        self._episodes: dict[str, Episode] = {}
        self._reading: dict[asyncio.StreamWriter, None] = {}
        self._waiting: dict[Turn, _Waiting] = {}
        self._address, self.port = "", 0

    async def start(self) -> asyncio.Server:
        """Listen on a free port of the loopback interface."""
        server = await asyncio.start_server(self._serve, _LOOPBACK, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._address = f"http://{_LOOPBACK}:{self.port}"
        return server

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve a sandbox with a network of its own, on a socket that listens there, until this is cancelled."""
        server = await asyncio.start_server(self._serve, sock=listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    def open(self, session: Session, most_turns: int, engine: Requests) -> Episode:
        """Begin an episode."""
        most = _REQUESTS_PER_TURN * most_turns + _MORE_REQUESTS
        episode = Episode(secrets.token_hex(8), secrets.token_urlsafe(24), session, engine, most)
        self._episodes[episode.name] = episode
        return episode

    def close(self, episode: Episode) -> None:
        """End and forget an episode: what it still waits for is not recorded."""
        episode.is_open = False
        self._episodes.pop(episode.name, None)
        for turn in [turn for turn, waiting in self._waiting.items() if waiting.episode is episode]:
            waiting = self._waiting.pop(turn)
            episode.engine.drop(waiting.asked)
            waiting.answered.set()

    def base_url(self, episode: Episode) -> str:
        """The address that a client of OpenAI's API takes as its base."""
        return f"{self._address}/s/{episode.name}/v1"

    def _give(self, turn: Turn, completion: Completion) -> None:
        """Answer the request of a turn."""
        if (waiting := self._waiting.pop(turn, None)) is None:  # its episode has ended
            return
        try:
            if completion.finish == "abort":
                waiting.episode.fail("its server did not finish it (rollout.deadline_seconds)")
            else:
                waiting.episode.session.end(turn, completion)
        except Exception as error:
            waiting.episode.fail(f"its turn cannot be recorded: {type(error).__name__}: {error}")
            raise  # asyncio logs it and keeps running
        finally:
            waiting.answered.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reading[writer] = None
        if len(self._reading) > _MOST_READING:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.close()
        try:
            request = await asyncio.wait_for(self._read(reader, writer), _READ_SECONDS)
            self._reading.pop(writer, None)
            content = await self._answer(*request)
        except RefusedRequest as error:
            kind = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
            content = _response(error.status, json.dumps({"type": "error", "error": kind}))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            content = b""  # no request of HTTP, or none within the time
        finally:
            self._reading.pop(writer, None)
        with suppress(OSError):
            writer.write(content)
            await writer.drain()
        writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Episode, str, bytes]:
        """The episode, what is asked for, and the body of a request, whose key is right."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if (coding := headers.get("transfer-encoding", "chunked").lower()) != "chunked":
            raise RefusedRequest(411, f"Transfer-Encoding: {coding}: not known; send the body whole, or in chunks")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content, size = bytearray(), 0
        _, _, rest = path.partition("/s/")
        name, _, what = rest.partition("?")[0].partition("/v1/")
        episode = self._episodes.get(name)
        found: Episode | RefusedRequest
        if episode is None:
            found = RefusedRequest(404, f"{path}: no such path; take OPENAI_BASE_URL")
        elif not any(secrets.compare_digest(one.encode(), episode.key.encode()) for one in _keys(headers)):
            found = RefusedRequest(401, "not the key of this episode; take OPENAI_API_KEY")
        elif (method, what) not in _PATHS:
            found = RefusedRequest(404, f"{method} {path}: there are {', '.join(map(' '.join, _PATHS))}")
        else:
            found = episode
        found = _fitting(found, _length(headers))  # it may not be read within the time
        async for part in _body(reader, headers):  # to its end: a client that writes does not read
            size += len(part)
            found = _fitting(found, size)
            if isinstance(found, Episode):
                content += part
            elif size > _MOST_DISCARDED:
                break
        if isinstance(found, RefusedRequest):
            raise found
        return found, what, bytes(content)

    async def _answer(self, episode: Episode, what: str, body: bytes) -> bytes:
        """The response to a request."""
        episode.requests += 1
        if episode.requests > episode.most_requests:
            episode.fail(f"it sent more than {episode.most_requests} requests")
        if not episode.is_open:
            raise RefusedRequest(409, f"this episode has ended: {episode.fault or 'its program has'}", "session_closed")
        if what == "models":
            return _response(200, json.dumps({"object": "list", "data": [{"id": "policy", "object": "model"}]}))
        table, messages, tools, most = parsed(body, is_message=what.startswith("messages"))
        for name in OVERRIDDEN:
            if table.get(name) is not None and name not in self._said:
                self._said.add(name)
                self._say(f"rl.environment: requests state {name}, which has no effect: sampling is that of [rollout]")
        session = episode.session
        try:
            if what == COUNT_TOKENS:
                return _response(200, json.dumps({"input_tokens": session.count(messages, tools)}))
            turn = session.begin(messages, tools, most)
        except NoRoom as error:
            episode.no_room = episode.no_room or str(error)
            raise RefusedRequest(400, f"prompt is too long: {error}", "context_length_exceeded") from error
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(400, f"the messages cannot be written in the chat format: {error}") from error
        if turn not in session.answered:
            if turn not in self._waiting:
                soon = asyncio.get_running_loop().call_soon_threadsafe
                asked = OpenRequest(session.request(turn), lambda found: soon(self._give, turn, found))
                self._waiting[turn] = _Waiting(episode, asked, asyncio.Event())
                episode.engine.ask([asked])
            await self._waiting[turn].answered.wait()
        if (answered := session.answered.get(turn)) is None:
            raise RefusedRequest(409 if not episode.fault else 503, f"this episode has ended: {episode.fault}")
        name = f"{episode.name}-{session.turns.index(turn)}"
        if what == "messages":
            return _response(200, *message_response(table, answered, name))
        return _response(200, *completion_response(table, answered, f"chatcmpl-{name}"))


def _fitting(found: Episode | RefusedRequest, size: int) -> Episode | RefusedRequest:
    """The episode of a body of so many bytes, or the refusal of one that is too large, which ends the episode."""
    if isinstance(found, RefusedRequest) or size <= _MOST_BYTES:
        return found
    found.fail(f"it sent a request of {size:,} bytes, and {_MOST_BYTES:,} are the most")
    return RefusedRequest(413, found.fault)


def _length(headers: Mapping[str, str]) -> int:
    return 0 if "transfer-encoding" in headers else _number(headers.get("content-length") or "0", 10)


def _number(digits: str, base: int) -> int:
    """A number of HTTP, which has no sign and no underscore, as `int` takes them. Raises ValueError."""
    if set(digits) - set(hexdigits):
        raise ValueError(digits)
    return int(digits, base)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The parts of a body, of a known length or in chunks. Raises EOFError or ValueError if it is not whole."""
    left, in_chunks = _length(headers), "transfer-encoding" in headers
    while left > 0 or in_chunks:
        if in_chunks:
            left = _number((await reader.readuntil(b"\r\n")).partition(b";")[0].decode("latin-1").strip(), 16)
        is_last = left == 0
        while left > 0:
            part = await reader.readexactly(min(left, 2**16))
            left -= len(part)
            yield part
        while in_chunks and await reader.readuntil(b"\r\n") != b"\r\n":
            if not is_last:  # fields follow the last one alone
                raise ValueError("no end of a chunk")
        in_chunks = in_chunks and not is_last


def _keys(headers: Mapping[str, str]) -> list[str]:
    """The keys that a request bears, as clients of both APIs send them."""
    return [headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key", "")]


def _response(status: int, text: str, kind: str = "application/json") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
