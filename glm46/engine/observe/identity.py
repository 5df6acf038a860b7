"""Facts that identify a run, for the exporter."""

import hashlib
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

from glm46.compute.distributed.environment import launched_local_world_size
from glm46.compute.distributed.process import nccl_version
from glm46.config.loader import dump_config
from glm46.engine.training.task import Task

_GIT_SECONDS = 5.0


def identity(task: Task) -> dict[str, str]:
    """Return facts that identify a run, by name, for the exporter."""
    config = task.plan.config
    layout = task.plan.layout
    return {
        "task": task.name,
        "model": config.model.flavor,
        "commit": _commit(),
        "world_size": str(layout.world_size),
        "hosts": str(-(-layout.world_size // launched_local_world_size())),
        "layout": " ".join(f"{axis}={degree}" for axis, degree in asdict(layout).items() if degree > 1),
        "config": hashlib.sha256(dump_config(config).encode()).hexdigest()[:12],
        "torch": torch.__version__,
        "nccl": nccl_version(),
    }


def _commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` if its files are changed; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
