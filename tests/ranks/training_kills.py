"""A training run that is ended at random moments, by kill -9 or by a signal to stop, until it is through; a program.

    PYTHONPATH=. python tests/ranks/training_kills.py --kills 100 --seed 1
    PYTHONPATH=. python tests/ranks/training_kills.py --kills 50 --by signal --seed 1

Two ranks, each with a worker process, train a small GLM with experts and a prediction layer under Muon, and save behind
training every third step. Each round starts the same command again, and ends it: one rank or both by kill -9, at any
time or in the middle of a save; or both by SIGTERM, SIGUSR1 or SIGHUP, as the launcher passes them on. No published
step may be lost, a stopped run must have saved the step it was in, and every figure of every step, and every bit of the
last checkpoint, must be those of a run that nobody disturbed.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from glm46.config.run_config import RunConfig
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.training import build, loop
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.integrity import published_steps, step_folder
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata
from tests.processes import children_of
from tests.ranks.forked_ranks import die_in_sync, start_ranks
from tests.small_run import folder_with_source, small_config

SECONDS_TO_END = 10
"""For a rank whose neighbour is gone, before it is killed. In a collective gloo notices at once; while connections are
made nobody can. torchrun gives it thirty."""

# Columns that tell of the machine or of this attempt, not of what was computed.
OF_THE_ATTEMPT = (
    "seconds", "second", "device", "mfu", "gib", "failed_saves", "slowest_rank", "slowest_rank_ratio", "overhead_ratio",
    "extreme_rank",
)  # fmt: skip


def work(rank: int, config, base: Path, fatal_sync: int) -> int:
    """Train. ``fatal_sync``: the call of fsync, nearly all of which are in a save, that this rank does not survive."""
    torch.set_num_threads(1)

    class Ready(build.StopRequest):
        """From now on a signal asks to stop."""

        def __init__(self):
            super().__init__()
            (base / f"ready{rank}").touch()

    def train_step(*arguments):
        outcome = original(*arguments)
        with (base / f"steps{rank}").open("a") as file:
            file.write(".")
        return outcome

    die_in_sync(fatal_sync)
    original, loop.train_step = loop.train_step, train_step
    build.StopRequest = Ready
    return train(config)


def begin(config, base: Path, fatal_syncs: tuple[int, int] = (0, 0)) -> list[int]:
    """Start both ranks; their process ids."""
    for rank in range(2):
        (base / f"ready{rank}").unlink(missing_ok=True)
        (base / f"steps{rank}").write_bytes(b"")
    return start_ranks(2, base / "log", lambda rank: work(rank, config, base, fatal_syncs[rank]))


def end(children: list[int], seconds: float = SECONDS_TO_END) -> list[int]:
    """Exit codes of both ranks. As torchrun does it, the other one is asked to end when one has failed, then killed."""
    codes: dict[int, int] = {}
    limit = time.monotonic() + 600
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                continue
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child] not in (0, EXIT_STOPPED):
                limit = min(limit, time.monotonic() + seconds)
                for other in set(children) - codes.keys():
                    os.kill(other, signal.SIGTERM)
        if time.monotonic() > limit:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[child] for child in children]


def await_ready(base: Path, children: list[int]) -> None:
    """Until both ranks take signals as wishes."""
    while not all((base / f"ready{rank}").exists() for rank in range(2)):
        if os.waitpid(children[0], os.WNOHANG)[0]:
            raise SystemExit((base / "log0").read_text())
        time.sleep(0.002)


def kill(config, base: Path, chance: random.Random) -> tuple[list[int], str]:
    """A round that ends by kill -9; exit codes and what was done."""
    victim, in_a_sync = chance.choice([0, 1, "both"]), chance.random() < 0.5
    # A save has some ten syncs on rank 0 and fewer on rank 1.
    syncs = tuple(chance.randint(1, 40) if in_a_sync and victim in (rank, "both") else 0 for rank in range(2))
    children = begin(config, base, syncs)
    if not in_a_sync:
        time.sleep(chance.uniform(0.05, 2.5))
        for rank, child in enumerate(children):
            if victim in (rank, "both"):
                os.kill(child, signal.SIGKILL)
    codes = end(children)
    draft = bool(list(config.checkpoint_folder.glob("*.tmp")))
    return codes, f"kill of {victim}, {'in a save' if in_a_sync or draft else 'elsewhere'}"


def ask_to_stop(config, base: Path, chance: random.Random) -> tuple[list[int], str]:
    """A round that ends by a signal; exit codes and what was done."""
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    before = max(published_steps(config.checkpoint_folder), default=0)
    children = begin(config, base)
    await_ready(base, children)
    time.sleep(chance.uniform(0.0, 2.0))
    for child in children:  # they stand still until both have the signal
        os.kill(child, signal.SIGSTOP)
    seen = before + (base / "steps0").stat().st_size
    for child in children:  # as torchrun does, every process of the rank
        for process in (*children_of(child), child):
            os.kill(process, number)
        os.kill(child, signal.SIGCONT)
    codes = end(children)
    saved = max(published_steps(config.checkpoint_folder), default=0)
    if set(codes) <= {0, -number} and saved == config.training.steps:  # a rank that has trained has no handlers
        return codes, "too late"
    # The step in which it arrived is finished.
    if codes != [EXIT_STOPPED] * 2 or not seen <= saved <= seen + 2:
        raise SystemExit(
            f"{number.name} after step {seen}: codes {codes}, saved {saved}\n{(base / 'log0').read_text()}"
        )
    return codes, f"{number.name}, {'before the first step' if saved == 0 else 'in training'}"


def rows(config) -> list[dict]:
    """The rows of metrics of whole lines."""
    file = Path(config.job.dump_folder) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and '"loss"' in line]


def computed(config) -> list[dict]:
    """What each step computed."""
    return [{k: v for k, v in row.items() if not k.partition("/")[0].endswith(OF_THE_ATTEMPT)} for row in rows(config)]


def contents(config, step: int) -> dict[str, str]:
    """Hashes of the tensors of a checkpoint: weights, states, averages, generators."""
    folder = step_folder(config.checkpoint_folder, step)
    kinds = read_metadata(folder)[0].state_dict_metadata
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    assert CheckpointManager(folder.parent, keep_latest_k=0).load(step, tensors)["progress"]["step"] == step
    return {name: hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy()).hexdigest() for name, t in tensors.items()}


def disturb(config, base: Path, by: str, most: int, chance: random.Random) -> Counter:
    """Start the run and end it again until it is through; what was done, how often."""
    done, newest = Counter(), 0
    while True:
        if sum(done.values()) < most:
            codes, kind = (kill if by == "kill" else ask_to_stop)(config, base, chance)
        else:
            codes, kind = end(begin(config, base)), "none"
        log = (base / "log0").read_text()
        resumed = [
            int(line.split("step ")[1].split(",")[0]) for line in log.splitlines() if "resumed after step" in line
        ]
        if resumed and resumed[0] < newest:
            raise SystemExit(f"step {newest} was published, the run went on from {resumed[0]}")
        newest = max(published_steps(config.checkpoint_folder), default=0)
        if codes == [0, 0]:
            return done
        if kind == "none" or 1 in codes and not {-9, -15} & set(codes):
            raise SystemExit(f"{kind}: codes {codes}\n{log}\n{(base / 'log1').read_text()}")
        done[kind] += 1


def main(*given: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--by", choices=("kill", "signal"), default="kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=300, help="of a run; another one is begun until all kills are done"
    )
    arguments = parser.parse_args(given or None)
    chance, done = random.Random(arguments.seed), Counter()
    with folder_with_source() as (base, source):
        settings = {
            "training": {"steps": arguments.steps}, "optimizer": {"name": "Muon", "lr": 1e-2},
            "validation": {"enable": True, "freq": 25},
            "data": {"num_workers": 1},
        }  # fmt: skip

        def make(name: str) -> RunConfig:
            """Checkpoints lie apart from the other outputs."""
            checkpoint = {"interval": 3, "keep_latest_k": 2, "folder": str(base / "checkpoints" / name)}
            return small_config(source, base / name, checkpoint=checkpoint, **settings)

        whole = make("whole")
        if end(begin(whole, base)) != [0, 0]:
            raise SystemExit((base / "log0").read_text())
        # A fast machine may end a run before the moment that was drawn for its kill.
        for number in range(5 * arguments.kills):
            config = make(f"run{number}")
            done += disturb(config, base, arguments.by, arguments.kills - sum(done.values()), chance)
            for expected, found in zip(computed(whole), computed(config), strict=True):
                if expected != found:
                    raise SystemExit(f"another figure than undisturbed:\n{expected}\n{found}")
            expected, found = contents(whole, arguments.steps), contents(config, arguments.steps)
            if expected != found:
                others = [name for name in expected | found if expected.get(name) != found.get(name)]
                raise SystemExit(f"other tensors than undisturbed: {', '.join(others)}")
            print(f"{sum(done.values())} of {arguments.kills}", file=sys.stderr, flush=True)
            if sum(done.values()) >= arguments.kills:
                break
        runs = f"{number + 1} runs of {arguments.steps} steps"
        print(f"{sum(done.values())} ends in {runs}, all equal to an undisturbed one")
        for kind, count in sorted(done.items()):
            print(f"{count:5} {kind}")


if __name__ == "__main__":
    main()
