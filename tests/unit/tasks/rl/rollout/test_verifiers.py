"""A task set and a harness of verifiers, by its own wheel, in the Python that GLM46_VERIFIERS_PYTHON names: the
contract of deploy/environments/verifiers_worker.py. Without that Python the names that the worker uses are looked for
in the source of the wheel."""

import ast
import asyncio
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from glm46.config.errors import UserError
from glm46.config.rl import RLConfig
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.judge.jail import BUBBLEWRAP, NO_JAIL, has_bubblewrap
from glm46.tasks.rl.episode_checks import declared_packages, require_episodes
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.programs import ProgramOutcome, Programs
from glm46.tasks.rl.rollout.records import Completion, Request
from glm46.tasks.rl.rollout.session import Session
from glm46.tasks.rl.rollout.workers import Workers
from tests.wheels import download

PYTHON = os.environ.get("GLM46_VERIFIERS_PYTHON", "")
WORKER = Path(__file__).parents[5] / "deploy/environments/verifiers_worker.py"
TOKENIZER = load_tokenizer("builtin")
WHEEL = "verifiers==0.4.0", "cf73b3089c12ff1e2471130153cfa93cfe9beb8b49abfb2ceb917658d99fefe2"
USED = {
    "env.py": {"Env": ("taskset", "run_episode", "serving")},
    "taskset.py": {"Taskset": ("include", "take", "__iter__")},
    "task.py": {"TaskData": ("idx", "name", "prompt"), "Task": ("data",)},
    "episode.py": {"Episode": ("errors", "traces")},
    "trace.py": {"Trace": ("errors", "reward"), "Error": ("type", "message")},
    "configs/client.py": {"BaseClientConfig": ("base_url", "api_key_var")},
    "clients/client.py": {"ModelContext": ("model", "client")},
}
"""Names that the worker uses, by file and class of verifiers/v1."""
OBJECTS = {"environment", "task", "episode", "trace", "error", "faults"}
"""Variables of the worker that hold what verifiers made."""
needs_verifiers = pytest.mark.skipif(not PYTHON, reason="GLM46_VERIFIERS_PYTHON names no Python with verifiers 0.4")


ENVIRONMENT = {"PYTHONPATH": str(WORKER.parent), "PATH": os.defpath}


class Played(NamedTuple):
    """The end of an episode, and what the endpoint recorded."""

    ended: ProgramOutcome
    score: float | None
    session: Session


def run_worker(monkeypatch, jail: str, *episodes: tuple[int, list[str], int]) -> list[Played]:
    """Episodes of one worker: each has a task, the answers of the policy, and its most tokens."""
    monkeypatch.setenv("PYTHONPATH", str(WORKER.parent))
    programs = Programs((), ())
    programs._jail = jail

    async def play(workers: Workers, endpoint: PolicyEndpoint, task: int, answers: list[str], most: int) -> Played:
        def ask(asked) -> None:
            for one in asked:
                tokens = [*TOKENIZER.encode("\n" + answers.pop(0)).tolist(), TOKENIZER.special["<|user|>"]]
                one.done(Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens), None))

        prompt = chat_prompt(TOKENIZER, [Message("user", "123456")], thinking=False)
        session = Session(TOKENIZER, Request(prompt, 3, most), thinking=False, most_turns=4)
        episode = endpoint.open(session, 4, SimpleNamespace(ask=ask, drop=lambda one: None))
        row = {"prompt": "as of the task", "task": task}
        return Played(*await workers.run(row, "", 300.0, episode), session)

    async def whole() -> list[Played]:
        endpoint = PolicyEndpoint(print)
        server = await endpoint.start()
        words = [PYTHON, str(WORKER), "--taskset", "second_try", "--env", '{"taskset": {"tasks": 9}}']
        workers = Workers(programs, words, 1)
        found, processes = [], set()
        for episode in episodes:
            found.append(await play(workers, endpoint, *episode))
            processes |= {one.program.process.pid for one in workers._idle}
        await workers.close()
        server.close()
        assert len(processes) == 1, "it stays"
        return found

    return asyncio.run(whole())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """The digits of each task, as the worker writes them."""
    folder = tmp_path_factory.mktemp("prompts")
    words = [PYTHON, str(WORKER), "--taskset", "second_try", "--write-prompts", "prompts.jsonl", "--most-prompts", "9"]
    subprocess.run(words, check=True, cwd=folder, env=ENVIRONMENT | {"HOME": str(folder)})
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert [row["task"] for row in rows] == [*range(9)]
    return [row["prompt"] for row in rows]


