"""kill -9 at any request of saves to an object store, of their publishing and pruning, and of loads.

Each round starts a process that loads the newest checkpoint, checks every value of it, and saves step after step until
the kill. Then no step that was reported as saved is lost, and the next process continues.
"""

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from glm46.files.store import Store
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.harness import Ranks, call
from tests.processes import HANG_SECONDS

pytest.importorskip("fsspec", reason="not installed; pip install '.[cloud]'")
REQUESTS = 150
"""More than a load and three saves make."""
STEPS = 3


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((50, 3), float(step)), "model.b": torch.full((7,), float(step))}


def open_store(base: Path) -> CheckpointManager:
    # Each start is on an empty host; the store is all that is left of the one before.
    host = base / f"host{os.getpid()}"
    url = f"file://{base}/store"
    return CheckpointManager(host / "mirror", keep_latest_k=2, node_local_folder=host / "staging", store_url=url)


def save_until_killed(base: Path, fatal: int, is_after: bool) -> None:
    """In a process of its own. ``fatal``: the request at which it kills itself; 0: never."""
    request = Store._call
    number = 0

    def counted(self, *arguments, **options):
        nonlocal number
        number += 1
        if number == fatal and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = request(self, *arguments, **options)
        if number == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Store._call = counted
    manager = open_store(base)
    start = load_newest(manager)
    for step in range(start + 1, start + 1 + STEPS):
        manager.save(step, tensors_of(step), {"step": step})
        (base / "reported").write_text(str(step))
    manager.release()


def load_newest(manager: CheckpointManager) -> int:
    step = manager.newest() or 0
    if step:
        tensors = tensors_of(0)
        assert manager.load(step, tensors) == {"step": step}
        assert all(torch.equal(tensors[name], value) for name, value in tensors_of(step).items()), step
    return step


def run_round(base: Path, moment: int) -> tuple[int, int]:
    """Two saves, a start that is killed, and a start that continues. Returns the reported and the newest step."""
    chance = random.Random(moment)
    for fatal in (0, chance.randint(1, REQUESTS)):
        ranks = Ranks(1, save_until_killed, base, fatal, chance.random() < 0.5)
        ranks.wait(HANG_SECONDS)
        assert "AssertionError" not in ranks.text(), f"a load was not what was saved\n{ranks.error()}"
    reported = int((base / "reported").read_text())
    manager = open_store(base)
    newest = load_newest(manager)
    manager.save(newest + 1, tensors_of(newest + 1), {"step": newest + 1})
    manager.release()
    steps = [path for path in (base / "store").glob("step-*") if any(path.iterdir())]
    assert all((path / "manifest.json").is_file() for path in steps), "interrupted uploads and removals are cleaned up"
    return reported, newest


@pytest.mark.parametrize("moment", range(100))
def test_kill_9_at_a_request_loses_no_reported_step(moment, tmp_path):
    reported, newest = call(run_round, tmp_path, moment)
    assert newest in (reported, reported + 1)
