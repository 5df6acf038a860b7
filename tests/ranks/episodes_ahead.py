"""Episodes of programs, and conversations with a function, that run on a server while the policy trains, killed by
kill -9 and started again.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/episodes_ahead.py main|functions|kills N [SEED]|drops|speed

Two ranks train a small GLM for ten steps, two for each rollout, on episodes of two turns that are up to two rollouts
old; some of them have a rollout of training between their turns, and one of each group that fails once is run again.
`main`: the run dies while turns are answered, behind a halt for an update, and before turns or the end of an episode
are written. `functions`: the same with a function. `kills`: all of it, or rank 0, dies N times in place of an answer of
a random number. `drops`: the programs of one prompt hang, and it is dropped. `speed`: the same steps in turn and ahead,
with programs that sleep as long as the steps of a rollout. Each prints JSON.

The server writes down each request that it answers, so that tokens and versions of the journal can be compared with it.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from glm46.engine.training import loop
from glm46.operate.launch.train_rank import train
from glm46.storage.judge.jail import NO_JAIL
from glm46.tasks.rl.conversations import _Conversation
from glm46.tasks.rl.journal import read_rollout
from glm46.tasks.rl.journal_files import FOLDER, rollout_steps
from glm46.tasks.rl.rollout import background, programs
from glm46.tasks.rl.rollout.background import BackgroundGeneration
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from tests.processes import free_port
from tests.ranks.forked_ranks import await_ranks, start_ranks
from tests.ranks.stale_rollouts import server_config
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
        self._port, self._starts = free_port(), 0
        self._server = start_ranks(1, base / "log-server", lambda _: self._serve())

    def _serve(self) -> None:
        torch.set_num_threads(1)
        RecordedServer(self.record, self._order, self.steps, port=self._port)
        threading.Event().wait()

    def close(self) -> None:
        os.kill(self._server[0], signal.SIGKILL)

    def config(self, kinds=KINDS, *, steps: int = STEPS, prompts: int = 20, environment=None, **rollout):
        return server_config(
            self.base, "run", self._port,
            ({"prompt": f"{number} is", "kind": kinds[number % len(kinds)]} for number in range(prompts)),
            rl={"group_size": GROUP, "environment": environment or COMMAND},
            rollout={"max_new_tokens": 48, "keep_latest_k": 0} | rollout,
            training={"steps": steps, "global_batch_size": 4, "local_batch_size": 1, "seq_len": 192},
        )  # fmt: skip

    def start(self, config, moment: str = "") -> list[int]:
        self._starts += 1
        return start_ranks(2, self.base / f"log-{self._starts}-", lambda rank: self._work(rank, config, moment))

    def _work(self, rank: int, config, moment: str) -> int:
        """Train; die at a moment, when training has begun."""
        torch.set_num_threads(1)
        os.environ["STEPS_FOLDER"], calls = str(self.steps), 0
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
        return train(config)

    def kill_behind(self, answers: int, steps: int, pids: list[int]) -> None:
        """Has the server kill these processes in place of an answer, counted from when so many steps have begun."""
        part = self._order.with_suffix(".part")
        part.write_text(json.dumps([answers, steps, pids]))
        part.rename(self._order)

    def end(self, started: list[int], *, is_killed: bool = False) -> list[int]:
        codes = await_ranks(started, patience=5)
        if not is_killed and any(codes):
            log = self.base / f"log-{self._starts}-"
            raise SystemExit("".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)))
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
            "said": self.base.joinpath(f"log-{self._starts}-0").read_text(),
        }  # fmt: skip


def main(**table) -> None:
    with tempfile.TemporaryDirectory() as name:
        case, codes = Case(Path(name)), []
        config = case.config(max_staleness=STALENESS, **table)
        for moment in MOMENTS:
            codes.append(case.end(case.start(config, moment), is_killed=bool(moment)))
        case.close()
        print(json.dumps(case.found() | {"codes": codes}))


def functions() -> None:
    main(environment=FUNCTION, max_new_tokens=120)


def kills(number: int, seed: int = 0) -> None:
    """Every second kill comes behind the first step of its start.

    The server has given at most 24 answers at a kill, or 51 that are ahead of that step and 12 behind it: 87 for two
    kills at most. Twelve steps of the run need 96, two an episode, so it does not end before the last kill.
    """
    generator, kinds = random.Random(seed), ("start", "step")
    with tempfile.TemporaryDirectory() as name:
        case, codes, moments = Case(Path(name)), [], []
        config = case.config(max_staleness=STALENESS, steps=number * 6)
        for index in range(number):
            behind, begun = kinds[index % 2], len(list(case.steps.iterdir()))
            answers = generator.randint(1, 24 if behind == "start" else 12)
            started = case.start(config)
            pids = started[: generator.randint(1, len(started))]
            case.kill_behind(answers, begun + 1 if behind == "step" else 0, pids)
            codes.append(case.end(started, is_killed=True))
            moments.append([behind, answers, len(pids), len(list(case.steps.iterdir())) - begun])
        codes.append(case.end(case.start(config)))
        case.close()
        print(json.dumps(case.found() | {"codes": codes, "moments": moments}))


def drops() -> None:
    with tempfile.TemporaryDirectory() as name:
        case = Case(Path(name))
        os.environ["SLOW_SECONDS"] = "10000"
        config = case.config(["cut"] * 8 + ["slow"], prompts=36, max_staleness=1, when_stale="drop")
        codes = case.end(case.start(config))
        case.close()
        print(json.dumps(case.found() | {"codes": [codes]}))


def run_slowly(seconds: float, staleness: int, rollouts: int = 5) -> dict:
    """Times of a rollout with its steps, where programs sleep so long, and so do the steps."""
    os.environ["SLOW_SECONDS"], os.environ["STEP_SECONDS"] = str(seconds), str(seconds / 2)
    with tempfile.TemporaryDirectory() as name:
        case = Case(Path(name))
        case.end(case.start(case.config(["slow"], max_staleness=staleness, steps=2 * rollouts)))
        case.close()
        begun = sorted(int(path.name) for path in case.steps.iterdir())[::2]
        periods = [1e-9 * (after - before) for before, after in zip(begun[1:], begun[2:], strict=False)]
        rows = map(json.loads, (Path(name) / "run" / "metrics.jsonl").read_text().splitlines())
        waits = [row["rollout_seconds"] for row in rows if "loss" in row][2::2]
    about = {"max_staleness": staleness, "seconds_of_a_program": seconds, "rollouts": len(periods)}
    return about | {"period": statistics.median(periods), "wait": statistics.median(waits)}


def speed(seconds: float = 0) -> None:
    """Without a number programs sleep twenty times what a rollout takes here without sleep."""
    seconds = seconds or 20 * run_slowly(0, 0)["period"]
    for staleness in (0, 1):
        print(json.dumps(run_slowly(seconds, staleness)))


if __name__ == "__main__":
    named = {"main": main, "functions": functions, "kills": kills, "drops": drops, "speed": speed}
    named[sys.argv[1]](*map(int, sys.argv[2:]))
