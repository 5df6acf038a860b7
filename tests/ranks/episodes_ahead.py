"""Episodes of programs, and conversations with a function, that run on a server while the policy trains, killed by
kill -9 and started again.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/episodes_ahead.py main|functions|kills N|drops|speed

Two ranks train a small GLM for ten steps, two for each rollout, on episodes of two turns that are up to two rollouts
old; some of them have a rollout of training between their turns, and one of each group that fails once is run again.
`main`: the run dies while turns are answered, behind a halt for an update, and before turns or the end of an episode
are written. `functions`: the same with a function. `kills`: it dies N times at random moments. `drops`: the programs of
one prompt hang, and it is dropped. `speed`: the same steps in turn and ahead, with programs that sleep as long as the
steps of a rollout. Each prints JSON.

The server writes down each request that it answers, so that tokens and versions of the journal can be compared with it.
"""

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

import torch

from glm46.engine.training import loop
from glm46.storage.prepare.jail import NO_JAIL
from glm46.tasks.rl import task
from glm46.tasks.rl.conversations import _Conversation
from glm46.tasks.rl.journal import FOLDER, read_rollout, rollout_steps
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
    """Writes down what it has generated: prompt, tokens and version."""

    def __init__(self, record: Path, *, port: int):
        self._record, self._writing = record, threading.Lock()
        super().__init__(port=port)

    def _inference_v1_generate(self, body):
        reply = super()._inference_v1_generate(body)
        if reply["choices"] and "weight_versions" in reply["choices"][0]:
            tokens, version = reply["choices"][0]["token_ids"], reply["choices"][0]["weight_versions"][0]["version"]
            with self._writing, self._record.open("a") as file:
                file.write(json.dumps([body["token_ids"], tokens, version]) + "\n")
        return reply


class Case:
    """A run with its server, in a folder."""

    def __init__(self, base: Path):
        self.base, self.steps, self.record = base, base / "steps", base / "record.jsonl"
        self.steps.mkdir(parents=True)
        self._port, self._starts = free_port(), 0
        self._server = start_ranks(1, base / "log-server", lambda _: self._serve())

    def _serve(self) -> None:
        torch.set_num_threads(1)
        RecordedServer(self.record, port=self._port)
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
        return task.train(config)

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
            used.append(rollout.group[rollout.episode].tolist())
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


def kills(number: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        case, codes = Case(Path(name)), []
        config = case.config(max_staleness=STALENESS, steps=number * 4)
        for _ in range(number):
            started, before = case.start(config), len(list(case.steps.iterdir()))
            while len(list(case.steps.iterdir())) < before + 4:
                time.sleep(0.01)
            time.sleep(random.uniform(0.0, 2.0))
            for pid in started:
                os.kill(pid, signal.SIGKILL)
            codes.append(case.end(started, is_killed=True))
        codes.append(case.end(case.start(config)))
        case.close()
        print(json.dumps(case.found() | {"codes": codes}))


def drops() -> None:
    with tempfile.TemporaryDirectory() as name:
        case = Case(Path(name))
        os.environ["SLOW_SECONDS"] = "10000"
        config = case.config(["cut"] * 8 + ["slow"], prompts=36, max_staleness=1, when_stale="drop")
        codes = case.end(case.start(config))
        case.close()
        print(json.dumps(case.found() | {"codes": [codes]}))


def speed(seconds: str = "6") -> None:
    os.environ["SLOW_SECONDS"], os.environ["STEP_SECONDS"], rollouts = seconds, str(float(seconds) / 2), 6
    for staleness in (0, 1):
        with tempfile.TemporaryDirectory() as name:
            case = Case(Path(name))
            case.end(case.start(case.config(["slow"], max_staleness=staleness, steps=2 * rollouts)))
            case.close()
            begun = sorted(int(path.name) for path in case.steps.iterdir())[::2]
            periods = [1e-9 * (after - before) for before, after in zip(begun[1:], begun[2:], strict=False)]
            rows = map(json.loads, (Path(name) / "run" / "metrics.jsonl").read_text().splitlines())
            waits = [row["rollout_seconds"] for row in rows if "loss" in row][2::2]
            about = {"max_staleness": staleness, "seconds_of_a_program": float(seconds), "rollouts": len(periods)}
            print(json.dumps(about | {"period": statistics.median(periods), "wait": statistics.median(waits)}))


if __name__ == "__main__":
    named = {"main": main, "functions": functions, "kills": lambda n: kills(int(n)), "drops": drops, "speed": speed}
    named[sys.argv[1]](*sys.argv[2:])
