"""A training run that is ended at random moments, by kill -9 or by a signal to stop, until it is through.

Two ranks, each with a worker process, train a small GLM with experts and a prediction layer under Muon, and save in the
background every third step. Each round starts the same run again, and ends it: one rank or both by kill -9, at any time
or in the middle of a save; or both by SIGTERM, SIGUSR1 or SIGHUP, as the launcher passes them on. No published step may
be lost, a stopped run must have saved the step it was in, and every figure of every step, and every bit of the last
checkpoint, must be those of a run that nobody disturbed.
"""

import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from glm46.config.run_config import RunConfig
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.training import build, loop
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.integrity import published_steps
from tests.builders import small_config
from tests.harness import Ranks, call, die_in_sync, start, this_rank
from tests.processes import PROGRAM_SECONDS, children_of, wait_until
from tests.step_tensors import tensor_hashes

SECONDS_TO_END = 10
"""For a rank whose neighbour is gone, before it is killed. In a collective gloo notices at once; while connections are
made nobody can. torchrun gives it thirty."""

# Columns that tell of the machine or of this attempt, not of what was computed.
OF_THE_ATTEMPT = (
    "seconds", "second", "device", "mfu", "gib", "failed_saves", "overhead_ratio", "extreme_rank",
)  # fmt: skip


def train_until_sync(config, base: Path, fatal_syncs: tuple[int, int]) -> None:
    """On each rank. ``fatal_syncs``: the call of fsync that a rank does not survive; nearly all are in a save."""
    rank = this_rank()

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

    die_in_sync(fatal_syncs[rank])
    original, loop.train_step = loop.train_step, train_step
    build.StopRequest = Ready
    sys.exit(train(config))


def begin(config, base: Path, fatal_syncs: tuple[int, int] = (0, 0)) -> Ranks:
    """Start both ranks."""
    for rank in range(2):
        (base / f"ready{rank}").unlink(missing_ok=True)
        (base / f"steps{rank}").write_bytes(b"")
    return Ranks(2, train_until_sync, config, base, fatal_syncs)


def end(ranks: Ranks) -> list[int]:
    """Exit codes of both ranks. As torchrun does it, the other one is asked to end when one has failed, then killed."""

    def has_failed() -> bool:
        return any(code not in (0, EXIT_STOPPED) for code in ranks.ended().values())

    wait_until(lambda: has_failed() or len(ranks.ended()) == 2, seconds=PROGRAM_SECONDS)
    if not has_failed():
        return ranks.wait()
    for rank, child in enumerate(ranks.pids):
        if rank not in ranks.ended():
            os.kill(child, signal.SIGTERM)
    return ranks.wait(patience=SECONDS_TO_END)


def await_ready(base: Path, ranks: Ranks) -> None:
    """Until both ranks take signals as wishes."""

    def is_ready() -> bool:
        assert 0 not in ranks.ended(), ranks.text(0)
        return all((base / f"ready{rank}").exists() for rank in range(2))

    wait_until(is_ready)


def kill(config, base: Path, chance: random.Random) -> tuple[Ranks, list[int], str]:
    """A round that ends by kill -9; ranks, exit codes and what was done."""
    victim, in_a_sync = chance.choice([0, 1, "both"]), chance.random() < 0.5
    # A save has some ten syncs on rank 0 and fewer on rank 1.
    syncs = tuple(chance.randint(1, 40) if in_a_sync and victim in (rank, "both") else 0 for rank in range(2))
    ranks = begin(config, base, syncs)
    if not in_a_sync:
        time.sleep(chance.uniform(0.05, 2.5))
        for rank, child in enumerate(ranks.pids):
            if victim in (rank, "both"):
                os.kill(child, signal.SIGKILL)
    codes = end(ranks)
    draft = bool(list(config.checkpoint_folder.glob("*.tmp")))
    return ranks, codes, f"kill of {victim}, {'in a save' if in_a_sync or draft else 'elsewhere'}"


