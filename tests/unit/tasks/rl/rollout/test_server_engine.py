"""The engine of servers in one process, against stubs."""

import asyncio
import contextlib
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm46.compute.distributed.process import join, leave
from glm46.config.errors import UserError
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig
from glm46.config.rollout import RolloutConfig
from glm46.files.threads import in_thread
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.environment import run_episodes
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout import server_engine, servers
from glm46.tasks.rl.rollout.records import Episode, Request, SamplingRules, seed_behind
from glm46.tasks.rl.rollout.served_policy import CHANGED, ServedPolicy
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.sampling import Sampler
from glm46.tasks.rl.task import Reinforcement
from tests.processes import wait_until
from tests.unit.tasks.rl.rollout.stub_server import STOP, StubServer, generate, logprob, scores

PROGRAM = Path(__file__).parents[1] / "program.py"
RULES = SamplingRules(1.0, frozenset({STOP}), vocab_size=50)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    monkeypatch.setattr(servers, "_RESTART_TICK_SECONDS", 0.05)
    monkeypatch.setattr(ServedPolicy, "compare", lambda *_: ("as the policy", True))
    join(60.0)
    yield
    leave()


class Policy:
    """Its weights are a version, which is that of the stubs' model."""

    def __init__(self):
        self.version = 0

    def export(self, folder):
        folder.mkdir(parents=True)

    def score(self, sequences, temperature):
        return scores(self.version, sequences), None

    @contextlib.contextmanager
    def changed(self):
        before, self.version = self.version, CHANGED
        yield
        self.version = before


def test_folder_that_a_server_was_started_with_stays_until_it_draws(stubs, monkeypatch, tmp_path):
    """It reads the weights when its imports are done, some updates after its start."""
    monkeypatch.setattr(server_engine, "_RESTART_SECONDS", 0.2)
    policy, lines = Policy(), []
    config = RolloutConfig(
        kind="vllm", urls=[stub.url for stub in stubs], max_new_tokens=6,
        launch=[sys.executable, "-c", "import time; time.sleep(60)", "{folder}", "{port}"],
    )  # fmt: skip
    served = ServedPolicy(policy.export, None, policy.score, None, policy.changed)
    options = {"prompts": [[5, 6, 7, 8]], "rules": RULES, "padding": range(50, 52), "say": lines.append}
    engine = ServerEngine(config, folder=tmp_path, policy=served, **options)

    def folders_after(version: int) -> list[str]:
        policy.version = version
        engine.update(version)
        engine.generate([Request([3, 4], 1, 6)], RULES)
        return sorted(path.name for path in tmp_path.glob("version-*"))

    try:
        assert folders_after(1) == ["version-00000001"]
        stubs[1].stop()
        process = engine._launched._running[stubs[1].port]
        process.kill()
        process.wait()
        for version in (2, 3, 4):
            folders = folders_after(version)
        assert folders == ["version-00000002", "version-00000004"], lines
        assert engine._launched._running[stubs[1].port].args[-2].endswith("version-00000002")
        back = StubServer(port=stubs[1].port)
        assert folders_after(5) == ["version-00000005"] and back.version == 5
        back.stop()
    finally:
        engine.close()
    assert not list(tmp_path.glob("version-*"))


def test_a_close_that_cannot_write_groups_still_frees_the_disk_and_ends_all(tmp_path, monkeypatch):
    def fail(seconds: float) -> None:
        raise UserError("No space left on device")

    config, done = RolloutConfig(kind="vllm", urls=["http://127.0.0.1:8000"], max_new_tokens=6), []
    served = ServedPolicy(*[None] * 5)
    options = {"prompts": [[5, 6, 7, 8]], "rules": RULES, "padding": range(50, 52)}
    engine = ServerEngine(config, folder=tmp_path, policy=served, **options)
    engine._background = SimpleNamespace(halt=fail, keep=lambda numbers, before: done.append("groups"))
    monkeypatch.setattr(engine._launched, "stop", lambda: done.append("servers"))
    (tmp_path / "version-00000001").mkdir()
    pools = {name: SimpleNamespace(close=partial(done.append, name)) for name in ("rewards", "environment")}
    sampler = Sampler(None, config, None, engine, [], RULES, 0, **pools)
    task = SimpleNamespace(_sampler=sampler, _journal=SimpleNamespace(close=partial(done.append, "journal")))
    with pytest.raises(UserError, match="No space left"):
        Reinforcement.close(task)
    assert done == ["groups", "servers", "environment", "rewards", "journal"] and not list(tmp_path.iterdir())


def test_a_close_does_not_wait_for_a_server_that_takes_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(server_engine, "_HALT_SECONDS", 0.2)
    config = RolloutConfig(kind="vllm", urls=["http://127.0.0.1:8000"], max_new_tokens=6)
    options = {"prompts": [[5, 6, 7, 8]], "rules": RULES, "padding": range(50, 52)}
    engine = ServerEngine(config, folder=tmp_path, policy=ServedPolicy(*[None] * 5), **options)
    is_loading = threading.Event()

    async def load() -> None:
        is_loading.set()
        await asyncio.sleep(600.0)

    engine._servers.join_again = load
    engine.generate_ahead(tmp_path / "ahead", goes_on=True)
    engine.background.start()
    assert is_loading.wait(60.0)
    in_thread(engine.close).result(60.0)


