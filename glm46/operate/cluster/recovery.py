"""Rehearsal of recovery: a small run that is stopped by a signal and then loses a rank ends like an undisturbed run."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from glm46.compute.distributed.environment import environment_without_ranks
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.operate.cluster.results import FAIL, SKIP, Result, Subject, limited
from glm46.operate.launch.process_end import started_ranks

_STEPS = 16
_STOPPED_AT = 5
_KILLED_AT = 11
_RUN_SECONDS = 95.0
"""Time for one of three runs; the whole check has 300 s."""
_GPU_TOLERANCE = 1e-2
"""Relative tolerance. Kernels of a GPU may add in another order; a wrong resume differs by far more."""

_CONFIG = f"""
[job]
dump_folder = "run"
[model]
flavor = "debug"
[[data.sources]]
name = "text"
path = "shards"
[data.sources.recipe]
input = ["text.jsonl"]
[training]
steps = {_STEPS}
seq_len = 64
local_batch_size = 1
mixed_precision_param = "float32"
[optimizer]
name = "AdamW"
lr = 1e-3
[checkpoint]
interval = 4
async_mode = "disabled"
[metrics]
log_freq = 1
"""


class _Failed(Exception):
    """A fault of the rehearsal."""


def recovery(subject: Subject) -> Iterator[Result]:
    """Run a small model twice on the first host: one run is stopped by SIGUSR1, started again, and loses a rank."""
    if subject.node != 0:
        return
    if not subject.is_full:
        yield Result("recovery", SKIP, "--full rehearses it")
        return
    limit = "losses of an undisturbed run"
    remedy = "start a small run by hand and look at its output: docs/reliability.md"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        try:
            error = _rehearse(Path(folder), min(subject.processes, 2))
        except _Failed as failure:
            yield Result("recovery", FAIL, str(failure), limit, remedy)
            return
    value = (
        f"stopped, started again, a rank killed: {_STEPS} losses within {error:.0e}, {time.monotonic() - began:.0f} s"
    )
    yield limited("recovery", error <= (_GPU_TOLERANCE if subject.has_gpu else 0.0), value, limit, remedy)


def _rehearse(folder: Path, processes: int) -> float:
    """Return the largest relative difference of a loss."""
    (folder / "run.toml").write_text(_CONFIG)
    sentences = [f"The number {n} is followed by {n + 1}, and {n} times {n} is {n * n}. " * 8 for n in range(200)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    with _Run(folder, processes, "undisturbed") as undisturbed:
        undisturbed.end(0)
    with _Run(folder, processes, "disturbed") as stopped:
        stopped.wait_for(_STOPPED_AT)
        stopped.process.send_signal(signal.SIGUSR1)
        stopped.end(EXIT_STOPPED)
    with _Run(folder, processes, "disturbed", "--max-restarts", "1") as killed:
        killed.wait_for(_KILLED_AT)
        os.kill(killed.ranks()[-1], signal.SIGKILL)
        killed.end(0)
    expected = undisturbed.losses()
    losses = killed.losses()
    if list(losses) != list(range(1, _STEPS + 1)) or "restart 1 of 1" not in killed.output():
        raise _Failed(f"steps {list(losses)[:3]} to {max(losses, default=0)} after a restart; {killed.tail()}")
    return max(abs(losses[step] / loss - 1) for step, loss in expected.items())


class _Run:
    """A launcher of the small run in a separate process, which ends with the block."""

    def __init__(self, folder: Path, processes: int, name: str, *options: str):
        self._folder = folder / name
        self._log = folder / f"{name}.log"
        self._deadline = time.monotonic() + _RUN_SECONDS
        command = [sys.executable, "-m", "glm46", "launch", "--config", "run.toml", "--nproc", str(processes), *options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--job.dump_folder", name],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_without_ranks() | {"NNODES": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its ranks end with it
        self.process.wait()

    def losses(self) -> dict[int, float]:
        """Return the losses by step; rows that are being written are skipped."""
        rows = {}
        with suppress(OSError, ValueError):
            for line in (self._folder / "metrics.jsonl").read_text().splitlines():
                row = json.loads(line)
                if "loss" in row:
                    rows[row["step"]] = math.nan if row["loss"] is None else row["loss"]
        return rows

    def wait_for(self, step: int) -> None:
        """Wait until the run has done a step."""
        while max(self.losses(), default=0) < step:
            if self.process.poll() is not None or time.monotonic() > self._deadline:
                raise _Failed(f"exit code {self.process.returncode} before step {step}; {self.tail()}")
            time.sleep(0.02)

    def end(self, code: int) -> None:
        """Wait for the end, which must have this exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(self._deadline - time.monotonic(), 0))
        if self.process.returncode != code:
            raise _Failed(f"exit code {self.process.returncode}, expected {code}; {self.tail()}")

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        return sorted(started_ranks(self.process.pid))

    def output(self) -> str:
        """Return the output of this run and of earlier runs of its name."""
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        """Return the last line of the output."""
        return (self.output().strip().splitlines() or ["no output"])[-1]


RECOVERY_CHECKS = {"recovery": recovery}
