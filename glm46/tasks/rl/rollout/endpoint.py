"""Serves the policy to the programs of episodes by OpenAI's chat API, and records their requests in sessions."""

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from glm46.tasks.rl.rollout.chat_api import RefusedRequest, completion_response, parsed
from glm46.tasks.rl.rollout.http_requests import Client, bearer_key, body_length, body_parts, response
from glm46.tasks.rl.rollout.open_requests import OpenRequest, Requests
from glm46.tasks.rl.rollout.records import Completion
from glm46.tasks.rl.rollout.session import NoRoom, Session, Turn

_LOOPBACK = "127.0.0.1"
_MOST_BYTES = 2**23
_MOST_DISCARDED = 2**30
"""Maximum bytes of a request body, and of a body that is read only to be refused."""
_READ_SECONDS = 60.0
_MOST_READING = 1024
"""Maximum connections whose request is not read yet; a new one closes the oldest."""
_REQUESTS_PER_TURN = 20
_MORE_REQUESTS = 100
"""Request limit of an episode: `_REQUESTS_PER_TURN` per turn and `_MORE_REQUESTS`. A program above it is ended."""
_MAX_SAID = 50
_MAX_NAME = 60
"""Maximum number of keys without effect that the log names, and characters of each."""
_PATHS = (("POST", "chat/completions"), ("GET", "models"))


@dataclass(eq=False)
class _Waiting:
    """A turn that is being generated."""

    access: "PolicyAccess"
    asked: OpenRequest
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    clients: int = 0
    """Number of connections that wait for it."""


@dataclass(eq=False)
class PolicyAccess:
    """Access of a running program to the policy: its session, its address and key, and why it ended."""

    endpoint: "PolicyEndpoint"
    name: str
    key: str
    """Bearer key of its requests."""
    session: Session
    engine: Requests
    """Generates its turns."""
    most_requests: int
    is_open: bool = True
    no_room: str = ""
    """Why the first refused request had no room; cleared when the program gets the answer of a later turn."""
    turns_before_refusal: int = 0
    requests: int = 0
    fault: str = ""
    has_failed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for clients of OpenAI's API."""
        return {"OPENAI_BASE_URL": self.endpoint.base_url(self), "OPENAI_API_KEY": self.key}

    def fail(self, fault: str) -> None:
        """End the episode; the first reason is kept."""
        self.fault = self.fault or fault
        self.is_open = False
        self.has_failed.set()


