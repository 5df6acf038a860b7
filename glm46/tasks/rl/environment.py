"""Runs episodes to their ends, whatever leads them: a function, a program, or a task set behind one."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch.distributed as dist

from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.conversations import Conversations
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.function_pool import FunctionPool, environment_pool
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.first_rank import run_on_first_rank
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests, Requests
from glm46.tasks.rl.rollout.records import Completion, EpisodeEnd, Request, SamplingRules, pack_groups, unpack_groups
from glm46.tasks.rl.rollout.server_engine import ServerEngine

_TICK_SECONDS = 0.5
_WINDOW = 16
"""Tokens after which the engine of the ranks waits for replies that come soon: those to turns of the window before."""
_CALLS_OF_A_RANK, _MOST_CALLS = 4, 64
"""Of the function of [rl.environment] at once, all on the first rank."""


class Environment(Protocol):
    """Leads episodes from their prompts to their ends, on rank 0. Nobody else knows what it is: any engine answers
    what it asks, in a rollout and ahead of one."""

    @property
    def replies_soon(self) -> bool:
        """True if what it says depends on the turns alone and comes within seconds: the engine of the ranks waits for
        it, so that another run computes the same samples in the same batches."""

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """See `Begin`: each member is an episode, which continues after its recorded turns. Does not wait.

        Args:
            prompt: of a number.
            requests: answers the turns of the policy.
        """

    def close(self) -> None:
        """End all that runs."""


def build_environment(
    table: EnvironmentConfig, keys: PromptsConfig, tokenizer: Tokenizer, stop: frozenset[int], failed: Path,
    needs_score: bool,
) -> Environment:  # fmt: skip
    """The environment that [rl.environment] names.

    Args:
        stop: ids that end a turn.
        failed: folder for the output of failed programs.
        needs_score: a reward reads the score of a program.

    Raises:
        UserError: its function cannot be loaded, or its programs cannot run.
    """
    is_called_here = dist.get_rank() == 0 or table.kind != "function"  # a process of its own imports the function
    pool = environment_pool(table) if is_called_here else FunctionPool([])
    if table.kind != "function":
        return CommandEpisodes(table, keys, tokenizer, failed, needs_score=needs_score)
    threads = ThreadPoolExecutor(min(_CALLS_OF_A_RANK * dist.get_world_size(), _MOST_CALLS), "environment")
    return Conversations(pool, tokenizer, stop, keys.thinking, table.max_turns, threads)


class _Run:
    """See `Requests`: episodes that begin together, and what they ask the engine of the ranks. On rank 0."""

    def __init__(
        self, environment: Environment, prompt: Callable[[int], Prompt], asked: Sequence[tuple[int, Request]],
        is_stopped: Callable[[], bool],
    ):  # fmt: skip
        self._begin, self._soon = partial(environment.begin, prompt), environment.replies_soon
        self._members = [
            Member(number, request, EpisodeEnd([], is_part=True), finish=partial(self._finish, index))
            for index, (number, request) in enumerate(asked)
        ]
        self._is_stopped, self._left = is_stopped, len(asked)
        self._changed, self._error = threading.Condition(), cast(BaseException | None, None)
        self._new, self._open = list[OpenRequest](), dict[int, OpenRequest]()
        self._dropped, self._ended = list[int](), dict[int, Completion]()
        self._count = self._tokens = 0

    def _finish(self, index: int, end: EpisodeEnd | BaseException) -> None:
        with self._changed:
            if isinstance(end, EpisodeEnd):
                self._members[index].end, self._left = end, self._left - 1
            else:
                self._error = self._error or end
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._error is not None or not self._left or self._is_stopped()

    def ends(self) -> bytes:
        """Of all episodes; empty if they have to end without one."""
        with self._changed:
            left = self._left  # before a cancelled one ends
        for member in self._members:
            if member.end.is_part and member.cancel is not None:
                member.cancel()
        if self._error is not None:
            raise self._error
        return b"" if left else pack_groups({number: [one.end] for number, one in enumerate(self._members)})

    def by_servers(self, requests: OpenRequests) -> bytes:
        """Run all episodes with the answers of servers; see `ends`."""
        self._begin(requests, self._members)
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
        with self._changed:
            self._new = [one for one in self._new if one is not asked]
            dropped = [number for number, one in self._open.items() if one is asked]
            self._dropped += [number for number in dropped if self._open.pop(number)]

    def exchange(self, ended: Mapping[int, Completion]) -> tuple[list[tuple[int, Request]], list[int]] | None:
        """See `Exchange`. Programs get their turns at once, and what they ask is begun as it comes. Replies that come
        soon are waited for, and begun at the end of the window behind that of their turns."""
        if not self._tokens:
            self._begin(self, self._members)
        with self._changed:
            self._ended |= ended
            self._tokens += 1
            if self._soon and self._tokens % _WINDOW and self._open.keys() - self._ended:
                return [], []
            while not self._is_over():
                if not self._soon or len(self._new) + len(self._open) == self._left:
                    new = dict(enumerate(sorted(self._new, key=lambda one: one.request.seed), self._count))
                    self._new, self._count = [], self._count + len(new)
                    for number, completion in self._ended.items():
                        if number in self._open:
                            self._open.pop(number).done(completion)
                    self._ended = {}
                    self._open |= new
                    if self._open:
                        dropped, self._dropped = self._dropped, []
                        return [(number, one.request) for number, one in new.items()], dropped
                self._changed.wait(_TICK_SECONDS)
        return None


def run_episodes(
    environment: Environment, prompt: Callable[[int], Prompt], asked: Sequence[tuple[int, Request]],
    engine: LocalEngine | ServerEngine, rules: SamplingRules, is_stopped: Callable[[], bool],
) -> list[EpisodeEnd] | None:  # fmt: skip
    """The ends of an episode for each number of a prompt and request; None if a stop was requested. Collective.

    Args:
        is_stopped: asked on rank 0.
    """
    run = _Run(environment, prompt, asked, is_stopped)
    if isinstance(engine, ServerEngine):
        content = engine.answer(run.by_servers, rules)
    else:
        engine.serve(run.exchange, rules)
        content = run_on_first_rank(run.ends)
    return [end for (end,) in unpack_groups(content).values()] if content else None
