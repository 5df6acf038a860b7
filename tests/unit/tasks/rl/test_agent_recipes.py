"""Agents of the recipes, with small models: their programs use a tool and are judged, and a policy trains on them."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from glm46.config.loader import load_config
from glm46.config.rl import RLConfig
from glm46.config.rollout import RolloutConfig
from glm46.operate.launch.train_rank import train
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import RewardRule
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.records import Completion, SamplingRules
from glm46.tasks.rl.rollouts import generate_rollout
from glm46.tasks.rl.sampling import Sampler
from tests.builders import metric_rows
from tests.unit.tasks.rl.samples import InRounds

FOLDER = Path(__file__).parents[4] / "train_configs"
PROGRAMS = FOLDER / "programs"
RECIPES = [FOLDER / f"{name}_rl_{kind}.toml" for kind in ("agent", "search") for name in ("air", "glm47")]
PASSAGES = [
    {"title": "Oker", "text": "The Oker is a river of the Harz. It is 128 km long."},
    {"title": "Harz", "text": "The highest mountain of the Harz is the Brocken, of 1141 m."},
    {"title": "Bode", "text": "The Bode rises below the Brocken."},
]


class Agent(NamedTuple):
    """A task, its label, and turns of a policy that solves it, the last of which is the answer."""

    tool: str
    task: str
    label: str | list[str]
    turns: list[str]
    rule: str
    shown: list[str]
    """The rule that the program gives, and what the policy sees of the tool's replies in its last turn."""


def called(tool: str, key: str, value: str) -> str:
    return f"<tool_call>{tool}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


CODE = Agent(
    "python", "Write f, which doubles a number.", ["assert f(4) == 8", "assert f(0) == 0"],
    [
        called("python", "code", "print(6 * 7)\nopen('kept', 'w')"),
        called("python", "code", "import os; print(os.listdir(), 'KEY' in str(os.environ))"),
        "It is\n```python\ndef f(x):\n    return 2 * x\n```",
    ],
    "one fenced block", ["<tool_response>\n42\n\n</tool_response>", "['kept'] False"],
)  # fmt: skip
SEARCH = Agent(
    "search", "How high is the highest mountain of the Harz?", ["1,141 m", "1141 m"],
    [called("search", "query", "highest mountains (Harz)"), called("search", "query", '"!'), "1141 m"],
    "the answer alone", [f"<tool_response>\nHarz\n{PASSAGES[1]['text']}\n\nOker\n", "error: query: no words"],
)  # fmt: skip


class Scripted(InRounds):
    """An engine that gives turns one after another: a request has as many calls as turns before it."""

    def __init__(self, tokenizer, turns):
        self._tokenizer, self._turns, self.asked = tokenizer, turns, []

    def generate(self, requests, rules):
        self.asked += [self._tokenizer.decode(request.prompt) for request in requests]
        found = []
        for text in self.asked[-len(requests) :]:
            turn = self._turns[text.count("</tool_call>") - 1]  # the tools' own rules have one
            stop = "<|observation|>" if "tool_call" in turn else "<|user|>"
            pieces = re.split(r"(<[^<>]+>)", f"\n<think>I see.</think>\n{turn}{stop}")
            special = self._tokenizer.special
            tokens = [
                token
                for piece in pieces
                for token in ([special[piece]] if piece in special else self._tokenizer.encode(piece).tolist())
            ]
            found.append(Completion(tokens, [-0.5] * len(tokens), "stop", [7] * len(tokens), None))
        return found

    def close(self) -> None:
        pass


def small(recipe: Path, folder: Path) -> RLConfig:
    """The section of a recipe for few samples, with this Python and an index in the folder; a machine may have no
    sandbox."""
    rl = load_config(recipe).rl
    program, *index = rl.environment.command[1:]
    command = (sys.executable, program, *(str(make_index(folder)) for _ in index))
    environment = rl.environment.model_copy(update={"command": command, "sandbox": "auto", "seconds": 200.0})
    return rl.model_copy(update={"prompts_per_rollout": 1, "group_size": 2, "environment": environment})


def make_index(folder: Path) -> Path:
    index, passages = folder / "passages" / "index.db", folder / "passages.jsonl"
    passages.write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    words = [sys.executable, str(PROGRAMS / "search_agent.py"), str(index), "--make", str(passages)]
    subprocess.run(words, check=True)
    return index