def names_of(node: ast.AST) -> set[str]:
    """Functions, classes and imports of a module, or members of a class, those that its __init__ sets too."""
    found = {alias.asname or alias.name for one in node.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    found |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in node.body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(one.name)
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            found |= {part.attr for part in ast.walk(one) if isinstance(part, ast.Attribute)}
    return found


@pytest.mark.slow
def test_the_wheel_has_what_the_worker_uses(tmp_path):
    with zipfile.ZipFile(download(*WHEEL, tmp_path)) as wheel:

        def parse(name: str) -> ast.Module:
            return ast.parse(wheel.read(f"verifiers/v1/{name}"))

        worker = ast.parse(WORKER.read_text())
        imported = [node for node in ast.walk(worker) if isinstance(node, ast.ImportFrom) and "verif" in node.module]
        files = {"verifiers.v1.utils.loaders": "utils/loaders.py", "verifiers.v1": "__init__.py"}
        for node in imported:
            assert {alias.name for alias in node.names} <= names_of(parse(files[node.module]))
        assert {node.module for node in imported} == files.keys()
        for file, classes in USED.items():
            found = {node.name: names_of(node) for node in parse(file).body if isinstance(node, ast.ClassDef)}
            for name, members in classes.items():
                assert set(members) <= found[name], f"{file}: {name}"
    known = {member for classes in USED.values() for members in classes.values() for member in members}
    for node in ast.walk(worker):
        if isinstance(node, ast.Attribute) and {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & OBJECTS:
            assert node.attr in known, f"{ast.unparse(node)} is not in the table of what the worker uses"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("EvalClientConfig", "ModelContext"):
            assert {keyword.arg for keyword in node.keywords} <= known


@needs_verifiers
@pytest.mark.slow
@pytest.mark.parametrize("jail", [
    pytest.param(BUBBLEWRAP, marks=pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap does not start here")),
    NO_JAIL,
])  # fmt: skip
def test_episodes_are_recorded_and_rewarded_one_after_another(jail, monkeypatch, prompts):
    right = "".join(sorted(prompts[1]))
    one, other, cut, last = run_worker(
        monkeypatch, jail, (1, ["231", right], 200), (2, ["231", right], 200), (1, ["231"], 6), (1, [right], 200)
    )
    assert (one.ended.fault, one.score) == ("", 1.0), one.ended
    (sample,) = one.session.samples()
    assert len(one.session.turns) == 2 and len(sample.replies) == 1, "one conversation of two turns"
    assert [message["content"] for message in one.session.conversation()] == [prompts[1], "231", prompts[1], right]
    assert (other.ended.fault, other.score) == ("", 0.0) and len(other.session.turns) == 2
    assert cut.ended.fault.startswith("verifiers: ") and cut.score is None, "no room for a second turn"
    assert len(cut.session.turns) == 1
    assert (last.ended.fault, last.score, len(last.session.turns)) == ("", 1.0, 1)


def test_a_python_without_verifiers_is_told_the_remedy(tmp_path):
    words = [sys.executable, "-S", str(WORKER), "--taskset", "second_try"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1 and "pip install 'verifiers>=0.4,<0.5'" in ended.stderr
    environment = {"kind": "worker", "command": words}
    config = RLConfig.model_validate({"prompts_per_rollout": 1, "environment": environment})
    with pytest.raises(UserError, match=r"verifiers_worker.py declares 'verifiers<0.5,>=0.4', and .*install it"):
        require_episodes(config.environment, config.prompts, [])


@needs_verifiers
def test_a_python_with_verifiers_is_not_refused():
    environment = {"kind": "worker", "command": [PYTHON, str(WORKER), "--taskset", "second_try"]}
    config = RLConfig.model_validate({"prompts_per_rollout": 1, "environment": environment})
    require_episodes(config.environment, config.prompts, [])
    assert [one.name for one in declared_packages(WORKER)] == ["verifiers"]
