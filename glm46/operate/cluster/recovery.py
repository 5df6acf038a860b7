"""Rehearsal of recovery: a small run that loses a rank is started again, and ends like an undisturbed run."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from glm46.compute.distributed.environment import environment_without_ranks
from glm46.operate.cluster.results import FAIL, Defect, Result, judge
from glm46.operate.launch.process_end import started_ranks

_STEPS = 16
_KILLED_AT = 11
_RUN_SECONDS = 140.0
"""Time for one of two runs."""
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


def recovery(processes: int, *, has_gpu: bool) -> Result:
    """Train a small model twice on this host; the second run loses a rank after a checkpoint, and starts again."""
    requirement = "losses of an undisturbed run"
    remedy = "start a small run by hand and look at its output: docs/reliability.md"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="preflight-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(_CONFIG)
        sentences = [f"The number {n} is followed by {n + 1}, and {n} times {n} is {n * n}. " * 8 for n in range(200)]
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
        try:
            expected = _train(folder, "undisturbed", processes)
            losses = _train(folder, "killed", processes, killed_at=_KILLED_AT)
        except RuntimeError as error:
            return Result("recovery", FAIL, str(error), requirement, remedy)
    errors = [abs(losses.get(step, math.inf) / loss - 1) for step, loss in expected.items()]
    seconds = time.monotonic() - began
    value = f"a rank killed, started again: {len(losses)} losses within {max(errors, default=0):.0e}, {seconds:.0f} s"
    tolerance = _GPU_TOLERANCE if has_gpu else 0.0
    is_good = len(losses) == len(errors) == _STEPS and all(error <= tolerance for error in errors)
    return judge("recovery", [] if is_good else [Defect(FAIL, value, remedy)], value, requirement)


def _train(folder: Path, name: str, processes: int, killed_at: int | None = None) -> dict[int, float]:
    """Train the small run, and return its losses by step.

    Args:
        killed_at: step after which a rank is killed.

    Raises:
        RuntimeError: the run did not end well, or did not start again after the kill.
    """
    log = folder / f"{name}.log"
    rows = folder / name / "metrics.jsonl"
    command = [sys.executable, "-m", "glm46", "launch", "--config", "run.toml", "--nproc", str(processes)]
    command += ["--max-restarts", "1", "--job.dump_folder", name]
    environment = environment_without_ranks() | {"NNODES": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    deadline = time.monotonic() + _RUN_SECONDS
    with log.open("wb") as output:
        run = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
    try:
        while run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if killed_at is not None and rows.is_file() and f'"step": {killed_at},' in rows.read_text():
                killed_at = None
                for rank in sorted(started_ranks(run.pid))[-1:]:
                    os.kill(rank, signal.SIGKILL)
    finally:
        run.kill()  # its ranks end with it
        run.wait()
    text = log.read_text(errors="replace")
    if run.returncode != 0 or (name == "killed" and "restart 1 of 1" not in text):
        last_line = (text.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"the {name} run: exit code {run.returncode}; {last_line}")
    losses = [json.loads(line) for line in rows.read_text().splitlines() if '"loss"' in line]
    return {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in losses}