def loaded(name: str, monkeypatch):
    """A program as a module."""
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(variable, "http://localhost/v1")
    spec = importlib.util.spec_from_file_location("agent", PROGRAMS / name)
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    return agent


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_program_of_a_recipe_uses_its_tool_and_is_judged(recipe, tokenizer, tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    agent = SEARCH if "search" in recipe.stem else CODE
    config = small(recipe, tmp_path).model_copy(update={"dynamic_sampling": False}).resolved()  # all answers are right
    engine, rules = (
        Scripted(tokenizer, agent.turns),
        SamplingRules(1.0, frozenset(stop_ids(tokenizer)), tokenizer.vocab_size),
    )
    tokens = chat_prompt(tokenizer, [Message("user", agent.task)], thinking=True)
    row = {"prompt": agent.task, "label": agent.label}
    prompt = Prompt(tokens, agent.task, agent.label, "p.jsonl:1", row)
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
    assert not (tmp_path / "no").exists(), "no program failed"
    assert rollout.reward.tolist() == [1.0, 1.0]
    assert len(rollout.tokens) - rollout.prompt_lengths.sum() > len(rollout.logprobs) > 0, "replies are no targets"
    first, *_, last = sorted(engine.asked, key=len)
    assert agent.rule in first and f'"name": "{agent.tool}"' in first and agent.task in first
    assert all(text in last for text in agent.shown), last


LIMITS = {
    "import os\nfor _ in range(128): os.write(1, b'x' * 2**20)\nos.write(1, b'end')": (r"x+", 600),
    "print(len(bytearray(2**34)))": (r"(?s).*MemoryError\n", 600),
    "print('begun', flush=True)\nwhile True: pass": (r"(begun\n)?\nerror: it took more than 1 s", 1),
}


@pytest.mark.parametrize("code", LIMITS)
def test_the_tool_of_the_agent_has_limits(monkeypatch, tmp_path, code):
    """Of what it prints, which is kept on the disk, of memory and of time."""
    monkeypatch.chdir(tmp_path)
    agent = loaded("code_agent.py", monkeypatch)
    expected, agent.SECONDS = LIMITS[code]
    assert re.fullmatch(expected, agent.run({"function": {"arguments": json.dumps({"code": code})}}))


QUERIES = {
    '{"query": "Oker OR NEAR(x) * \\"-"}': "Oker\nThe Oker is a river",
    '{"query": "mountain of rivers"}': "The highest mountain of the Harz",
    '{"query": "Elbe"}': "(nothing was found)",
    '{"query": "_"}': "(nothing was found)",
    '{"query": 5}': "error: TypeError",
    '["query"]': "error: TypeError",
    '{"words": "Oker"}': "error: KeyError",
    "{": "error: JSONDecodeError",
}


def test_the_search_of_the_agent_takes_any_words(monkeypatch, tmp_path):
    agent, index = loaded("search_agent.py", monkeypatch), make_index(tmp_path)
    monkeypatch.setattr(agent, "MOST_SHOWN", 40)
    before = sorted(path.name for path in index.parent.iterdir())
    for query, expected in QUERIES.items():
        found = agent.search(index, {"function": {"arguments": query}})
        assert expected in found and all(len(line) <= 40 for line in found.split("\n") if "error" not in line), query
    assert sorted(path.name for path in index.parent.iterdir()) == before == ["index.db"]


def test_a_damaged_passage_leaves_the_index_as_it_was(monkeypatch, tmp_path):
    agent, index = loaded("search_agent.py", monkeypatch), make_index(tmp_path)
    content = index.read_bytes()
    passages = tmp_path / "other.jsonl"
    passages.write_text('{"text": "right"}\n{"title": "no text"}\n')
    with pytest.raises(SystemExit, match=r"other.jsonl:2: KeyError\('text'\); write"):
        agent.make_index(index, passages)
    assert index.read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_small_policy_trains_by_a_recipe(recipe, make_run, tmp_path):
    """Of a turn each: random weights call no tool. Servers and staleness: tests/ranks/test_episodes.py."""
    keys = small(recipe, tmp_path).model_dump(exclude_unset=True, exclude={"prompts", "rewards", "routing_replay"})
    config = make_run(
        "run", 2, keys | {"prompts_per_rollout": 2}, {"max_new_tokens": 1200},
        training={"steps": 2, "global_batch_size": 4, "local_batch_size": 1, "seq_len": 2048},
        checkpoint={"enable": False},
    )  # fmt: skip
    program = "search_agent.py" if "search" in recipe.stem else "code_agent.py"
    assert config.rl.environment.command[1].endswith(program) and config.rl.algorithm == keys["algorithm"]
    assert train(config) == 0
    found = metric_rows(tmp_path / "run")
    rows = [row for row in found if "reward" in row]
    assert len(rows) == 2 and all(row["dropped_samples"] == 0 and row["grad_norm"] > 0 for row in rows)
