"""Episodes of a program of the user's: any that speaks OpenAI's chat API runs once for each sample, against the policy.
The endpoint is a thread of rank 0."""

import asyncio
import json
import math
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.episode_checks import TASK_NAME, kept_failure, task_of, without
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.open_requests import Requests
from glm46.tasks.rl.rollout.programs import Programs
from glm46.tasks.rl.rollout.records import EpisodeEnd, SessionSample
from glm46.tasks.rl.rollout.session import Session
from glm46.tasks.rl.rollout.workers import Workers

_MOST_OF_LINE = 200
_SEED_OF_TRY = 0x9E3779B97F4A7C15
"""Added to the seed for another try, in which the policy says other things."""


class CommandEpisodes:
    """See `Environment`: a program runs for each episode, or stays for many.

    Args:
        folder: for the output of failed episodes.
        say: takes a line for the log, on rank 0.
        needs_score: a reward reads the score, and an episode without one has failed.

    Raises:
        UserError: a command is no program.
    """

    replies_soon = False

    def __init__(
        self, table: EnvironmentConfig, prompts: PromptsConfig, tokenizer: Tokenizer, folder: Path,
        say: Callable[[str], None] = print, *, needs_score: bool = False,
    ):  # fmt: skip
        self._table, self._prompts, self._tokenizer = table, prompts, tokenizer
        self._say, self._folder, self._failures, self._tries = say, folder, 0, table.tries
        self._programs = Programs(table.variables, table.allow)
        self._command, self._scoring = (found_program(words) for words in (table.command, table.score_command))
        self._workers = Workers(self._programs, self._command, table.at_once) if table.kind == "worker" else None
        self._needs_score = needs_score
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = WeakKeyDictionary[Requests, asyncio.Semaphore]()
        """Of programs at once, by what answers them: those that are halted leave room for others."""

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """See `Environment.begin`."""
        loop = self._loop = self._loop or self._start()
        self._places.setdefault(requests, asyncio.Semaphore(self._table.at_once))
        for member in members:
            episode = self._run_member(prompt(member.number), requests, member)
            member.cancel = asyncio.run_coroutine_threadsafe(episode, loop).cancel

    async def _run_member(self, prompt: Prompt, requests: Requests, member: Member) -> None:
        try:
            end = await self._episode(prompt, requests, member)
        except Exception as error:
            member.finish(error)
            raise
        member.finish(end)

    def close(self) -> None:
        """See `Environment.close`: the programs and the endpoint."""
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _start(self) -> asyncio.AbstractEventLoop:
        """The loop of a new thread, with the endpoint."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="episodes", daemon=True).start()
        self._endpoint = PolicyEndpoint(self._say)
        asyncio.run_coroutine_threadsafe(self._endpoint.start(), loop).result()
        return loop

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._workers is not None:
            await self._workers.close()

    async def _episode(self, prompt: Prompt, requests: Requests, member: Member) -> EpisodeEnd:
        """Run the programs of an episode, and again if they fail. Its faults are its own."""
        table, keys, request = self._table, self._prompts, member.request
        async with self._places[requests]:
            for number in range(1, self._tries + 1):
                session = Session(
                    self._tokenizer, request, thinking=keys.thinking, most_turns=table.max_turns,
                    keeps_thoughts=keys.keep_thoughts, recorded=member.end.samples, note=member.note,
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
        }  # fmt: skip
        policy = self._endpoint, episode
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                if self._workers is not None:
                    task = without(prompt.row, self._prompts.label_key)
                    ended, score = await self._workers.run(task, variables, table.seconds, policy)
                else:
                    variables[TASK_NAME] = task_of(prompt, self._prompts)
                    ended = await self._programs.run(self._command, folder, variables, table.seconds, b"", policy)
                    score = _last_number(ended.output, is_cut=bool(ended.fault))
            finally:
                self._endpoint.close(episode)
            samples = session.samples()
            fault = episode.fault or ("" if episode.no_room and samples else episode.no_room or ended.fault)
            if fault or not samples:
                return EpisodeEnd([], f"rl.environment: {fault or 'the program asked nothing'}", output=ended.output)
            if episode.no_room:
                first, *others = samples
                samples = [first._replace(completion=first.completion._replace(finish="length")), *others]
            if self._scoring:
                return await self._scored(prompt, session, samples, folder)
            if score is not None or not self._needs_score:
                return EpisodeEnd(samples, "", score)
            # The program's own words are those of an error that it did not expect: the refusal is the cause.
            cause = episode.no_room and f"a request was refused ({episode.no_room}), and "
            if self._workers is None:
                lines = ended.output.strip().splitlines()
                why = f"the last line that it printed is not a number: {lines[-1][:_MOST_OF_LINE]!r}" if lines else ""
                why = f"{why or 'it printed nothing'}; print the score in the last line"
            else:
                why = 'its line has no number as "score", which [[rl.rewards]] reads; add it'
            return EpisodeEnd([], f"rl.environment.command: {cause}{why}", output=ended.output)

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