@pytest.mark.slow
def test_programs_ask_the_policy_that_servers_have(stubs, tmp_path, monkeypatch):
    """And a completion that its server does not end drops its sample, not as a reward of 0."""
    policy, tokenizer = Policy(), load_tokenizer("builtin")
    config = RolloutConfig(kind="vllm", urls=[stub.url for stub in stubs], max_new_tokens=50, deadline_seconds=60.0)
    served = ServedPolicy(policy.export, None, policy.score, None, policy.changed)
    prompt = chat_prompt(tokenizer, [Message("user", "Hi")], thinking=False)
    engine = ServerEngine(
        config, folder=tmp_path, policy=served, prompts=[prompt], rules=RULES, padding=range(50, 52), say=print
    )
    table = EnvironmentConfig(kind="command", command=(sys.executable, "-S", str(PROGRAM)), max_turns=2, seconds=100.0)
    keys = PromptsConfig(file="p.jsonl")
    episodes = CommandEpisodes(table, keys, tokenizer, tmp_path)
    row = {"prompt": "Hi", "kind": "cut"}
    asked = [(0, Request(prompt, seed, 50)) for seed in range(4)]
    read = lambda number: Prompt(prompt, "Hi", None, row=row)  # noqa: E731

    def run() -> list[Episode]:
        return run_episodes(episodes, read, asked, engine, RULES, lambda: False)

    try:
        policy.version = 3
        engine.update(3)
        for stub in stubs:
            stub.generated.clear()
        for (_, request), end in zip(asked, run(), strict=True):
            (completion,) = end.samples
            assert not end.fault and completion.prompt == prompt and set(completion.versions) == {3}
            expected = generate(prompt, seed_behind(request.seed, [*prompt, -6]), 6)  # the program states the limit
            assert completion.tokens[: len(expected)] == expected
            assert completion.logprobs[: len(expected)] == [logprob(3, token) for token in expected]
            assert len(completion.replies) == 1
        seeds = [seed for stub in stubs for _, seed in stub.generated]
        assert len(seeds) == len({*seeds}) == 8, "a server begins the same random numbers for the same seed"
        engine._servers.deadline = 0.3
        for stub in stubs:
            stub.fault = "hang"
        assert all("did not finish" in end.fault and not end.samples for end in run())
    finally:
        episodes.close()
        engine.close()


@pytest.mark.slow
def test_a_turn_goes_on_through_an_update_and_its_program_only_waits(stubs, tmp_path):
    policy, tokenizer = Policy(), load_tokenizer("builtin")
    config = RolloutConfig(kind="vllm", urls=[stub.url for stub in stubs], max_new_tokens=50, deadline_seconds=60.0)
    served = ServedPolicy(policy.export, None, policy.score, None, policy.changed)
    prompt = chat_prompt(tokenizer, [Message("user", "Hi")], thinking=False)
    engine = ServerEngine(
        config, folder=tmp_path / "weights", policy=served, prompts=[prompt], rules=RULES, padding=range(50, 52)
    )
    table = EnvironmentConfig(kind="command", command=(sys.executable, "-S", str(PROGRAM)), max_turns=2, seconds=100.0)
    episodes = CommandEpisodes(table, PromptsConfig(file="p.jsonl"), tokenizer, tmp_path)
    row = {"prompt": "Hi", "kind": "cut"}
    begin = partial(episodes.begin, lambda number: Prompt(prompt, "Hi", None, row=row))
    try:
        policy.version = 3
        engine.update(3)
        engine.generate_ahead(tmp_path / "ahead", begin, goes_on=True)
        for stub in stubs:
            stub.fault = "hang"
            stub.generated.clear()
        engine.background.add(8, [Request(prompt, seed, 50) for seed in (1, 2)], 3)
        engine.background.start()
        wait_until(lambda: sum(len(stub.generated) for stub in stubs) == 2)
        engine.background.halt()
        for stub in stubs:
            stub.fault = ""
        policy.version = 4
        engine.update(4)
        ends = engine.take(1, {8}, lambda: False)[8]
        for seed, end in zip((1, 2), ends, strict=True):
            (completion,) = end.samples
            own = seed_behind(seed, [*prompt, -6])
            before = generate(prompt, own, 6)[:3]  # half of the first turn
            after = generate(prompt + before, own + 3, 3)
            assert completion.prompt == prompt and completion.tokens[:6] == before + after
            assert completion.spans[:2] == [(0, 3), (3, 4)] and completion.logprobs[3] == logprob(4, after[0])
        assert [path.name for path in (tmp_path / "ahead").iterdir()] == ["prompt_00000008"]
    finally:
        episodes.close()
        engine.close()
