"""kill -9 of one rank or of all of them, at any moment of saves in the foreground and background.

Each round starts two ranks that load the newest checkpoint, check every value of it, and save step after step until the
kill. Then: the survivor ended by itself, no step that was reported as saved is lost, and the next round loads.
"""

import os
import random
import signal
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

from glm46.storage.checkpoint.manager import CheckpointManager
from tests.harness import Ranks, call, die_in_sync, this_rank
from tests.processes import HANG_SECONDS, is_alive, wait_until

SECONDS_TO_NOTICE = 60  # gloo notices a closed connection at once; the rest is for a busy machine
STEPS = 1000


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
    for step in range(start + 1, start + STEPS):
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
        kill(child for rank, child in enumerate(ranks.pids) if victim in (rank, "all"))
    wait_until(lambda: not all(map(is_alive, ranks.pids)))
    if not all(store.with_suffix(f".ready{rank}").exists() for rank in range(2)):
        kill(ranks.pids)  # while connections are made nobody can notice: torchrun ends the others
    ranks.wait(HANG_SECONDS)
    assert not ranks.hung, f"round {number}: a rank hangs after the kill of {victim}\n{ranks.error()}"
    assert "AssertionError" not in ranks.text(), f"round {number}: a load was not what was saved\n{ranks.error()}"
    where = "draft" if list((base / "checkpoint").glob("*.tmp")) else "published"
    return f"{victim}, {'in a sync' if by_moment else 'any time'}, {where}"


def kill(children: Iterable[int]) -> None:
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


@pytest.mark.parametrize("rounds", [8, pytest.param(500, marks=pytest.mark.long)])
def test_kill_9_of_one_rank_or_all_loses_no_published_step_and_hangs_nobody(tmp_path, rounds):
    done = call(run_rounds, tmp_path, rounds, 5, deadline=24 * 3600)
    assert sum(done.values()) == rounds
