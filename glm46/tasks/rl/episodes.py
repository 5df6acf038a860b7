"""Episodes of a program of the user's: any that speaks OpenAI's chat API runs once for each sample, against the policy.

The endpoint is a thread of rank 0: programs run only while the ranks wait for them or generate, so that nothing else
needs the interpreter then. What waits for tokens is generated in rounds, by the engine of the run on all ranks.
"""

import asyncio
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.function_pool import found_program
from glm46.tasks.rl.rollout.endpoint import Episode, PolicyEndpoint
from glm46.tasks.rl.rollout.first_rank import run_on_first_rank
from glm46.tasks.rl.rollout.programs import Programs
from glm46.tasks.rl.rollout.records import Completion, Engine, Request, SamplingRules
from glm46.tasks.rl.rollout.session import Session, SessionSample

_PATIENCE_SECONDS = 0.25
"""A round begins when all programs wait for tokens, or none has come to wait for so long."""
_TICK_SECONDS = 0.5
_STOPPED = b"stopped"


class EpisodeEnd(NamedTuple):
    """The result of an episode."""

    samples: list[SessionSample]
    """First the one with the last turn; empty if there is a fault."""
    fault: str = ""
    score: float | None = None
    """Of the scoring command, or of the program where there is none."""


class CommandEpisodes:
    """Runs the command of [rl.environment].

    Args:
        is_stopped: asked on rank 0 while programs run.
        is_local: the engine ends samples with "abort" only at a stop.
        say: takes a line for the log, on rank 0.

    Raises:
        UserError: a command is no program.
    """

    def __init__(
        self,
        table: EnvironmentConfig,
        prompts: PromptsConfig,
        tokenizer: Tokenizer,
        engine: Engine,
        is_stopped: Callable[[], bool],
        say: Callable[[str], None] = print,
        *,
        is_local: bool = True,
    ):
        self._table, self._prompts, self._tokenizer, self._engine = table, prompts, tokenizer, engine
        self._is_stopped, self._say, self._is_local = is_stopped, say, is_local
        self._seconds, self._at_once = table.seconds, table.at_once
        self._programs = Programs(table.variables, table.allow)
        self._command, self._scoring = (found_program(words) for words in (table.command, table.score_command))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = set[Episode]()
        self._tasks: list[asyncio.Task[EpisodeEnd]] = []
        self._last_change = 0.0

    def run(self, asked: Sequence[tuple[Prompt, Request]], rules: SamplingRules) -> list[EpisodeEnd] | None:
        """The ends of an episode for each prompt; None if a stop was requested. Collective."""
        if dist.get_rank() == 0:
            self._call(self._begin(asked))
        while (content := run_on_first_rank(lambda: self._call(self._next_round()))) not in (b"", _STOPPED):
            requests = [Request(*one) for one in json.loads(content)]
            completions = self._engine.generate(requests, rules)
            if self._is_local and any(one.finish == "abort" for one in completions):
                content = _STOPPED  # a rank may know of the stop before rank 0
                break
            if dist.get_rank() == 0:
                self._call(self._give(completions))
        is_stopped = content == _STOPPED
        ends = read_on_first_rank(lambda: self._call(self._end(is_stopped=is_stopped)))
        return None if is_stopped else ends

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
        self._changed = asyncio.Event()
        self._endpoint = PolicyEndpoint(self._note_change, self._say)
        await self._endpoint.start()

    def _note_change(self) -> None:
        self._last_change = time.monotonic()
        self._changed.set()

    async def _begin(self, asked: Sequence[tuple[Prompt, Request]]) -> None:
        places = asyncio.Semaphore(self._at_once)
        self._tasks = [asyncio.create_task(self._episode(*one, places)) for one in asked]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._note_change())

    async def _next_round(self) -> bytes:
        """The requests of the next round; empty when all episodes have ended."""
        while True:
            if self._is_stopped():
                return _STOPPED
            waiting, now = self._endpoint.waiting, time.monotonic()
            if waiting and (len(waiting) == len(self._running) or now >= self._last_change + _PATIENCE_SECONDS):
                return json.dumps(self._endpoint.take()).encode()
            if all(task.done() for task in self._tasks):
                return b""
            left = self._last_change + _PATIENCE_SECONDS - now if waiting else _TICK_SECONDS
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(left, 0.01))
            self._changed.clear()

    async def _give(self, completions: Sequence[Completion]) -> None:
        self._endpoint.give(completions)

    async def _end(self, *, is_stopped: bool) -> list[EpisodeEnd]:
        tasks, self._tasks = self._tasks, []
        for task in tasks if is_stopped else ():
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=is_stopped)
        self._endpoint.forget()
        return found

    async def _episode(self, prompt: Prompt, request: Request, places: asyncio.Semaphore) -> EpisodeEnd:
        """Run the programs of an episode. Its faults are its own."""
        async with places:
            table, keys = self._table, self._prompts
            session = Session(
                self._tokenizer, request, thinking=keys.thinking, most_turns=table.max_turns,
                keeps_thoughts=keys.keep_thoughts,
            )  # fmt: skip
            episode = self._endpoint.open(session, table.max_turns)
            self._running.add(episode)
            url = self._endpoint.base_url(episode)
            variables = {
                "OPENAI_BASE_URL": url, "OPENAI_API_KEY": episode.key,
                "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": episode.key,
                "GLM46_TASK": json.dumps(without(prompt.row, keys.label_key), default=str),
            }  # fmt: skip
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    policy = self._endpoint, episode
                    ended = await self._programs.run(self._command, folder, variables, self._seconds, b"", policy)
                finally:
                    self._endpoint.close(episode)
                    self._running.remove(episode)
                    self._note_change()
                try:
                    samples = session.samples()
                except ValueError as error:
                    episode.fail(str(error))
                    samples = []
                fault = episode.fault or ("" if episode.is_truncated and samples else ended.fault)
                if fault or not samples:
                    return EpisodeEnd([], f"rl.environment: {fault or 'the program asked for nothing'}")
                if episode.is_truncated:
                    first, *others = samples
                    cut = first.completion._replace(finish="length")
                    samples = [first._replace(completion=cut), *others]
                if not self._scoring:
                    return EpisodeEnd(samples, "", _last_number(ended.output))
                return await self._scored(prompt, session, samples, folder)

    async def _scored(self, prompt: Prompt, session: Session, samples: list[SessionSample], folder: str) -> EpisodeEnd:
        """The end of an episode, with the number of the scoring command."""
        given = {"row": prompt.row, "messages": session.conversation()}
        content, seconds = json.dumps(given, default=str).encode(), self._table.timeout_seconds
        ended = await self._programs.run(self._scoring, folder, {}, seconds, content)
        score = _last_number(ended.output)
        if ended.fault or score is None:
            return EpisodeEnd([], f"rl.environment.score_command: {ended.fault or 'its last line is no number'}")
        return EpisodeEnd(samples, "", score)


def _last_number(output: str) -> float | None:
    """The number in the last line of an output; None if there is none."""
    try:
        found = float(output.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def without(row: Any, key: str) -> Any:
    """A row without what a key, or a path with dots, leads to."""
    if not isinstance(row, dict):
        return row
    if key in row:
        return {name: value for name, value in row.items() if name != key}
    head, _, rest = key.partition(".")
    return row | {head: without(row[head], rest)} if rest and head in row else row