class PolicyEndpoint:
    """The HTTP server for one event loop.

    Args:
        say: takes a line for the log, at most one for each request key without effect.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._said = set[str]()
        self._by_name: dict[str, PolicyAccess] = {}
        self._reading: dict[asyncio.StreamWriter, None] = {}
        self._waiting: dict[Turn, _Waiting] = {}
        self._address = ""
        self.port = 0

    async def start(self) -> asyncio.Server:
        """Listen on a free port of the loopback interface."""
        server = await asyncio.start_server(self._serve, _LOOPBACK, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._address = f"http://{_LOOPBACK}:{self.port}"
        return server

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve a sandbox that has its own network, on a socket that listens inside it, until this is cancelled."""
        server = await asyncio.start_server(self._serve, sock=listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    def open(self, session: Session, most_turns: int, engine: Requests) -> PolicyAccess:
        """Begin an episode."""
        max_requests = _REQUESTS_PER_TURN * most_turns + _MORE_REQUESTS
        access = PolicyAccess(self, secrets.token_hex(8), secrets.token_urlsafe(24), session, engine, max_requests)
        self._by_name[access.name] = access
        return access

    def close(self, access: PolicyAccess) -> None:
        """End and forget an episode; its pending turns are not recorded."""
        access.is_open = False
        self._by_name.pop(access.name, None)
        for turn in [turn for turn, waiting in self._waiting.items() if waiting.access is access]:
            waiting = self._waiting.pop(turn)
            access.engine.drop(waiting.asked)
            waiting.answered.set()

    def base_url(self, access: PolicyAccess) -> str:
        """Return the base URL for clients of OpenAI's API."""
        return f"{self._address}/s/{access.name}/v1"

    def _give(self, turn: Turn, completion: Completion) -> None:
        """Record the completion of a turn, and wake its clients."""
        if (waiting := self._waiting.pop(turn, None)) is None:  # its episode has ended
            return
        try:
            if completion.finish == "abort":
                waiting.access.fail("its server did not finish it (rollout.deadline_seconds)")
            else:
                waiting.access.session.end(turn, completion)
        except Exception as error:
            waiting.access.fail(f"its turn cannot be recorded: {type(error).__name__}: {error}")
            raise  # asyncio logs it and keeps running
        finally:
            waiting.answered.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reading[writer] = None
        if len(self._reading) > _MOST_READING:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.close()
        client = Client(reader, writer)
        try:
            request = await asyncio.wait_for(self._read(reader, writer), _READ_SECONDS)
            self._reading.pop(writer, None)
            content = await self._answer(*request, client)
        except RefusedRequest as error:
            kind = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
            text = json.dumps({"error": kind})
            is_late = client.is_streaming
            content = f"data: {text}\n\n".encode() if is_late else response(error.status, text)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            content = b""  # not an HTTP request, not received in time, or the program is gone
        finally:
            self._reading.pop(writer, None)
        with suppress(OSError):
            writer.write(content)
            await writer.drain()
        writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[PolicyAccess, str, bytes]:
        """Read a request and check its key; return the episode, the requested resource and the body."""
        request_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = request_line.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if (coding := headers.get("transfer-encoding", "chunked").lower()) != "chunked":
            raise RefusedRequest(411, f"Transfer-Encoding: {coding}: not known; send the body whole, or in chunks")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = bytearray()
        size = 0
        _, _, rest = path.partition("/s/")
        name, _, resource = rest.partition("?")[0].partition("/v1/")
        access = self._by_name.get(name)
        target: PolicyAccess | RefusedRequest
        if access is None:
            target = RefusedRequest(404, f"{path}: no such path; take OPENAI_BASE_URL")
        elif not secrets.compare_digest(bearer_key(headers).encode(), access.key.encode()):
            target = RefusedRequest(401, "not the key of this episode; take OPENAI_API_KEY")
        elif (method, resource) not in _PATHS:
            target = RefusedRequest(404, f"{method} {path}: there are {', '.join(map(' '.join, _PATHS))}")
        else:
            target = access
        target = _fitting(target, body_length(headers))  # before reading, which may exceed the time limit
        async for part in body_parts(reader, headers):  # to its end: a client that writes does not read
            size += len(part)
            target = _fitting(target, size)
            if isinstance(target, PolicyAccess):
                content += part
            elif size > _MOST_DISCARDED:
                break
        if isinstance(target, RefusedRequest):
            raise target
        return target, resource, bytes(content)

    async def _answer(self, access: PolicyAccess, resource: str, body: bytes, client: Client) -> bytes:
        """Return the response to a request; for a stream, whose head is already sent, its events."""
        access.requests += 1
        if access.requests > access.most_requests:
            access.fail(f"it sent more than {access.most_requests} requests")
        if not access.is_open:
            raise RefusedRequest(409, f"this episode has ended: {access.fault or 'its program has'}", "session_closed")
        session = access.session
        if resource == "models":
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "glm46"}
            return response(200, json.dumps({"object": "list", "data": [model | {"max_model_len": session.window}]}))
        request = parsed(body)
        self._say_silent(request.silent)
        try:
            turn = session.begin(request.messages, request.tools, request.max_tokens)
        except NoRoom as error:
            access.turns_before_refusal = len(session.turns)
            access.no_room = access.no_room or str(error)
            raise RefusedRequest(400, f"prompt is too long: {error}", "context_length_exceeded") from error
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(400, f"the messages cannot be written in the chat format: {error}") from error
        if request.table.get("stream"):
            client.begin_stream()
        await self._answered(access, turn, client)
        number = session.turns.index(turn)
        if number >= access.turns_before_refusal:
            access.no_room = ""  # the program has made room, and continues
        text, kind = completion_response(request.table, turn, f"chatcmpl-{access.name}-{number}")
        return text.encode() if client.is_streaming else response(200, text, kind)

    async def _answered(self, access: PolicyAccess, turn: Turn, client: Client) -> None:
        """Wait for the answer of a turn and deliver it.

        Raises:
            RefusedRequest: the episode has ended.
            ConnectionResetError: the client is gone. The turn is still generated, because the client may repeat the
                request.
        """
        session = access.session
        if not turn.is_answered:
            if turn not in self._waiting:
                call_soon = asyncio.get_running_loop().call_soon_threadsafe
                open_request = OpenRequest(
                    session.request(turn), lambda completion: call_soon(self._give, turn, completion)
                )
                self._waiting[turn] = _Waiting(access, open_request)
                access.engine.ask([open_request])
            waiting = self._waiting[turn]
            waiting.clients += 1
            try:
                await client.wait(waiting.answered)
            except ConnectionResetError:
                waiting.clients -= 1
                if not waiting.clients:
                    session.withdraw(turn)
                raise
        if not turn.is_answered:
            raise RefusedRequest(409 if not access.fault else 503, f"this episode has ended: {access.fault}")
        if client.is_gone:
            raise ConnectionResetError("the program has closed the connection")
        session.deliver(turn)

    def _say_silent(self, names: Sequence[str]) -> None:
        """Log request keys without effect, each once."""
        for name in names:
            if name not in self._said and len(self._said) < _MAX_SAID:
                self._said.add(name)
                shown = name if name.isidentifier() else repr(name)
                self._say(
                    f"rl.environment: requests state {shown:.{_MAX_NAME}}, which has no effect: turns are sampled as "
                    "[rollout] and [rl.prompts] say"
                )


def _fitting(target: PolicyAccess | RefusedRequest, size: int) -> PolicyAccess | RefusedRequest:
    """Return the target of a body of this many bytes; if it is too large, end the episode and return a refusal."""
    if isinstance(target, RefusedRequest) or size <= _MOST_BYTES:
        return target
    target.fail(f"it sent a request of {size:,} bytes, and {_MOST_BYTES:,} are the most")
    return RefusedRequest(413, target.fault)
