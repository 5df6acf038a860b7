"""Episodes of a program of the user's: any that speaks OpenAI's chat API runs once for each sample, against the policy.

The endpoint is a thread of rank 0. Servers get each request as it arrives, also while the ranks train. The engine of
the ranks generates in rounds, while these wait for the programs.
"""

import asyncio
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.episode_checks import TASK_NAME, kept_failure, task_of
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.function_pool import found_program
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.first_rank import run_on_first_rank
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests, Requests
from glm46.tasks.rl.rollout.programs import Programs
from glm46.tasks.rl.rollout.records import (
    Engine,
    EpisodeEnd,
    Request,
    SamplingRules,
    SessionSample,
    pack_groups,
    unpack_groups,
)
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.rollout.session import Session

_PATIENCE_SECONDS = 0.25
"""A round begins when all programs wait for tokens, or none has come to wait for so long."""
_TICK_SECONDS = 0.5
_SEED_OF_TRY = 0x9E3779B97F4A7C15
"""Added to the seed for another try, in which the policy says other things."""
_STOPPED = b"stopped"


class _Round:
    """See `Requests`: those that wait for the next round."""

    def __init__(self) -> None:
        self.waiting: list[OpenRequest] = []

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        self.waiting += asked

    def drop(self, asked: OpenRequest) -> None:
        with suppress(ValueError):  # it is generated already
            self.waiting.remove(asked)


