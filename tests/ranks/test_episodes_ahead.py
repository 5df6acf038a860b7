"""Episodes of programs and conversations with a function that run while the policy trains: versions of tokens, kills,
failures, and groups that hang.

Two ranks train a small GLM for ten steps, two for each rollout, on episodes of two turns that are up to two rollouts
old; some of them have a rollout of training between their turns, and one of each group that fails once is run again.
The server writes down each request that it answers, so that tokens and versions of the journal can be compared with it.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from glm46.engine.training import loop
from glm46.operate.launch.train_rank import train
from glm46.storage.judge.jail import NO_JAIL
from glm46.tasks.rl.conversations import _Conversation
from glm46.tasks.rl.journal import read_rollout
from glm46.tasks.rl.journal_files import FOLDER, rollout_steps
from glm46.tasks.rl.rollout import background, programs
from glm46.tasks.rl.rollout.background import BackgroundGeneration
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from tests.harness import Ranks, call, this_rank
from tests.processes import free_port
from tests.ranks.test_stale_rollouts import server_config
from tests.unit.tasks.rl.rollout.policy_server import PolicyServer

STEPS, PROMPTS, GROUP, STALENESS = 10, 4, 2, 2
KINDS = ("cut", "across", "fails once", "cut")
MOMENTS = ("turn", "halt", "write", "")
"""At which a run dies, one after another; the last one ends by itself."""
_PROGRAM = Path(__file__).parents[1] / "unit" / "tasks" / "rl" / "program.py"
COMMAND = {
    "kind": "command", "command": [sys.executable, "-S", str(_PROGRAM)], "max_turns": 2,
    "variables": ["STEPS_FOLDER", "SLOW_SECONDS"],
}  # fmt: skip
FUNCTION = {"function": "tests.ranks.slow_reply:reply", "max_turns": 3, "timeout_seconds": 100.0}


class RecordedServer(PolicyServer):
    """Writes down what it has generated: prompt, tokens and version. Kills as `Case.kill_behind` says."""

    def __init__(self, record: Path, order: Path, steps: Path, *, port: int):
        self._record, self._order, self._steps = record, order, steps
        self._writing, self._answers = threading.Lock(), 0
        super().__init__(port=port)

    def _inference_v1_generate(self, body):
        reply = super()._inference_v1_generate(body)
        if reply["choices"] and "weight_versions" in reply["choices"][0]:
            tokens, version = reply["choices"][0]["token_ids"], reply["choices"][0]["weight_versions"][0]["version"]
            with self._writing, self._record.open("a") as file:
                file.write(json.dumps([body["token_ids"], tokens, version]) + "\n")
                if self._order.is_file():
                    self._obey(*json.loads(self._order.read_text()))
        return reply

    def _obey(self, number: int, steps: int, pids: list[int]) -> None:
        self._answers += len(list(self._steps.iterdir())) >= steps
        if self._answers == number:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._order.unlink()
            self._answers = 0


class Case:
    """A run with its server, in a folder."""

    def __init__(self, base: Path):
        self.base, self.steps, self.record = base, base / "steps", base / "record.jsonl"
        self._order = base / "order"
        self.steps.mkdir(parents=True)
        self._port = free_port()
        self._server = Ranks(1, self._serve)
        self._last: Ranks | None = None

    def _serve(self) -> None:
        RecordedServer(self.record, self._order, self.steps, port=self._port)
        threading.Event().wait()

    def close(self) -> None:
        os.kill(self._server.pids[0], signal.SIGKILL)

    def config(self, kinds=KINDS, *, steps: int = STEPS, prompts: int = 20, environment=None, **rollout):
        return server_config(
            self.base, "run", self._port,
            ({"prompt": f"{number} is", "kind": kinds[number % len(kinds)]} for number in range(prompts)),
            rl={"group_size": GROUP, "environment": environment or COMMAND},
            rollout={"max_new_tokens": 48} | rollout,
            training={"steps": steps, "global_batch_size": 4, "local_batch_size": 1, "seq_len": 192},
        )  # fmt: skip

    def start(self, config, moment: str = "") -> Ranks:
        self._last = Ranks(2, self._train, config, moment)
        return self._last

    def _train(self, config, moment: str) -> None:
        """On each rank; die at a moment, when training has begun."""
        os.environ["STEPS_FOLDER"], calls, rank = str(self.steps), 0, this_rank()
        train_step = loop.train_step

        def noted_step(*arguments, **options):
            if rank == 0:
                self.steps.joinpath(f"{time.time_ns()}").touch()
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))  # as of a GPU, which leaves the CPU alone
            return train_step(*arguments, **options)

        def fatal(number: int, original, *, after: bool = False):
            def call(*arguments, **options):
                nonlocal calls
                found = original(*arguments, **options) if after else None
                calls += rank == 0 and any(self.steps.iterdir())
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found if after else original(*arguments, **options)

            return call

        loop.train_step = noted_step
        programs.jail_of_programs = lambda: NO_JAIL  # programs read and write the folder of steps
        if moment == "turn":
            PolicyEndpoint._give = fatal(7, PolicyEndpoint._give)
            _Conversation._end_turn = fatal(7, _Conversation._end_turn)
        elif moment == "halt":
            BackgroundGeneration.halt = fatal(2, BackgroundGeneration.halt, after=True)
        elif moment == "write":
            background.append_durably = fatal(5, background.append_durably)
        sys.exit(train(config))

    def kill_behind(self, answers: int, steps: int, pids: list[int]) -> None:
        """Has the server kill these processes in place of an answer, counted from when so many steps have begun."""
        part = self._order.with_suffix(".part")
        part.write_text(json.dumps([answers, steps, pids]))
        part.rename(self._order)

    def end(self, started: Ranks, *, is_killed: bool = False) -> list[int]:
        codes = started.wait(patience=5)
        if not is_killed:
            started.results()
        return codes

    def found(self) -> dict:
        """Numbers of the groups and ages of the tokens by rollout, and trained tokens that the server has not generated
        so."""
        generated: dict[str, set[str]] = {}
        for line in self.record.read_text().splitlines():
            prompt, tokens, version = json.loads(line)
            for index, token in enumerate(tokens):
                generated.setdefault(str([*prompt, *tokens[:index]]), set()).add(f"{token} {int(version)}")
        used, ages, waiting, stale, foreign, mixed, replied, trained = [], [], [], [], [], 0, 0, 0
        folder = self.base / "run" / FOLDER
        for step in rollout_steps(folder):
            rollout = read_rollout(folder, step)
            # An episode whose history the template renders anew has several samples.
            used.append(rollout.group[np.unique(rollout.episode)].tolist())
            ages += (step - rollout.versions).tolist()
            waiting, stale = [number for number, _ in rollout.waiting], stale + rollout.stale
            for sample in range(len(rollout)):
                first, end = rollout.bounds(sample)
                versions = dict(zip(range(first, end), rollout.versions[rollout.places[first:end]], strict=True))
                own = [i for i in range(first, end) if rollout.targets[i] >= 0]
                replied += len(own) < end - first
                mixed += len({versions[i] for i in own}) > 1
                trained += len(own)
                for i in own:
                    said = f"{rollout.targets[i]} {versions[i]}"
                    if said not in generated.get(str(rollout.tokens[first:i].tolist()), ()):
                        foreign.append([step, sample, i, said])
        lines = map(json.loads, (self.base / "run" / "metrics.jsonl").read_text().splitlines())
        rows = [row for row in lines if "loss" in row]
        return {
            "used": used, "ages": ages, "waiting": waiting, "stale": stale, "foreign": foreign, "mixed": mixed,
            "replied": replied, "trained": trained, "steps": [row["step"] for row in rows],
            "staleness_max": [row.get("staleness_max", 0) for row in rows],
            "stale_groups": [row.get("stale_groups", 0) for row in rows],
            "rollout_seconds": [row.get("rollout_seconds", 0) for row in rows],
            "said": self._last.text(0),
        }  # fmt: skip


def run_to_the_end(base: Path, **table) -> dict:
    """The run dies while turns are answered, after a halt for an update, and before turns or the end of an episode are
    written."""
    case, codes = Case(base), []
    config = case.config(max_staleness=STALENESS, **table)
    for moment in MOMENTS:
        codes.append(case.end(case.start(config, moment), is_killed=bool(moment)))
    case.close()
    return case.found() | {"codes": codes}


def run_functions(base: Path) -> dict:
    """`run_to_the_end` with a function."""
    return run_to_the_end(base, environment=FUNCTION, max_new_tokens=120)


def run_through_kills(base: Path, number: int, seed: int = 0) -> dict:
    """All of it, or rank 0, dies at the answer of a random number. Every second kill comes after the first step of its
    start.

    The server has given at most 24 answers at a kill, or 51 that are ahead of that step and 12 after it: 87 for two
    kills at most. Twelve steps of the run need 96, two an episode, so it does not end before the last kill.
    """
    generator, kinds = random.Random(seed), ("start", "step")
    case, codes, moments = Case(base), [], []
    config = case.config(max_staleness=STALENESS, steps=number * 6)
    for index in range(number):
        behind, begun = kinds[index % 2], len(list(case.steps.iterdir()))
        answers = generator.randint(1, 24 if behind == "start" else 12)
        started = case.start(config)
        pids = started.pids[: generator.randint(1, len(started.pids))]
        case.kill_behind(answers, begun + 1 if behind == "step" else 0, pids)
        codes.append(case.end(started, is_killed=True))
        moments.append([behind, answers, len(pids), len(list(case.steps.iterdir())) - begun])
    codes.append(case.end(case.start(config)))
    case.close()
    return case.found() | {"codes": codes, "moments": moments}


def run_with_hanging_programs(base: Path) -> dict:
    """The programs of one prompt hang, and it is dropped."""
    case = Case(base)
    os.environ["SLOW_SECONDS"] = "10000"
    config = case.config(["cut"] * 8 + ["slow"], prompts=36, max_staleness=1, when_stale="drop")
    codes = case.end(case.start(config))
    case.close()
    return case.found() | {"codes": [codes]}


def run_slowly(base: Path, seconds: float, staleness: int, rollouts: int = 5) -> dict:
    """Times of a rollout with its steps, where programs sleep so long, and so do the steps."""
    os.environ["SLOW_SECONDS"], os.environ["STEP_SECONDS"] = str(seconds), str(seconds / 2)
    case = Case(base)
    case.end(case.start(case.config(["slow"], max_staleness=staleness, steps=2 * rollouts)))
    case.close()
    begun = sorted(int(path.name) for path in case.steps.iterdir())[::2]
    periods = [1e-9 * (after - before) for before, after in zip(begun[1:], begun[2:], strict=False)]
    rows = map(json.loads, (base / "run" / "metrics.jsonl").read_text().splitlines())
    waits = [row["rollout_seconds"] for row in rows if "loss" in row][2::2]
    about = {"max_staleness": staleness, "seconds_of_a_program": seconds, "rollouts": len(periods)}
    return about | {"period": statistics.median(periods), "wait": statistics.median(waits)}


def check_run(found: dict, steps: int = STEPS) -> list[int]:
    """Each prompt is trained once, with tokens and versions as the server has written them down; the prompts."""
    assert found["steps"][-1] == steps and len(found["used"]) == steps // 2
    used = [number for groups in found["used"] for number in groups]
    assert all(used.count(number) == GROUP for number in used)
    every = sorted({*used, *found["waiting"], *found["stale"]})
    assert every == list(range(len(every))) and len(every) == len(set(used)) + len(found["waiting"] + found["stale"])
    assert not found["foreign"] and found["trained"] > 100
    return sorted(set(used))


@pytest.mark.thorough
def test_kills_train_each_episode_once_with_the_versions_that_generated_it(tmp_path):
    found = call(run_to_the_end, tmp_path)
    assert [-9 in codes for codes in found["codes"]] == [True] * 3 + [False]
    assert len(check_run(found)) == PROMPTS * STEPS // 2
    assert min(found["ages"]) >= 0 and 0 < max(found["ages"]) <= 2 * STALENESS
    assert max(found["staleness_max"]) == max(found["ages"])
    assert found["mixed"], "an episode continues after an update"
    assert "it ended with code 3 (try 1 of 2" in found["said"]


@pytest.mark.long
def test_ten_kills_at_random_moments_train_each_episode_once(tmp_path):
    found = call(run_through_kills, tmp_path, 10)
    assert [-9 in codes for codes in found["codes"]] == [True] * 10 + [False]
    assert len(check_run(found, steps=60)) == PROMPTS * 60 // 2
    assert min(found["ages"]) >= 0 and 0 < max(found["ages"]) <= 2 * STALENESS
    assert found["mixed"], "an episode continues after an update"
    assert all(steps for behind, _, _, steps in found["moments"] if behind == "step")


@pytest.mark.thorough
def test_kills_train_each_conversation_with_a_function_once(tmp_path):
    found = call(run_functions, tmp_path)
    assert [-9 in codes for codes in found["codes"]] == [True] * 3 + [False]
    assert len(check_run(found)) == PROMPTS * STEPS // 2
    assert min(found["ages"]) >= 0 and 0 < max(found["ages"]) <= 2 * STALENESS
    assert found["replied"] and found["mixed"], "a conversation goes on through an update"


def test_a_group_that_hangs_is_dropped_and_training_goes_on(tmp_path):
    found = call(run_with_hanging_programs, tmp_path)
    assert len(check_run(found)) == PROMPTS * STEPS // 2 and max(found["ages"]) <= 2
    assert found["stale"] and sum(found["stale_groups"][::2]) == len(found["stale"])


@pytest.mark.long
def test_training_beside_slow_programs_has_1_8_times_the_throughput(tmp_path):
    """Programs sleep as long as the steps of a rollout, twenty times as long as all else: 41 parts in turn to 21 ahead
    are 1.95 times, and 1.8 allows that this else takes 2.7 times as long ahead."""
    seconds = 20 * call(run_slowly, tmp_path / "without sleep", 0, 0)["period"]
    in_turn, ahead = (call(run_slowly, tmp_path / f"staleness {n}", seconds, n) for n in (0, 1))
    print(in_turn, ahead)
    assert in_turn["period"] >= 1.8 * ahead["period"]
