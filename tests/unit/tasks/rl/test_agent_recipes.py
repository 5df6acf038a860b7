"""Agents of the recipes, with small models: their programs use a tool and are judged, and a policy trains on them."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from glm46.config.loader import load_config
from glm46.config.rl import RLConfig
from glm46.config.rollout import RolloutConfig
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import RewardRule
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.records import Completion, SamplingRules, VersionSpan
from glm46.tasks.rl.rollouts import generate_rollout
from glm46.tasks.rl.sampling import Sampler
from glm46.tasks.rl.task import train
from tests.unit.tasks.rl.samples import InRounds

RECIPES = [Path(__file__).parents[4] / "train_configs" / f"{name}_rl_agent.toml" for name in ("air", "glm47")]
TASK = "Write f, which doubles a number."
TURNS = [  # of a policy: it tries its function, answers with it, and in the last turn has nothing more to try
    "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>print(6 * 7)\nopen('kept', 'w')</arg_value>\n</tool_call>",
    "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>import os; print(os.listdir(), 'KEY' in str(os.environ))"
    "</arg_value>\n</tool_call>",
    "It is\n```python\ndef f(x):\n    return 2 * x\n```",
]


class Scripted(InRounds):
    """An engine that gives the turns one after another: a request has as many calls as turns before it."""

    def __init__(self, tokenizer):
        self._tokenizer, self.asked = tokenizer, []

    def generate(self, requests, rules):
        self.asked += [self._tokenizer.decode(request.prompt) for request in requests]
        found = []
        for text in self.asked[-len(requests) :]:
            turn = TURNS[text.count("</tool_call>") - 1]  # the tools' own rules have one
            stop = "<|observation|>" if "tool_call" in turn else "<|user|>"
            pieces = re.split(r"(<[^<>]+>)", f"\n<think>I see.</think>\n{turn}{stop}")
            special = self._tokenizer.special
            tokens = [
                token
                for piece in pieces
                for token in ([special[piece]] if piece in special else self._tokenizer.encode(piece).tolist())
            ]
            found.append(Completion(tokens, [-0.5] * len(tokens), "stop", [VersionSpan(0, 7)], None))
        return found

    def close(self) -> None:
        pass


def small(recipe: Path) -> RLConfig:
    """The section of a recipe for few samples, with this Python; a machine may have no sandbox."""
    rl = load_config(recipe).rl
    command = (sys.executable, *rl.environment.command[1:])
    environment = rl.environment.model_copy(update={"command": command, "sandbox": "auto", "seconds": 200.0})
    return rl.model_copy(update={"prompts_per_rollout": 1, "group_size": 2, "environment": environment})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_program_of_a_recipe_uses_its_tool_and_is_judged(recipe, tokenizer, tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    config = small(recipe).model_copy(update={"dynamic_sampling": False}).resolved()  # all answers are right here
    engine, rules = Scripted(tokenizer), SamplingRules(1.0, frozenset(stop_ids(tokenizer)), tokenizer.vocab_size)
    tokens = chat_prompt(tokenizer, [Message("user", TASK)], thinking=True)
    tests = ["assert f(4) == 8", "assert f(0) == 0"]
    prompt = Prompt(tokens, TASK, tests, "p.jsonl:1", {"prompt": TASK, "label": tests})
    pool = FunctionPool([RewardRule(one.name, seconds=100.0) for one in config.rewards])
    length = RolloutConfig.model_validate({"max_new_tokens": 4000})
    of = Sampler(config, length, tokenizer, engine, [prompt], rules, 0, pool)
    of.environment = CommandEpisodes(config.environment, config.prompts, tokenizer, tmp_path / "no")
    try:
        rollout = generate_rollout(of, of.generate_groups, 7, 0)
    finally:
        of.environment.close()
        pool.close()
        dist.destroy_process_group()
    assert not list(tmp_path.iterdir()), "no program failed"
    assert rollout.reward.tolist() == [1.0, 1.0]
    assert len(rollout.tokens) - rollout.prompt_lengths.sum() > len(rollout.logprobs) > 0, "replies are no targets"
    first, *_, last = sorted(engine.asked, key=len)
    assert "one fenced block" in first and '"name": "python"' in first and TASK in first
    assert "<tool_response>\n42\n\n</tool_response>" in last and "['kept'] False" in last


LIMITS = {
    "import os\nfor _ in range(128): os.write(1, b'x' * 2**20)\nos.write(1, b'end')": (r"x+", 600),
    "print(len(bytearray(2**34)))": (r"(?s).*MemoryError\n", 600),
    "print('begun', flush=True)\nwhile True: pass": (r"(begun\n)?\nerror: it took more than 1 s", 1),
}


@pytest.mark.parametrize("code", LIMITS)
def test_the_tool_of_the_agent_has_limits(monkeypatch, tmp_path, code):
    """Of what it prints, which is kept on the disk, of memory and of time."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "http://localhost/v1")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("agent", RECIPES[0].parent / "programs" / "code_agent.py")
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    expected, agent.SECONDS = LIMITS[code]
    assert re.fullmatch(expected, agent.run({"function": {"arguments": json.dumps({"code": code})}}))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_small_policy_trains_by_a_recipe(recipe, make_run, tmp_path):
    """Of a turn each: random weights call no tool. Servers and staleness: tests/ranks/test_episodes_ahead.py."""
    keys = small(recipe).model_dump(exclude_unset=True, exclude={"prompts", "rewards", "routing_replay"})
    config = make_run(
        "run", 2, keys | {"prompts_per_rollout": 2}, {"max_new_tokens": 1200},
        training={"steps": 2, "global_batch_size": 4, "local_batch_size": 1, "seq_len": 2048},
        checkpoint={"enable": False},
    )  # fmt: skip
    assert config.rl.environment.command[1].endswith("code_agent.py") and config.rl.algorithm == keys["algorithm"]
    assert train(config) == 0
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in found if "reward" in row]
    assert len(rows) == 2 and all(row["dropped_samples"] == 0 and row["grad_norm"] > 0 for row in rows)
