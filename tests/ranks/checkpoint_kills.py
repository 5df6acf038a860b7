"""kill -9 of one rank or of all of them, at any moment of saves in the foreground and background; a program of its own.

    python tests/ranks/checkpoint_kills.py --rounds 500 --seed 1

Each round forks two ranks that load the newest checkpoint, check every value of it, and save step after step until the
kill. Then: the survivor ended by itself, no step that was reported as saved is lost, and the next round loads.
"""

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.storage.checkpoint.manager import CheckpointManager
from tests.processes import HANG_SECONDS
from tests.ranks.forked_ranks import die_in_sync

SECONDS_TO_NOTICE = 60  # gloo notices a closed connection at once; the rest is for a busy machine
STEPS = 1000


def make_tensors(rank: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {f"sharded{i}": distribute_tensor(torch.zeros(5, 64), mesh, [Shard(0)]) for i in range(6)}
    return tensors | {"replicated": torch.zeros(7), f"own{rank}": torch.zeros(3)}


def fill(tensors: dict[str, torch.Tensor], value: float) -> None:
    for tensor in tensors.values():
        getattr(tensor, "_local_tensor", tensor).fill_(value)


def train(rank: int, folder: Path, store: Path, fatal_sync: int) -> None:
    """Save until killed. ``fatal_sync``: the call of fsync at which this rank kills itself; 0: never."""
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
    die_in_sync(fatal_sync)
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
    store, ranks = base / f"store{number}", []
    victim = chance.choice([0, 1, "all"])
    by_moment = chance.random() < 0.7
    fatal = chance.randint(1, 60)
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(os.open(base / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
                faulthandler.register(signal.SIGUSR1)
                train(rank, base / "checkpoint", store, fatal if by_moment and victim in (rank, "all") else 0)
            except AssertionError as error:
                print("WRONG:", error, flush=True)
                code = 7
            except RuntimeError as error:
                print(error, file=sys.stderr)
            finally:
                os._exit(code)
        ranks.append(child)
    if not by_moment:
        time.sleep(chance.uniform(0.2, 0.8))
        for rank, child in enumerate(ranks):
            if victim in (rank, "all"):
                os.kill(child, signal.SIGKILL)
    end = time.monotonic() + HANG_SECONDS
    left, codes = set(ranks), []
    while left:
        if codes and not all(store.with_suffix(f".ready{rank}").exists() for rank in range(2)):
            for child in left:  # while connections are made nobody can notice: torchrun ends the others
                os.kill(child, signal.SIGKILL)
        done, status = os.waitpid(-1, os.WNOHANG)
        if done in left:
            left.remove(done)
            codes.append(os.waitstatus_to_exitcode(status))
        elif time.monotonic() > end:
            for child in left:
                os.kill(child, signal.SIGUSR1)  # its stacks
                time.sleep(1)
                os.kill(child, signal.SIGKILL)
            logs = "".join((base / f"log{rank}").read_text() for rank in range(2))
            raise SystemExit(f"round {number}: a rank hangs after the kill of {victim}\n{logs}")
        else:
            time.sleep(0.01)
    if 7 in codes:
        raise SystemExit(f"round {number}: a load was not what was saved")
    where = "draft" if list((base / "checkpoint").glob("*.tmp")) else "published"
    return f"{victim}, {'in a sync' if by_moment else 'any time'}, {where}"


def main(*given: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given or None)
    torch.set_num_threads(1)
    chance, kinds = random.Random(arguments.seed), Counter()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for number in range(arguments.rounds):
            reported = int((base / "reported").read_text() or 0) if (base / "reported").exists() else 0
            kinds[run_round(base, number, chance)] += 1
            newest = CheckpointManager(base / "checkpoint", keep_latest_k=0).newest() or 0
            after = int((base / "reported").read_text() or 0) if (base / "reported").exists() else 0
            if newest < max(reported, after):
                raise SystemExit(f"round {number}: step {after} was saved, step {newest} is the newest")
        mid_save = sum(count for kind, count in kinds.items() if kind.endswith("draft"))
        print(f"{arguments.rounds} kills, {mid_save} with a draft left, newest step {newest}, nothing lost")
        for kind, count in sorted(kinds.items()):
            print(f"{count:5} {kind}")


if __name__ == "__main__":
    main()
