"""Runs episodes of any environment: a function, a program, or a task set that a program serves."""

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
from glm46.tasks.rl.rollout.records import Completion, Episode, Request, SamplingRules, pack_groups, unpack_groups
from glm46.tasks.rl.rollout.server_engine import ServerEngine

_TICK_SECONDS = 0.5
_WINDOW = 16
"""Tokens between the points where the local engine waits for quick replies to the turns that have ended since."""
_CALLS_OF_A_RANK = 4
_MOST_CALLS = 64
"""Most concurrent calls of the function of [rl.environment], all on the first rank."""


class Environment(Protocol):
    """Runs episodes from their prompts to their ends, on rank 0. It works with any engine, in a rollout and ahead of
    one."""

    @property
    def replies_soon(self) -> bool:
        """True if replies depend on the turns alone and come within seconds. The local engine then waits for them, so
        that a repeated run computes the same samples in the same batches."""

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """Start episodes, one for each member, after their recorded turns; see `Begin`. Does not wait.

        Args:
            prompt: returns the prompt with a number.
            requests: generates the turns of the policy.
        """

    def close(self) -> None:
        """End all running episodes and processes."""


def build_environment(
    table: EnvironmentConfig,
    keys: PromptsConfig,
    tokenizer: Tokenizer,
    stop: frozenset[int],
    failed: Path,
    needs_score: bool,
) -> Environment:
    """Build the environment that [rl.environment] names.

    Args:
        stop: ids that end a turn.
        failed: folder for the output of failed programs.
        needs_score: True if a reward reads the score of a program.

    Raises:
        UserError: if its function cannot be loaded, or its programs cannot run.
    """
    is_called_here = dist.get_rank() == 0 or table.kind != "function"  # a process of its own imports the function
    pool = environment_pool(table) if is_called_here else FunctionPool([])
    if table.kind != "function":
        return CommandEpisodes(table, keys, tokenizer, failed, needs_score=needs_score)
    threads = ThreadPoolExecutor(min(_CALLS_OF_A_RANK * dist.get_world_size(), _MOST_CALLS), "environment")
    return Conversations(pool, tokenizer, stop, keys.thinking, table.max_turns, threads)


class _Run:
    """Episodes that begin together, and their requests to the engine, on rank 0. Implements `Requests`."""

    def __init__(
        self,
        environment: Environment,
        prompt: Callable[[int], Prompt],
        requests: Sequence[tuple[int, Request]],
        is_stopped: Callable[[], bool],
    ):
        self._begin = partial(environment.begin, prompt)
        self._soon = environment.replies_soon
        self._members = [
            Member(number, request, Episode([], is_part=True), finish=partial(self._finish, index))
            for index, (number, request) in enumerate(requests)
        ]
        self._is_stopped = is_stopped
        self._left = len(requests)
        self._changed = threading.Condition()
        self._error = cast(BaseException | None, None)
        self._new = list[OpenRequest]()
        self._open = dict[int, OpenRequest]()
        self._dropped = list[int]()
        self._ended = dict[int, Completion]()
        self._count = self._tokens = 0

    def _finish(self, index: int, end: Episode | BaseException) -> None:
        with self._changed:
            if isinstance(end, Episode):
                self._members[index].end = end
                self._left = self._left - 1
            else:
                self._error = self._error or end
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._error is not None or not self._left or self._is_stopped()

    def ends(self) -> bytes:
        """Cancel unfinished episodes and return the packed ends of all; empty if any was unfinished.

        Raises the error of an episode, if there was one.
        """
        with self._changed:
            unfinished = self._left  # read before cancelled episodes end, which lowers it
        for member in self._members:
            if member.end.is_part and member.cancel is not None:
                member.cancel()
        if self._error is not None:
            raise self._error
        return b"" if unfinished else pack_groups({number: [member.end] for number, member in enumerate(self._members)})

    def by_servers(self, requests: OpenRequests) -> bytes:
        """Run all episodes with completions of servers, and return their `ends`."""
        self._begin(requests, self._members)
        with self._changed:
            while not self._is_over():
                self._changed.wait(_TICK_SECONDS)
                self._error = self._error or requests.error
        return self.ends()

    def ask(self, requests: Sequence[OpenRequest]) -> None:
        """See `Requests.ask`."""
        with self._changed:
            self._new += requests
            self._changed.notify_all()

    def drop(self, request: OpenRequest) -> None:
        """See `Requests.drop`."""
        with self._changed:
            self._new = [open_request for open_request in self._new if open_request is not request]
            dropped = [number for number, open_request in self._open.items() if open_request is request]
            self._dropped += [number for number in dropped if self._open.pop(number)]

    def exchange(self, completions: Mapping[int, Completion]) -> tuple[list[tuple[int, Request]], list[int]] | None:
        """See `Exchange`. Programs get their turns immediately, and their requests start as they come. Replies of an
        environment that `replies_soon` are waited for, and start at the end of the window after that of their turns."""
        if not self._tokens:
            self._begin(self, self._members)
        with self._changed:
            self._ended |= completions
            self._tokens += 1
            if self._soon and self._tokens % _WINDOW and self._open.keys() - self._ended:
                return [], []
            while not self._is_over():
                if not self._soon or len(self._new) + len(self._open) == self._left:
                    new = dict(enumerate(sorted(self._new, key=lambda request: request.request.seed), self._count))
                    self._new = []
                    self._count = self._count + len(new)
                    for number, completion in self._ended.items():
                        if number in self._open:
                            self._open.pop(number).done(completion)
                    self._ended = {}
                    self._open |= new
                    if self._open:
                        dropped = self._dropped
                        self._dropped = []
                        return [(number, request.request) for number, request in new.items()], dropped
                self._changed.wait(_TICK_SECONDS)
        return None


def run_episodes(
    environment: Environment,
    prompt: Callable[[int], Prompt],
    requests: Sequence[tuple[int, Request]],
    engine: LocalEngine | ServerEngine,
    rules: SamplingRules,
    is_stopped: Callable[[], bool],
) -> list[Episode] | None:
    """Run an episode for each pair of prompt number and request; None if a stop was requested. Collective.

    Args:
        prompt: returns the prompt with a number.
        is_stopped: polled on rank 0.
    """
    run = _Run(environment, prompt, requests, is_stopped)
    if isinstance(engine, ServerEngine):
        content = engine.answer(run.by_servers, rules)
    else:
        engine.serve(run.exchange, rules)
        content = run_on_first_rank(run.ends)
    return [end for (end,) in unpack_groups(content).values()] if content else None
