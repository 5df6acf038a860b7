"""Episodes of any environment on the engine of the ranks, which admits what they ask while it generates."""

import threading
from functools import partial

import pytest
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.tasks.rl.environment import _WINDOW, run_episodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout.open_requests import OpenRequest
from glm46.tasks.rl.rollout.records import Completion, Episode, Request
from tests.processes import HANG_SECONDS
from tests.unit.tasks.rl.test_conversations import replying


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Stepping:
    """An engine that writes a token of each request at a time: as many as it may have, or those of a length."""

    def __init__(self, stop_token: int = 5, length=lambda request: request.max_new_tokens):
        self.begun, self.dropped, self._stop, self._length = [], [], stop_token, length

    def serve(self, exchange, rules) -> None:
        running, ended, step = {}, {}, 0
        while (given := exchange(ended)) is not None:
            self.begun += [(step, request.seed) for _, request in given[0]]
            self.dropped += given[1]
            running |= {number: [request, self._length(request)] for number, request in given[0]}
            running = {number: one for number, one in running.items() if number not in given[1]}
            for one in running.values():
                one[1] -= 1
            ended = {number: self._completion(one) for number, one in running.items() if not one[1]}
            running = {number: one for number, one in running.items() if one[1]}
            step += 1

    def _completion(self, one: list) -> Completion:
        count = self._length(one[0])
        return Completion([7] * (count - 1) + [self._stop], [-0.5] * count, "stop", [], None)


class Turns:
    """Episodes that ask for turns of given lengths, each as soon as the one before it has ended."""

    replies_soon = False

    def __init__(self, *lengths: tuple[int, ...]):
        self._lengths, self.at_turn = lengths, lambda number, turn: None

    def begin(self, prompt, requests, members) -> None:
        for number, member in enumerate(members):
            self._ask(requests, member, number, 0, None)

    def _ask(self, requests, member, number, turn, completion) -> None:
        self.at_turn(number, turn)
        if turn == len(self._lengths[number]):
            member.finish(Episode([completion._replace(prompt=member.request.prompt)]))
            return
        request = member.request._replace(seed=10 * number + turn, max_new_tokens=self._lengths[number][turn])
        asked = OpenRequest(request, partial(self._ask, requests, member, number, turn + 1))
        member.cancel = partial(requests.drop, asked)
        requests.ask([asked])

    def close(self) -> None:
        pass


def run(environment, engine, count: int, is_stopped=lambda: False):
    asked = [(number, Request([1, 2], number, 60)) for number in range(count)]
    return run_episodes(environment, lambda number: Prompt([1, 2], "?", None), asked, engine, None, is_stopped)


@pytest.mark.slow
def test_a_turn_of_a_program_joins_those_that_are_generated():
    engine = Stepping()
    ends = run(Turns((40,), (3, 5, 2), (3, 30)), engine, 3)
    assert engine.begun == [(0, 0), (0, 10), (0, 20), (4, 11), (4, 21), (10, 12)], "at the next call behind its turn"
    assert [len(end.completion.tokens) for end in ends] == [40, 2, 30] and not engine.dropped


@pytest.mark.slow
def test_what_an_episode_does_not_wait_for_any_more_is_dropped_and_a_stop_ends_all():
    episodes, engine, cancel = Turns((40,), (3, 5), (9,)), Stepping(), []

    def at_turn(number, turn):
        if (number, turn) == (1, 1):
            cancel[0]()

    episodes.at_turn = at_turn
    begin = episodes.begin

    def begin_and_see(prompt, requests, members):
        begin(prompt, requests, members)
        cancel.append(lambda: (members[0].cancel(), members[0].finish(Episode([], "rl.environment: gone"))))

    episodes.begin = begin_and_see
    ends = run(episodes, engine, 3)
    assert engine.dropped == [0] and [end.fault for end in ends] == ["rl.environment: gone", "", ""]
    engine = Stepping()
    assert run(Turns((40,), (9,)), engine, 2, is_stopped=lambda: len(engine.begun) == 2) is None


def test_episodes_that_a_stop_has_cut_are_no_ends():
    episodes, engine = Turns(), Stepping()

    def begin(prompt, requests, members):
        for member in members:  # as a conversation that waits for a thread ends when it is cancelled
            member.cancel = partial(member.finish, Episode([]))

    episodes.begin = begin
    assert run(episodes, engine, 2, is_stopped=lambda: True) is None


def test_an_error_of_an_environment_ends_the_run():
    episodes = Turns((4,), (6,))
    episodes.begin = lambda prompt, requests, members: members[1].finish(UserError("the function cannot be loaded"))
    with pytest.raises(UserError, match="cannot be loaded"):
        run(episodes, Stepping(), 2)


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_replies_of_a_function_join_at_the_same_tokens_whichever_comes_first(tokenizer, order):
    """A run is repeated to the bit if the same tokens are computed in the same batches."""
    count, replied = 4, [threading.Event() for _ in range(4)]

    def reply(answer):
        number = int(answer.prompt)
        before = number - 1 if order == "forward" else number + 1
        if not answer.history and 0 <= before < count and before // 2 == number // 2:  # of one window
            assert replied[before].wait(HANG_SECONDS)
        replied[number].set()
        return "Again?" if not answer.history else None, ""

    environment = replying(reply, tokenizer, 3)
    lengths = {number: 3 + 2 * number if number < 2 else 40 + number for number in range(count)}
    engine = Stepping(tokenizer.special["<|user|>"], lambda one: lengths.get(one.seed, 60))
    asked = [(number, Request([1, 2], number, 200)) for number in range(count)]
    ends = run_episodes(
        environment, lambda number: Prompt([1, 2], str(number), None), asked, engine, None, lambda: False
    )
    environment.close()
    steps = [step for step, _ in engine.begun]
    assert steps == [0] * 4 + [2 * _WINDOW - 1] * 2 + [4 * _WINDOW - 1] * 2, steps
    second = [seed for _, seed in engine.begun[4:]]
    assert second[:2] == sorted(second[:2]) and second[2:] == sorted(second[2:]), "in an order of their own"
    assert all(len(end.completion.replies) == 1 and not end.fault for end in ends)
