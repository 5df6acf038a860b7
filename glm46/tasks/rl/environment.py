"""Runs episodes to their ends, whatever leads them: a function, a program, or a task set behind one."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch.distributed as dist

from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.conversations import Conversations
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.function_pool import environment_pool
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.first_rank import run_on_first_rank
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests, Requests
from glm46.tasks.rl.rollout.records import (
    Completion,
    Engine,
    EpisodeEnd,
    Request,
    SamplingRules,
    pack_groups,
    unpack_groups,
)
from glm46.tasks.rl.rollout.server_engine import ServerEngine

_TICK_SECONDS = 0.25
_CALLS_OF_A_RANK, _MOST_CALLS = 4, 64
"""Of the function of [rl.environment] at once, all on the first rank."""


class Environment(Protocol):
    """Leads episodes from their prompts to their ends, on rank 0. Nobody else knows what it is: any engine answers
    what it asks, in a rollout and ahead of one."""

    @property
    def replies_soon(self) -> bool:
        """What it says depends on the turns alone and comes within seconds: the engine of the ranks waits for it, so
        that another run computes the same samples in the same batches."""

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """See `Begin`: each member is an episode, which goes on behind its recorded turns. Does not wait.

        Args:
            prompt: of a number.
            requests: answers the turns of the policy.
        """

    def close(self) -> None:
        """End all that runs."""


def build_environment(
    table: EnvironmentConfig, keys: PromptsConfig, tokenizer: Tokenizer, stop: frozenset[int], failed: Path
) -> Environment:
    """The environment that [rl.environment] names.

    Args:
        stop: ids that end a turn.
        failed: folder for the output of failed programs.

    Raises:
        UserError: its function cannot be loaded, or its programs cannot run.
    """
    pool = environment_pool(table)
    if table.kind == "command":
        return CommandEpisodes(table, keys, tokenizer, failed)
    threads = ThreadPoolExecutor(min(_CALLS_OF_A_RANK * dist.get_world_size(), _MOST_CALLS), "environment")
    return Conversations(pool, tokenizer, stop, keys.thinking, table.max_turns, threads)


class _Run:
    """See `Requests`: episodes that begin together, and their requests in rounds of the engine. On rank 0."""

    def __init__(
        self, environment: Environment, prompt: Callable[[int], Prompt], asked: Sequence[tuple[int, Request]],
        is_stopped: Callable[[], bool],
    ):  # fmt: skip
        self._begin, self._soon = partial(environment.begin, prompt), environment.replies_soon
        self._members = [Member(number, request, EpisodeEnd([], is_part=True)) for number, request in asked]
        self._is_stopped, self._left, self._has_started = is_stopped, len(asked), False
        self._changed, self._error = threading.Condition(), cast(BaseException | None, None)
        self._new, self._open = list[OpenRequest](), list[OpenRequest]()

    def _finish(self, member: Member, end: EpisodeEnd | BaseException) -> None:
        with self._changed:
            if isinstance(end, EpisodeEnd):
                member.end, self._left = end, self._left - 1
            else:
                self._error = self._error or end
            self._changed.notify_all()

    def _start(self, requests: Requests) -> None:
        for member in self._members:
            member.finish = partial(self._finish, member)
        self._begin(requests, self._members)

    def _is_over(self) -> bool:
        return self._error is not None or not self._left or self._is_stopped()

    def ends(self) -> bytes:
        """Of all episodes; empty if they have to end without one."""
        if self._left:
            for member in self._members:
                if member.end.is_part and member.cancel is not None:
                    member.cancel()
        if self._error is not None:
            raise self._error
        return b"" if self._left else pack_groups({number: [one.end] for number, one in enumerate(self._members)})

    def by_servers(self, requests: OpenRequests) -> bytes:
        """Run all episodes with the answers of servers; see `ends`."""
        self._start(requests)
        with self._changed:
            while not self._is_over():
                self._changed.wait(_TICK_SECONDS)
                self._error = self._error or requests.error
        return self.ends()

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """See `Requests.ask`."""
        with self._changed:
            self._new += asked
            self._changed.notify_all()

    def drop(self, asked: OpenRequest) -> None:
        """See `Requests.drop`."""
        with self._changed, suppress(ValueError):  # it is generated already
            self._new.remove(asked)

    def next_round(self, ended: Sequence[Completion]) -> bytes:
        """The requests of the next round, when all episodes wait, or none has come to wait for a while; empty if there
        is none. Takes the answers of the round before."""
        if not self._has_started:
            self._has_started = True
            self._start(self)
        for one, completion in zip(self._open, ended, strict=True):
            one.done(completion)
        with self._changed:
            while not self._is_over() and len(self._new) < self._left:
                if not self._changed.wait(_TICK_SECONDS) and self._new and not self._soon:
                    break  # the others are busy
            if self._is_over():
                return b""
            self._open, self._new = sorted(self._new, key=lambda one: one.request.seed), []
            return json.dumps([one.request for one in self._open]).encode()


def run_episodes(
    environment: Environment, prompt: Callable[[int], Prompt], asked: Sequence[tuple[int, Request]], engine: Engine,
    rules: SamplingRules, is_stopped: Callable[[], bool],
) -> list[EpisodeEnd] | None:  # fmt: skip
    """The ends of an episode for each number of a prompt and request; None if a stop was requested. Collective.

    Args:
        is_stopped: asked on rank 0.
    """
    run, ended = _Run(environment, prompt, asked, is_stopped), list[Completion]()
    if isinstance(engine, ServerEngine):
        content = engine.answer(run.by_servers, rules)
    else:
        while content := run_on_first_rank(partial(run.next_round, ended)):
            ended = engine.generate([Request(*one) for one in json.loads(content)], rules)
            if any(one.finish == "abort" for one in ended):
                break  # a rank may know of the stop before rank 0
        content = run_on_first_rank(run.ends)
    return [end for (end,) in unpack_groups(content).values()] if content else None
