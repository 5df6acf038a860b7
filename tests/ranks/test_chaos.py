"""Twenty faults in one run of four nodes, without a person: `pytest -m long -s tests/ranks/test_chaos.py`, as root."""

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.ranks.forked_launch import is_rank
from tests.ranks.interrupts import left_behind
from tests.ranks.test_hosts import log, lose, start, wait_until
from tests.ranks.test_launch import end, losses, wait_for_step

__all__ = ["start"]

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")]

STEPS, FIRST, APART = 560, 20, 26
FAULTS = ["kill"] * 6 + ["lose"] * 2 + ["corrupt"] * 2 + ["slow"] * 6 + ["full"] * 4
HOSTS = [f"127.0.0.{number} slots=1" for number in range(1, 7)]


@pytest.fixture
def disk(tmp_path):
    """A disk of 100 MB, which holds the checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class Faults:
    """Injects faults into a run that trains."""

    def __init__(self, process: subprocess.Popen, config, disk: Path):
        self._process, self._config, self._disk = process, config, disk
        self._random, self._lost, self.seconds = random.Random(0), [], Counter()

    def inject(self, kind: str) -> None:
        """One fault; returns when the run has made a step after it."""
        began, resumed, step = time.monotonic(), log(self._config).count("resumed after step"), self._step()
        getattr(self, f"_{kind}")()
        if kind in ("kill", "lose", "corrupt"):
            wait_until(lambda: log(self._config).count("resumed after step") > resumed, self._process)
            step = int(re.findall(r"resumed after step (\d+)", log(self._config))[-1])
        wait_until(lambda: self._step() > step, self._process)
        self.seconds[kind] += time.monotonic() - began

    def _step(self) -> int:
        return losses(self._config)[-1][0]

    def _ranks(self) -> list[int]:
        return [pid for pid in left_behind(self._process.mark) if is_rank(pid)]

    def _kill(self) -> None:
        os.kill(self._random.choice(self._ranks()), signal.SIGKILL)

    def _lose(self) -> None:
        self._lost.append(f"127.0.0.{3 - len(self._lost)}")
        lose(self._lost[-1], self._process.mark)

    def _corrupt(self) -> None:
        """A byte of the newest checkpoint, before a rank is killed."""
        newest = max(self._disk.glob("checkpoint/step-*"))
        shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
        with shard.open("r+b") as file:
            file.seek(shard.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        self._kill()

    def _slow(self) -> None:
        rank = self._random.choice(self._ranks())
        os.kill(rank, signal.SIGSTOP)
        time.sleep(5)
        os.kill(rank, signal.SIGCONT)

    def _full(self) -> None:
        """For one or two saves."""
        step, filler = self._step(), self._disk / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        wait_until(lambda: self._step() >= step + 12, self._process)
        filler.unlink()


def test_twenty_faults_leave_the_losses_of_an_undisturbed_run(make_config, start, disk, tmp_path):
    shared = {
        "training": {"steps": STEPS, "local_batch_size": 1, "global_batch_size": 4},
        "checkpoint": {
            "interval": 10,
            "async_mode": "disabled",
            "keep_latest_k": 3,
            "folder": str(disk / "checkpoint"),
        },
    }
    options = ("--nodes", "4", "--max-restarts", "30")
    quiet = make_config(job={"dump_folder": str(tmp_path / "quiet")}, **shared)
    process = start(quiet, *HOSTS, options=options)
    wait_for_step(quiet, 1, process)
    began = time.monotonic()
    output = end(process, 900)
    undisturbed = time.monotonic() - began
    assert process.returncode == 0, output
    for file in sorted(disk.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()

    config = make_config(**shared)
    process = start(config, *HOSTS, options=options)
    wait_for_step(config, 1, process)
    began, faults, kinds = time.monotonic(), Faults(process, config, disk), list(FAULTS)
    random.Random(1).shuffle(kinds)
    for number, kind in enumerate(kinds):
        wait_for_step(config, FIRST + APART * number, process)
        faults.inject(kind)
        print(f"step {losses(config)[-1][0]}: {kind}", flush=True)
    output = end(process, 900)
    disturbed = time.monotonic() - began
    for stopped in left_behind(process.mark):
        os.kill(stopped, signal.SIGKILL)
    assert process.returncode == 0, output
    print(f"{len(kinds)} faults in {disturbed:.0f} s; undisturbed {undisturbed:.0f} s: {undisturbed / disturbed:.0%}")
    counts = Counter(kinds)
    print({kind: f"{counts[kind]} of {seconds / counts[kind]:.1f} s" for kind, seconds in faults.seconds.items()})
    assert dict(losses(config)) == dict(losses(quiet)) and len(losses(config)) == STEPS
    assert "could not be saved" in log(config)
