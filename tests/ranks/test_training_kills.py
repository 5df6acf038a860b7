"""A training run that is ended at random moments, by kill -9 or by a signal to stop, until it is through.

Two ranks, each with a worker process, train a small GLM with experts and a prediction layer under Muon, and save in the
background every third step. Each round starts the same run again, and ends it: one rank or both by kill -9, at any time
or in the middle of a save; or both by SIGTERM, SIGUSR1 or SIGHUP, as the launcher passes them on. No published step may
be lost, a stopped run must have saved the step it was in, and every figure of every step, and every bit of the last
checkpoint, must be those of a run that nobody disturbed.

Then kill -9 of one rank or of both, at any moment of saves in the foreground and background. Each round starts two
ranks that load the newest checkpoint, check every value of it, and save step after step until the kill. Then: the
survivor ended by itself, no step that was reported as saved is lost, and the next round loads.
"""

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.config.run_config import RunConfig
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.training import build, loop
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.integrity import published_steps
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.builders import computed_rows, small_config
from tests.harness import Ranks, call, die_in_sync, this_rank
from tests.processes import HANG_SECONDS, PROGRAM_SECONDS, children_of, is_alive, wait_until
from tests.step_tensors import tensor_hashes

SECONDS_TO_END = 10
"""For a rank whose neighbour is gone, before it is killed. In a collective gloo notices at once; while connections are
made nobody can. torchrun gives it thirty."""


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


def computed(config) -> list[dict]:
    """What each step computed."""
    return [row for row in computed_rows(config.job.dump_folder, "failed_saves") if "loss" in row]


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


@pytest.mark.parametrize("by", KINDS)
def test_a_run_that_is_ended_again_and_again_computes_what_an_undisturbed_one_does(source_folder, tmp_path, by):
    assert sum(call(end_again_and_again, source_folder, tmp_path, by, 2, 18, 2).values()) == 2


@pytest.mark.long
@pytest.mark.parametrize("by", KINDS)
def test_a_run_that_is_ended_a_hundred_times_computes_what_an_undisturbed_one_does(source_folder, tmp_path, by):
    done = call(end_again_and_again, source_folder, tmp_path, by, 100, 300, 1, deadline=24 * 3600)
    assert sum(done.values()) == 100


SECONDS_TO_NOTICE = 60  # gloo notices a closed connection at once; the rest is for a busy machine
MOST_SAVES = 1000


def make_tensors(rank: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {f"sharded{i}": distribute_tensor(torch.zeros(5, 64), mesh, [Shard(0)]) for i in range(6)}
    return tensors | {"replicated": torch.zeros(7), f"own{rank}": torch.zeros(3)}


def fill(tensors: dict[str, torch.Tensor], value: float) -> None:
    for tensor in tensors.values():
        getattr(tensor, "_local_tensor", tensor).fill_(value)


def save_until_killed(folder: Path, store: Path, fatal_syncs: list[int]) -> None:
    """On each rank. ``fatal_syncs``: the call of fsync at which a rank kills itself; 0: never."""
    rank = this_rank()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS_TO_NOTICE)
    )
    manager = CheckpointManager(folder, keep_latest_k=2)
    tensors = make_tensors(rank)
    start = manager.newest() or 0
    if start:
        assert manager.load(start, tensors) == {"step": start}
        assert all((getattr(t, "_local_tensor", t) == start).all() for t in tensors.values()), start
    store.with_suffix(f".ready{rank}").touch()
    die_in_sync(fatal_syncs[rank])
    for step in range(start + 1, start + MOST_SAVES):
        fill(tensors, step)
        if step % 2:
            manager.save(step, tensors, {"step": step})
            report(folder, rank, step)
        else:
            assert manager.save_in_background(step, tensors, {"step": step})
            fill(tensors, -1)
            while not (ended := manager.poll()):
                time.sleep(0.001)
            report(folder, rank, ended[0].step)
            dist.barrier()


def report(folder: Path, rank: int, step: int) -> None:
    if rank == 0:
        (folder.parent / "reported").write_text(str(step))


def run_round(base: Path, number: int, chance: random.Random) -> str:
    """One start and one kill; returns what was done."""
    store = base / f"store{number}"
    victim = chance.choice([0, 1, "all"])
    by_moment = chance.random() < 0.7
    fatal = chance.randint(1, 60)
    fatal_syncs = [fatal if by_moment and victim in (rank, "all") else 0 for rank in range(2)]
    ranks = Ranks(2, save_until_killed, base / "checkpoint", store, fatal_syncs)
    if not by_moment:
        time.sleep(chance.uniform(0.2, 0.8))
        kill_processes(child for rank, child in enumerate(ranks.pids) if victim in (rank, "all"))
    wait_until(lambda: not all(map(is_alive, ranks.pids)))
    if not all(store.with_suffix(f".ready{rank}").exists() for rank in range(2)):
        kill_processes(ranks.pids)  # while connections are made nobody can notice: torchrun ends the others
    ranks.wait(HANG_SECONDS)
    assert not ranks.hung, f"round {number}: a rank hangs after the kill of {victim}\n{ranks.error()}"
    assert "AssertionError" not in ranks.text(), f"round {number}: a load was not what was saved\n{ranks.error()}"
    where = "draft" if list((base / "checkpoint").glob("*.tmp")) else "published"
    return f"{victim}, {'in a sync' if by_moment else 'any time'}, {where}"


def kill_processes(children: Iterable[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)


def run_rounds(base: Path, rounds: int, seed: int) -> Counter:
    """What was done, how often; nothing may be lost."""
    chance, kinds = random.Random(seed), Counter()
    for number in range(rounds):
        reported = reported_step(base)
        kinds[run_round(base, number, chance)] += 1
        newest = CheckpointManager(base / "checkpoint", keep_latest_k=0).newest() or 0
        after = reported_step(base)
        assert newest >= max(reported, after), f"round {number}: step {after} was saved, step {newest} is the newest"
    return kinds


def reported_step(base: Path) -> int:
    file = base / "reported"
    return int(file.read_text() or 0) if file.exists() else 0


@pytest.mark.parametrize("rounds", [3, 8, pytest.param(500, marks=pytest.mark.long)])
def test_kill_9_of_one_rank_or_all_loses_no_published_step_and_hangs_nobody(tmp_path, rounds):
    done = call(run_rounds, tmp_path, rounds, 5, deadline=24 * 3600)
    assert sum(done.values()) == rounds
