"""Episodes of an agent with the client of OpenAI on a real vLLM: `pytest -m servers`, as in test_vllm.py."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.storage.judge.jail import NO_JAIL
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout import programs
from glm46.tasks.rl.rollout.records import Request, SamplingRules, seed_behind
from tests.processes import wait_until
from tests.servers.policy import CLOSE, FAR, MARKS, Policy, log_probabilities, served

pytestmark = MARKS
EPISODES = 4


class ChatPolicy(Policy):
    """Stops at the markers of the chat format."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.rules = SamplingRules(1.0, frozenset(stop_ids(self.tokenizer)), self.tokenizer.vocab_size)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with served(ChatPolicy, tmp_path_factory.mktemp("vllm")) as made:
        yield made


def test_turns_have_other_random_numbers(policy):
    """vLLM begins its generator anew for each request."""
    first = [Request([3, 50, 1000, 9], seed, 8) for seed in range(150)]
    turns = policy.engine.generate(first, policy.rules)
    said = [[*turn.tokens, 9, 50] for turn in turns]
    then = [Request(of.prompt + new, seed_behind(of.seed, new), 8) for of, new in zip(first, said, strict=True)]

    def equal(requests: list[Request]) -> float:
        pairs = zip(turns, policy.engine.generate(requests, policy.rules), strict=True)
        found = [a == b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=False)]
        return sum(found) / len(found)

    shared = equal([one._replace(seed=of.seed) for one, of in zip(then, first, strict=True)])
    own = equal(then)
    print(f"tokens that equal those of the first turn: {shared:.3f} with its seed, {own:.3f} with their own")
    assert own < 0.05 and shared > 4 * own


def test_an_agent_over_an_update_has_the_trainers_logprobs_in_each_turn(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "jail_of_programs", lambda: NO_JAIL)  # it reads and writes the folder of the test
    monkeypatch.setenv("STEPS_FOLDER", str(tmp_path))
    engine, tokenizer, agent = policy.engine, policy.tokenizer, Path(__file__).with_name("agent.py")
    table = EnvironmentConfig(
        kind="command", command=(sys.executable, str(agent)), max_turns=2, seconds=300.0, tries=1,
        variables=("STEPS_FOLDER",),
    )  # fmt: skip
    episodes = CommandEpisodes(table, PromptsConfig(file="p.jsonl"), tokenizer, tmp_path)
    prompt = chat_prompt(tokenizer, [Message("user", "12 * 3?")], thinking=False)
    row = {"prompt": "12 * 3?"}
    begin = partial(episodes.begin, lambda number: Prompt(prompt, "12 * 3?", None, row=row))
    before = policy.on_disk(), policy.version
    try:
        engine.generate_ahead(tmp_path / "ahead", begin, goes_on=True)
        engine.background.add(0, [Request(prompt, seed, 400) for seed in range(EPISODES)], policy.version)
        engine.background.start()
        wait_until(lambda: len(list(tmp_path.glob("asked-*"))) == EPISODES, seconds=300)
        engine.background.halt()
        policy.step()
        (tmp_path / "updated").touch()
        ends = engine.take(1, {0}, lambda: False)[0]
    finally:
        episodes.close()
    models, gaps, apart = {before[1]: before[0], policy.version: policy.on_disk()}, [], []
    for end in ends:
        assert not end.fault and end.score == 6.0
        (completion,) = end.samples
        prompt = completion.prompt
        (start, stop), count = completion.replies[0], len(completion.tokens)
        assert completion.spans == [(0, before[1]), (stop, policy.version)] and len(completion.replies) == 1
        right = {v: log_probabilities(model, prompt, completion.tokens) for v, model in models.items()}
        given = torch.tensor(completion.logprobs)
        for first, last, own, other in ((0, start, *models), (stop, count, *reversed(models))):
            assert last > first
            gaps.append((given - right[own])[first:last].abs().max().item())
            apart.append((given - right[other])[first:last].abs().max().item())
    print(f"log-probabilities of {len(gaps)} turns differ from the trainer's by at most {max(gaps):.1e}")
    assert max(gaps) < CLOSE and min(apart) > FAR
