"""Completions survive the way from rank 0 to the others; an error between ends the work that waits for it.

What tells a server that generates from the policy from one that does not, for known distributions.
"""

import io
import queue

import numpy as np
import pytest

from glm46.tasks.rl.rollout import first_rank
from glm46.tasks.rl.rollout.first_rank import CollectiveRequest, run_on_first_rank
from glm46.tasks.rl.rollout.records import (
    LINES,
    Completion,
    Episode,
    KeptTokens,
    pack_groups,
    unpack_groups,
)
from glm46.tasks.rl.rollout.served_policy import ServedPolicy
from tests.processes import HANG_SECONDS


def test_completions_are_the_same_after_the_way():
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    completions = [
        Completion([5, 2], [-0.1, -1 / 3], "stop", [7, 7], routes),
        Completion([], [], "abort", [], None),
        Completion(
            [9, 9, 9],
            [-1.0, 0.0, -2e-30],
            "length",
            [7, 7, 8],
            routes[:1].astype(np.uint16),
            ((1, 2),),
            contradicted=((0, 8),),
            kept=KeptTokens(np.array([9, 4, 9], np.int32), np.array([2, 0, 1], np.int32)),
        ),
    ]
    first, *others = (one._replace(prompt=[7] * i) for i, one in enumerate(completions))
    ends = [
        Episode([], "a fault"), Episode([first], score=0.1), Episode(others, is_part=True), Episode([])
    ]  # fmt: skip
    groups = unpack_groups(pack_groups({5: ends[:1], 3: ends[1:]}))
    assert list(groups) == [5, 3]
    found = groups[5] + groups[3]
    assert [(end[1:], [s.prompt for s in end.samples]) for end in found] == [
        (end[1:], [s.prompt for s in end.samples]) for end in ends
    ]
    for before, after in zip(completions, (s._replace(prompt=()) for end in found for s in end.samples), strict=True):
        assert before[:4] == after[:4] and before[5:10] == after[5:10]
        assert (before.kept is None) == (after.kept is None)
        for sent, received in zip(before.kept or (), after.kept or (), strict=True):
            assert received.dtype == np.int32 and np.array_equal(sent, received)
        assert (before.routes is None) == (after.routes is None)
        if before.routes is not None:
            assert after.routes.dtype == before.routes.dtype and np.array_equal(before.routes, after.routes)
    assert unpack_groups(pack_groups({})) == {}


def test_stored_groups_are_read_and_written_again_to_the_byte():
    """A release that stores other lines raises `LINES`."""
    line = (
        b'{"5":[[[[[7,7],[[5,2,9],[-0.5,0.0,-1.25],"stop",[[0,7],[2,8]],"behind the line",[[1,2]],4,3,[[0,8]],null]],'
        b'[[3],[[6],[-2.0],"length",[[0,7]],null,[],0,0,[],null]]],"",0.5,false,"",5,1.5,{"exact":1.0}]],'
        b'"3":[[[],"a fault",null,false,"",-1,null,{}],'
        b'[[[[11],[[6],[-2.0],"length",[[0,7]],null,[],0,0,[],null]]],"",null,true,"",-1,null,{}]]}\n'
    )
    assert LINES == 3
    routes = io.BytesIO()
    np.save(routes, np.arange(6, dtype=np.uint8).reshape(3, 1, 2))
    groups = unpack_groups(line + routes.getvalue())
    assert groups[5][0].completion.versions == [7, 7, 8] and groups[3][1].completion.prompt == [11]
    assert pack_groups(groups) == line + routes.getvalue()


def test_work_that_asked_for_what_failed_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(first_rank.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(first_rank, "_send", lambda *_: None)
    ended: queue.SimpleQueue[RuntimeError] = queue.SimpleQueue()

    def fail() -> None:
        raise MemoryError

    def work() -> bytes:
        try:
            request.ask().result()
        except RuntimeError as error:
            ended.put(error)
        return b""

    request = CollectiveRequest(fail)
    with pytest.raises(MemoryError):
        run_on_first_rank(work, request)
    assert "failed" in str(ended.get(timeout=HANG_SECONDS))


VOCABULARY, LENGTH, COMPLETIONS = 200, 256, 8


class Categorical:
    """A policy whose tokens do not depend on those before, and a server that generates by a rule of its own."""

    def __init__(self, spread: float, seed: int = 0):
        self.chance = np.random.default_rng(seed)
        self.logits = self.chance.normal(size=VOCABULARY) * spread

    def logprobs(self, temperature: float) -> np.ndarray:
        scaled = self.logits / temperature
        return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()

    def score(self, sequences, temperature):
        logprobs = self.logprobs(temperature)
        entropy = -(np.exp(logprobs) * logprobs).sum()
        return [logprobs[row[1:]].tolist() for row in sequences], [[entropy] * (len(row) - 1) for row in sequences]

    def compare(self, temperature: float, generates: np.ndarray, *, length: int = LENGTH) -> tuple[str, bool]:
        """Generates are the probabilities that the server generates with; what it reports is right."""
        tokens = self.chance.choice(VOCABULARY, size=(COMPLETIONS, length), p=generates)
        reported = self.logprobs(temperature)
        generated = [([1, 2], Completion(row.tolist(), reported[row].tolist(), "length", [], None)) for row in tokens]
        return ServedPolicy(None, None, self.score, None, None).compare(generated, temperature)


def nucleus(probabilities: np.ndarray, share: float) -> np.ndarray:
    order = np.argsort(-probabilities)
    kept = order[: np.searchsorted(probabilities[order].cumsum(), share) + 1]
    found = np.zeros_like(probabilities)
    found[kept] = probabilities[kept]
    return found / found.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("length", [4, LENGTH])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_draws_from_the_policy_pass(spread, length, temperature):
    for seed in range(100):
        policy = Categorical(spread, seed)
        said, is_right = policy.compare(temperature, np.exp(policy.logprobs(temperature)), length=length)
        assert is_right and f"{COMPLETIONS * length} generated tokens" in said, (seed, said)


@pytest.mark.parametrize("rare", [1e-3, 1e-5])
def test_tokens_of_which_almost_all_are_the_likely_one_pass(rare):
    """Without a rare token their spread is 0, with one it is far from the mean: neither is a fault."""
    for seed in range(300):
        policy = Categorical(0.0, seed)
        policy.logits[0] = np.log(VOCABULARY / rare)
        assert policy.compare(1.0, np.exp(policy.logprobs(1.0)))[1]


@pytest.mark.parametrize("generate", [
    lambda policy: np.exp(policy.logprobs(0.8)), lambda policy: np.exp(policy.logprobs(1.25)),
    lambda policy: nucleus(np.exp(policy.logprobs(1.0)), 0.9), lambda policy: np.full(VOCABULARY, 1 / VOCABULARY),
], ids=["colder", "warmer", "top-p", "uniform"])  # fmt: skip
def test_draws_from_another_distribution_are_refused(generate):
    """Their log-probabilities are right, and the mean of log-probability and entropy is off by less than 0.5 nats."""
    for seed in range(20):
        policy = Categorical(2.0, seed)
        said, is_right = policy.compare(1.0, generate(policy))
        assert not is_right and "another distribution than the policy's" in said


def test_log_probabilities_of_another_temperature_are_refused():
    policy = Categorical(2.0)
    policy.score, score = lambda rows, temperature: score(rows, 0.5 * temperature), policy.score
    said, is_right = policy.compare(1.0, np.exp(policy.logprobs(1.0)))
    assert not is_right and "KL divergence" in said