class CommandEpisodes:
    """Runs the command of [rl.environment].

    Args:
        is_stopped: asked on rank 0 while programs run.
        folder: for the output of failed episodes.
        say: takes a line for the log, on rank 0.

    Raises:
        UserError: a command is no program.
    """

    def __init__(
        self, table: EnvironmentConfig, prompts: PromptsConfig, tokenizer: Tokenizer, engine: Engine,
        is_stopped: Callable[[], bool], folder: Path, say: Callable[[str], None] = print,
    ):  # fmt: skip
        self._table, self._prompts, self._tokenizer, self._engine = table, prompts, tokenizer, engine
        self._is_stopped, self._say, self._tries, self._seconds = is_stopped, say, table.tries, table.seconds
        self._at_once, self._programs = table.at_once, Programs(table.variables, table.allow)
        self._command, self._scoring = (found_program(words) for words in (table.command, table.score_command))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[EpisodeEnd]] = []
        self._background = set[asyncio.Task[None]]()
        self._round, self._taken = _Round(), list[OpenRequest]()
        self._last_change, self._failures, self._folder = 0.0, 0, folder

    def run(self, asked: Sequence[tuple[Prompt, Request]], rules: SamplingRules) -> list[EpisodeEnd] | None:
        """The ends of an episode for each prompt; None if a stop was requested. Collective."""
        if isinstance(self._engine, ServerEngine):
            found = self._engine.answer(partial(self._by_servers, asked), rules)
            return unpack_groups(found)[0] if found else None
        if dist.get_rank() == 0:
            self._call(self._start(asked, self._round))
        while (content := run_on_first_rank(lambda: self._call(self._next_round()))) not in (b"", _STOPPED):
            requests = [Request(*one) for one in json.loads(content)]
            completions = self._engine.generate(requests, rules)
            if any(one.finish == "abort" for one in completions):
                content = _STOPPED  # a rank may know of the stop before rank 0
                break
            for one, completion in zip(self._taken, completions, strict=False):  # on rank 0
                one.done(completion)
        is_stopped = content == _STOPPED
        ends = read_on_first_rank(lambda: self._call(self._end(is_stopped=is_stopped)))
        return None if is_stopped else ends

    def _by_servers(self, asked: Sequence[tuple[Prompt, Request]], requests: OpenRequests) -> bytes:
        self._call(self._start(asked, requests))
        while not self._call(self._wait(_TICK_SECONDS)):
            if self._is_stopped() or requests.error is not None:
                self._call(self._end(is_stopped=True))
                if requests.error is not None:
                    raise requests.error
                return b""
        return pack_groups({0: self._call(self._end(is_stopped=False))})

    def begin(self, prompt: Callable[[int], Prompt], requests: OpenRequests, members: Sequence[Member]) -> None:
        """See `Begin`; each member is an episode.

        Args:
            prompt: of a number.
        """
        self._call(self._begin(prompt, requests, members))

    async def _begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        loop = asyncio.get_running_loop()
        for member in members:
            task = asyncio.create_task(self._run_member(prompt(member.number), requests, member))
            member.cancel = partial(loop.call_soon_threadsafe, task.cancel)
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _run_member(self, prompt: Prompt, requests: Requests, member: Member) -> None:
        try:
            end = await self._episode(prompt, member.request, requests, self._places, member)
        except Exception as error:
            member.finish(error)
            raise
        member.finish(end)

    def close(self) -> None:
        """End the programs and the endpoint."""
        if self._loop is not None:
            self._call(self._end(is_stopped=True))
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, coroutine: Any) -> Any:
        """The result of a coroutine in the thread of the endpoint."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> None:
        self._changed, self._places = asyncio.Event(), asyncio.Semaphore(self._at_once)
        self._endpoint = PolicyEndpoint(self._note_change, self._say)
        await self._endpoint.start()

    def _note_change(self) -> None:
        self._last_change = time.monotonic()
        self._changed.set()

    async def _start(self, asked: Sequence[tuple[Prompt, Request]], requests: Requests) -> None:
        places = asyncio.Semaphore(self._at_once)  # those in the background may be halted
        self._tasks = [asyncio.create_task(self._episode(*one, requests, places)) for one in asked]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._note_change())

    async def _wait(self, seconds: float) -> bool:
        """True if all episodes have ended; returns early when anything changes."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(seconds, 0.01))
        self._changed.clear()
        return all(task.done() for task in self._tasks)

    async def _next_round(self) -> bytes:
        """The requests of the next round; empty when all episodes have ended."""
        while not all(task.done() for task in self._tasks):
            if self._is_stopped():
                return _STOPPED
            asked, now = self._round.waiting, time.monotonic()
            if asked and (self._endpoint.all_wait or now >= self._last_change + _PATIENCE_SECONDS):
                self._taken, self._round.waiting = asked, []
                return json.dumps([one.request for one in asked]).encode()
            await self._wait(self._last_change + _PATIENCE_SECONDS - now if asked else _TICK_SECONDS)
        return b""

    async def _end(self, *, is_stopped: bool) -> list[EpisodeEnd]:
        tasks, self._tasks, self._round.waiting = self._tasks, [], []
        others = list(self._background) if is_stopped else []
        for task in (*tasks, *others) if is_stopped else ():
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if is_stopped:
            await asyncio.gather(*tasks, return_exceptions=True)
        return [] if is_stopped else await asyncio.gather(*tasks)

    async def _episode(
        self, prompt: Prompt, request: Request, requests: Requests, places: asyncio.Semaphore,
        member: Member | None = None,
    ) -> EpisodeEnd:  # fmt: skip
        """Run the programs of an episode, and again if they fail. Its faults are its own."""
        table, keys = self._table, self._prompts
        recorded, note = (member.end.samples, member.note) if member is not None else ([], lambda turn: None)
        async with places:
            for number in range(1, self._tries + 1):
                session = Session(
                    self._tokenizer, request, thinking=keys.thinking, most_turns=table.max_turns,
                    keeps_thoughts=keys.keep_thoughts, recorded=recorded, note=note,
                )  # fmt: skip
                end = await self._try(prompt, session, requests)
                if not end.fault:
                    break
                request = request._replace(seed=(request.seed + _SEED_OF_TRY) % 2**63)
                self._failures += 1
                if self._failures.bit_count() == 1:
                    self._say(kept_failure(self._folder, self._failures, f"try {number} of {self._tries}", prompt, end))
        return end

    async def _try(self, prompt: Prompt, session: Session, requests: Requests) -> EpisodeEnd:
        table = self._table
        episode = self._endpoint.open(session, table.max_turns, requests)
        url = self._endpoint.base_url(episode)
        variables = {
            "OPENAI_BASE_URL": url, "OPENAI_API_KEY": episode.key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": episode.key,
            TASK_NAME: task_of(prompt, self._prompts),
        }  # fmt: skip
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                policy = self._endpoint, episode
                ended = await self._programs.run(self._command, folder, variables, self._seconds, b"", policy)
            finally:
                self._endpoint.close(episode)
                self._note_change()
            samples = session.samples()
            fault = episode.fault or ("" if episode.no_room and samples else episode.no_room or ended.fault)
            if fault or not samples:
                return EpisodeEnd([], f"rl.environment: {fault or 'the program asked nothing'}", output=ended.output)
            if episode.no_room:
                first, *others = samples
                samples = [first._replace(completion=first.completion._replace(finish="length")), *others]
            if not self._scoring:
                score = _last_number(ended.output, is_cut=bool(ended.fault))
                return EpisodeEnd(samples, "", score)
            return await self._scored(prompt, session, samples, folder)

    async def _scored(self, prompt: Prompt, session: Session, samples: list[SessionSample], folder: str) -> EpisodeEnd:
        """The end of an episode, with the number of the scoring command."""
        content = json.dumps({"row": prompt.row, "messages": session.conversation()}, default=str).encode()
        ended = await self._programs.run(self._scoring, folder, {}, self._table.timeout_seconds, content)
        score = _last_number(ended.output)
        if ended.fault or score is None:
            fault = f"rl.environment.score_command: {ended.fault or 'its last line is no number'}"
            return EpisodeEnd([], fault, output=ended.output)
        return EpisodeEnd(samples, "", score)


def _last_number(output: str, *, is_cut: bool = False) -> float | None:
    """The number in the last line of an output, or the last line that is one if it was cut; None if there is none."""
    for line in reversed(output.strip().splitlines()):
        with suppress(ValueError):
            return found if math.isfinite(found := float(line)) else None
        if not is_cut:
            break
    return None
