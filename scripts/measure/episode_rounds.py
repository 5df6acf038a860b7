"""Calls of the model for episodes of several turns: if all wait for the longest turn of a round, and if a turn joins
those that are generated. No model runs: a token is a call, and lengths are log-normal.

    PYTHONPATH=. python scripts/measure/episode_rounds.py
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch.distributed as dist

from glm46.tasks.rl.environment import run_episodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.open_requests import OpenRequest, Requests
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Episode, Request

_MEDIAN, _SIGMA, _LONGEST = 150, 0.8, 1500


class _Turns:
    """Episodes whose turns have given lengths; each asks for the next one at once."""

    def __init__(self, lengths: np.ndarray, *, replies_soon: bool):
        self._lengths, self.replies_soon = lengths.tolist(), replies_soon

    def begin(self, prompt: object, requests: Requests, members: Sequence[Member]) -> None:
        for member in members:
            self._ask(requests, member, self._lengths[member.number], NOTHING)

    def _ask(self, requests: Requests, member: Member, lengths: list[int], done: Completion) -> None:
        if not lengths:
            member.finish(Episode([done._replace(prompt=[1])]))
            return
        request = member.request._replace(max_new_tokens=lengths[0])
        requests.ask([OpenRequest(request, partial(self._ask, requests, member, lengths[1:]))])

    def close(self) -> None:
        pass


class _Rows:
    """An engine that counts its calls."""

    def __init__(self, rows: int):
        self._rows, self.calls = rows, 0

    def serve(self, exchange, rules) -> None:
        waiting, running, ended = list[tuple[int, int]](), dict[int, list[int]](), dict[int, Completion]()
        while (given := exchange(ended)) is not None:
            waiting += [(number, request.max_new_tokens) for number, request in given[0]]
            while waiting and len(running) < self._rows:
                number, length = waiting.pop(0)
                running[number] = [length, length]
            self.calls += 1
            for one in running.values():
                one[0] -= 1
            ended = {
                number: Completion([7] * length, [0.0] * length, "stop", [], None)
                for number, (left, length) in running.items() if not left
            }  # fmt: skip
            running = {number: one for number, one in running.items() if one[0]}


def _in_rounds(lengths: np.ndarray, rows: int) -> int:
    """Calls when a turn begins behind the longest of the turns before; a row that ends gets the next one of its."""
    calls = 0
    for of_round in lengths.T.tolist():
        ends = [0] * rows
        for length in of_round:
            ends[ends.index(min(ends))] += length
        calls += max(ends)
    return calls


def _joined(lengths: np.ndarray, rows: int, *, replies_soon: bool) -> int:
    engine, asked = _Rows(rows), [(number, Request([1], number, _LONGEST)) for number in range(len(lengths))]
    run_episodes(
        _Turns(lengths, replies_soon=replies_soon), lambda number: Prompt([1], "", None), asked, engine, None,
        lambda: False,
    )  # fmt: skip
    return engine.calls


def main() -> None:
    """Print a line for each number of episodes, rows and turns."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    print("episodes rows turns  rounds  idle  programs  idle  functions  idle")
    for episodes, rows in ((64, 64), (128, 64), (128, 32)):
        for turns in (2, 4, 8):
            found = np.random.default_rng(0).lognormal(np.log(_MEDIAN), _SIGMA, (episodes, turns))
            lengths = np.clip(found, 4, _LONGEST).astype(int)
            calls = [_in_rounds(lengths, rows), *(_joined(lengths, rows, replies_soon=soon) for soon in (False, True))]
            columns = "  ".join(f"{of:6d}  {1 - lengths.sum() / of / rows:4.0%}" for of in calls)
            print(f"{episodes:8d} {rows:4d} {turns:5d}  {columns}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