def ask_to_stop(config, base: Path, chance: random.Random) -> tuple[Ranks, list[int], str]:
    """A round that ends by a signal; ranks, exit codes and what was done."""
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    before = max(published_steps(config.checkpoint_folder), default=0)
    ranks = begin(config, base)
    await_ready(base, ranks)
    time.sleep(chance.uniform(0.0, 2.0))
    for child in ranks.pids:  # they stand still until both have the signal
        os.kill(child, signal.SIGSTOP)
    seen = before + (base / "steps0").stat().st_size
    for child in ranks.pids:  # as torchrun does, every process of the rank
        for process in (*children_of(child), child):
            os.kill(process, number)
        os.kill(child, signal.SIGCONT)
    codes = end(ranks)
    saved = max(published_steps(config.checkpoint_folder), default=0)
    if set(codes) <= {0, -number} and saved == config.training.steps:  # a rank that has trained has no handlers
        return ranks, codes, "too late"
    # The step in which it arrived is finished.
    is_right = codes == [EXIT_STOPPED] * 2 and seen <= saved <= seen + 2
    assert is_right, f"{number.name} after step {seen}: codes {codes}, saved {saved}\n{ranks.text(0)}"
    return ranks, codes, f"{number.name}, {'before the first step' if saved == 0 else 'in training'}"


def rows(config) -> list[dict]:
    """The rows of metrics of whole lines."""
    file = Path(config.job.dump_folder) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and '"loss"' in line]


def computed(config) -> list[dict]:
    """What each step computed."""
    return [{k: v for k, v in row.items() if not k.partition("/")[0].endswith(OF_THE_ATTEMPT)} for row in rows(config)]


def disturb(config, base: Path, by: str, most: int, chance: random.Random) -> Counter:
    """Start the run and end it again until it is through; what was done, how often."""
    done, newest = Counter(), 0
    while True:
        if sum(done.values()) < most:
            ranks, codes, kind = (kill if by == "kill" else ask_to_stop)(config, base, chance)
        else:
            ranks = begin(config, base)
            codes, kind = end(ranks), "none"
        resumed = re.findall(r"resumed after step (\d+),", ranks.text(0))
        if resumed:
            assert int(resumed[0]) >= newest, f"step {newest} was published, the run continued from {resumed[0]}"
        newest = max(published_steps(config.checkpoint_folder), default=0)
        if codes == [0, 0]:
            return done
        has_failed = kind == "none" or 1 in codes and not {-9, -15} & set(codes)
        assert not has_failed, f"{kind}: {ranks.error()}"
        done[kind] += 1


def end_again_and_again(source: Path, base: Path, by: str, kills: int, steps: int, seed: int) -> Counter:
    """Runs of so many steps, until so many were ended; what was done, how often."""
    chance, done = random.Random(seed), Counter()
    settings = {
        "training": {"steps": steps}, "optimizer": {"name": "Muon", "lr": 1e-2},
        "validation": {"enable": True, "freq": 25},
        "data": {"num_workers": 1},
    }  # fmt: skip

    def make(name: str) -> RunConfig:
        """Checkpoints lie apart from the other outputs."""
        checkpoint = {"interval": 3, "keep_latest_k": 2, "folder": str(base / "checkpoints" / name)}
        return small_config(source, base / name, checkpoint=checkpoint, **settings)

    whole = make("whole")
    undisturbed = begin(whole, base)
    assert end(undisturbed) == [0, 0], undisturbed.error()
    # A fast machine may end a run before the moment that was drawn for its kill.
    for number in range(5 * kills):
        config = make(f"run{number}")
        done += disturb(config, base, by, kills - sum(done.values()), chance)
        for expected, found in zip(computed(whole), computed(config), strict=True):
            assert found == expected, "another figure than undisturbed"
        expected, found = (tensor_hashes(run.checkpoint_folder, steps) for run in (whole, config))
        assert found == expected, [name for name in expected | found if expected.get(name) != found.get(name)]
        if sum(done.values()) >= kills:
            break
    return done


KINDS = ("kill", "signal")


@pytest.fixture(scope="module")
def started(source_folder, tmp_path_factory):
    """Both at once: each waits a part of its time."""
    return {by: start(end_again_and_again, source_folder, tmp_path_factory.mktemp(by), by, 2, 18, 2) for by in KINDS}


@pytest.mark.parametrize("by", KINDS)
def test_a_run_that_is_ended_again_and_again_computes_what_an_undisturbed_one_does(started, by):
    assert sum(started[by].result().values()) == 2


@pytest.mark.long
@pytest.mark.parametrize("by", KINDS)
def test_a_run_that_is_ended_a_hundred_times_computes_what_an_undisturbed_one_does(source_folder, tmp_path, by):
    done = call(end_again_and_again, source_folder, tmp_path, by, 100, 300, 1, deadline=24 * 3600)
    assert sum(done.values()) == 100
