"""Episodes of a user's program: any program that uses OpenAI's chat API runs once per sample, against the policy. The
endpoint is a thread of rank 0."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from glm46.config.errors import UserError
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.files.scratch import async_scratch_folder
from glm46.files.standard_output import LineWriter, print_line
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.episode_checks import kept_failure, task_of
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.commands import found_program
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.event_loop import EventLoop
from glm46.tasks.rl.rollout.open_requests import Requests
from glm46.tasks.rl.rollout.programs import ProgramOutcome, Programs
from glm46.tasks.rl.rollout.records import Completion, Episode
from glm46.tasks.rl.rollout.session import Session
from glm46.tasks.rl.rollout.workers import Workers, last_number

TRIES = 2
"""Largest number of runs of an episode that fails."""
_MOST_OF_LINE = 200
_FAULTS_OF_PROGRAMS = (OSError, ValueError, RecursionError, MemoryError)
"""Errors that a full disk, a hostile folder or a turn of the policy may raise in the trainer."""
_SEED_OF_TRY = 0x9E3779B97F4A7C15
"""Added to the seed for another try, so that the policy generates other turns."""


class CommandEpisodes:
    """An `Environment` in which a program runs for each episode, or a worker runs many episodes.

    Args:
        folder: folder for the output of failed episodes.
        say: writes a line to the log, on rank 0.
        needs_score: True if a reward reads the score; an episode without a score has then failed.

    Raises:
        UserError: if a command names no program.
    """

    replies_soon = False

    def __init__(
        self,
        table: EnvironmentConfig,
        prompts: PromptsConfig,
        tokenizer: Tokenizer,
        folder: Path,
        say: LineWriter = print_line,
        *,
        needs_score: bool = False,
    ):
        self._table = table
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._say = say
        self._folder = folder
        self._failures = 0
        self._programs = Programs(table.variables, table.allow, keeps_modes=table.sandbox == "required")
        self._scoring = found_program(table.score_command)
        most_idle = table.at_once if table.kind == "worker" else None
        self._workers = Workers(self._programs, found_program(table.command), most_idle)
        self._needs_score = needs_score
        self._loop: EventLoop | None = None
        self._places = WeakKeyDictionary[Requests, asyncio.Semaphore]()
        """Limit of concurrent programs for each `Requests`, so that halted programs leave room for others."""

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """See `Environment.begin`."""
        loop = self._loop = self._loop or self._start()
        self._places.setdefault(requests, asyncio.Semaphore(self._table.at_once))
        for member in members:
            episode = self._run_member(prompt(member.number), requests, member)
            member.cancel = loop.begin(episode).cancel

    async def _run_member(self, prompt: Prompt, requests: Requests, member: Member) -> None:
        try:
            end = await self._episode(prompt, requests, member)
        except Exception as error:
            member.finish(error)
            raise
        member.finish(end)

    def close(self) -> None:
        """See `Environment.close`. Ends the programs and the endpoint."""
        loop = self._loop
        self._loop = None
        if loop is not None:
            loop.stop(self._workers.close)

    def _start(self) -> EventLoop:
        """Start an event loop with the endpoint."""
        loop = EventLoop()
        self._endpoint = PolicyEndpoint(self._say)
        loop.run(self._endpoint.start())
        return loop

    async def _episode(self, prompt: Prompt, requests: Requests, member: Member) -> Episode:
        """Run the programs of an episode, again if they fail. A fault ends this episode only."""
        table = self._table
        keys = self._prompts
        request = member.request
        async with self._places[requests]:
            for number in range(1, TRIES + 1):
                session = Session(
                    self._tokenizer,
                    request,
                    thinking=keys.thinking,
                    most_turns=table.max_turns,
                    keeps_thoughts=keys.keep_thoughts,
                    recorded=member.end.samples,
                    note=member.note,
                )
                session.effort = prompt.effort
                end = await self._try(prompt, session, requests)
                if not end.fault:
                    break
                request = request._replace(seed=(request.seed + _SEED_OF_TRY) % 2**63)
                self._failures += 1
                if self._failures.bit_count() == 1:
                    self._say(kept_failure(self._folder, self._failures, f"try {number} of {TRIES}", prompt, end))
        return end

    async def _try(self, prompt: Prompt, session: Session, requests: Requests) -> Episode:
        """Run the programs of an episode once. Errors that their files or the policy's turns cause fail only this
        try."""
        try:
            async with async_scratch_folder() as folder:
                return await self._run_programs(prompt, session, requests, folder)
        except UserError:
            raise
        except _FAULTS_OF_PROGRAMS as error:
            return Episode([], f"rl.environment: {type(error).__name__}: {error}")

    async def _run_programs(self, prompt: Prompt, session: Session, requests: Requests, folder: str) -> Episode:
        table = self._table
        policy = self._endpoint.open(session, table.max_turns, requests)
        task = task_of(prompt, self._prompts)
        try:
            outcome, score = await self._workers.run(task, folder, table.seconds, policy)
        finally:
            self._endpoint.close(policy)
        samples = session.samples()
        fault = policy.fault or ("" if policy.no_room and samples else policy.no_room or outcome.fault)
        if fault or not samples:
            return Episode([], f"rl.environment: {fault or 'the program asked nothing'}", output=outcome.both)
        if policy.no_room:
            samples[0] = samples[0]._replace(finish="length")
        if self._scoring:
            return await self._scored(prompt, session, samples, folder)
        if score is not None or not self._needs_score:
            return Episode(samples, "", score)
        return Episode([], self._missing_score(policy.no_room, outcome), output=outcome.both)

    def _missing_score(self, no_room: str, outcome: ProgramOutcome) -> str:
        """Describe the fault of an episode without the score that a reward reads."""
        # After a refused request the program's own output shows only a follow-up error, so name the refusal first.
        cause = f"a request was refused ({no_room}), and " if no_room else ""
        if self._table.kind == "worker":
            return (
                f'rl.environment.command: {cause}its line has no number as "score", which [[rl.rewards]] reads; add it'
            )
        lines = outcome.output.strip().splitlines()
        why = "it printed nothing"
        if lines:
            why = f"the last line that it printed is not a number: {lines[-1][:_MOST_OF_LINE]!r}"
        return f"rl.environment.command: {cause}{why}; print the score in the last line"

    async def _scored(self, prompt: Prompt, session: Session, samples: list[Completion], folder: str) -> Episode:
        """Run the scoring command and return the end of the episode with its score."""
        content = json.dumps({"row": prompt.row, "messages": session.conversation()}, default=str).encode()
        outcome = await self._programs.run(
            self._scoring, folder, {}, self._table.timeout_seconds, content, is_judge=True
        )
        score = last_number(outcome.output)
        if outcome.fault or score is None:
            fault = f"rl.environment.score_command: {outcome.fault or 'its last line is no number'}"
            return Episode([], fault, output=outcome.both)
        return Episode(samples, "", score)
