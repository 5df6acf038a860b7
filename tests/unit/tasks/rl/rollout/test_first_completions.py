"""What tells a server that generates from the policy from one that does not, for known distributions."""

import numpy as np
import pytest

from glm46.tasks.rl.rollout.records import Completion
from glm46.tasks.rl.rollout.served_policy import ServedPolicy

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
