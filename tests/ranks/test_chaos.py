"""Twenty faults in half an hour on four nodes, without a person: `pytest -m long -s` with this file, as root."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.builders import metric_rows
from tests.processes import is_rank, left_behind, wait_until
from tests.ranks.test_launch import end, kill_all, log_of, losses, start_on_hosts, wait_for_resumes, wait_for_step

__all__ = ["start_on_hosts"]

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")]

SECONDS, SPEED_STEPS, INTERVAL = 1800, 60, 15
FAULTS = ["kill"] * 8 + ["corrupt"] * 2 + ["slow"] * 6 + ["full"] * 4
HOSTS = [f"127.0.0.{number} slots=1" for number in range(1, 5)]


@pytest.fixture
def disk(tmp_path):
    """A disk of 100 MB, which holds the checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class Faults:
    """Injects faults into a run that trains, and counts the steps and seconds between them."""

    def __init__(self, process: subprocess.Popen, config, disk: Path):
        self._process, self._config, self._disk = process, config, disk
        self._random, self.seconds = random.Random(0), Counter()
        self._after, self.trained = (self.step(), time.monotonic()), Counter()

    def wait_for_step(self, step: int) -> None:
        while self.step() < step:
            assert self._process.poll() is None, self._process.output.read_text()
            time.sleep(0.1)
        reached, now = self.step(), time.monotonic()
        self.trained.update(steps=reached - self._after[0], seconds=now - self._after[1])

    def inject(self, kind: str) -> None:
        """One fault; returns when the run has made a step that it had not made before."""
        began, resumed, step = time.monotonic(), log_of(self._config).count("resumed after step"), self.step()
        getattr(self, f"_{kind}")()
        if kind in ("kill", "corrupt"):
            wait_for_resumes(self._config, resumed + 1, self._process)
        wait_until(lambda: self.step() > step, self._process.output.read_text)
        self._after = self.step(), time.monotonic()
        self.seconds[kind] += self._after[1] - began

    def step(self) -> int:
        """The step of the newest whole row of metrics."""
        with (Path(self._config.job.dump_folder) / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            rows = file.read().split(b"\n")[:-1]
        return json.loads(rows[-1])["step"]

    def _ranks(self) -> list[int]:
        return [pid for pid in left_behind(self._process.mark) if is_rank(pid)]

    def _kill(self) -> None:
        os.kill(self._random.choice(self._ranks()), signal.SIGKILL)

    def _corrupt(self) -> None:
        """A byte of the newest checkpoint, before a rank is killed."""
        newest = max(self._disk.glob("checkpoint/step-??????"))  # one that is whole
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
        step, filler = self.step(), self._disk / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        wait_until(lambda: self.step() >= step + 2 * INTERVAL, self._process.output.read_text)
        filler.unlink()


def test_twenty_faults_leave_the_losses_of_an_undisturbed_run(make_config, start_on_hosts, disk, tmp_path):
    training = {"steps": SPEED_STEPS, "local_batch_size": 1, "global_batch_size": 16}
    checkpoint = {
        "interval": INTERVAL, "async_mode": "disabled", "keep_latest_k": 3, "folder": str(disk / "checkpoint"),
    }  # fmt: skip

    def begin(name: str):
        keys = {"training": training, "checkpoint": checkpoint, "comm": {"hang_seconds": 8.0}}
        config = make_config(job={"dump_folder": str(tmp_path / name)}, **keys)
        return config, start_on_hosts(config, *HOSTS, options=("--max-restarts", "30"))

    def undisturbed(name: str):
        config, process = begin(name)
        output = end(process)
        assert process.returncode == 0, output
        return config

    def empty_disk():
        for file in sorted(disk.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()

    times = [row["unix_seconds"] for row in metric_rows(undisturbed("speed").job.dump_folder, "loss")]
    # Faults, and the steps that are trained again after them, take a tenth of the time at most.
    training["steps"] = steps = round(0.9 * SECONDS * (len(times) - 1) / (times[-1] - times[0]))
    empty_disk()

    config, process = begin("disturbed")
    wait_for_step(config, 1, process)
    began, faults, kinds = time.monotonic(), Faults(process, config, disk), list(FAULTS)
    random.Random(1).shuffle(kinds)
    for number, kind in enumerate(kinds):
        faults.wait_for_step(SPEED_STEPS + number * (steps - SPEED_STEPS) // len(kinds))
        faults.inject(kind)
        print(f"step {faults.step()}: {kind}, {time.monotonic() - began:.0f} s", flush=True)
    faults.wait_for_step(steps)
    disturbed = time.monotonic() - began
    output = end(process)
    kill_all(left_behind(process.mark))
    assert process.returncode == 0, output
    step_seconds = faults.trained["seconds"] / faults.trained["steps"]
    share = steps * step_seconds / disturbed
    print(
        f"{len(kinds)} faults in {disturbed:.0f} s; {steps} steps of {step_seconds:.3f} s between faults: {share:.1%}"
    )
    counts = Counter(kinds)
    print({kind: f"{counts[kind]} of {seconds / counts[kind]:.1f} s" for kind, seconds in faults.seconds.items()})

    empty_disk()
    quiet = undisturbed("quiet")
    assert dict(losses(config)) == dict(losses(quiet)) and len(losses(config)) == steps
    assert "could not be saved" in log_of(config)
    assert share >= 0.9
