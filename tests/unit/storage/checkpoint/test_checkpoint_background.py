"""Background saves: they hold the values of the call, report errors at the next poll, and survive a full disk."""

import os
import resource
import threading
import time

import pytest
import torch

from glm46.compute.distributed.ranks import CheckpointError
from glm46.storage.checkpoint import dcp
from glm46.storage.checkpoint.integrity import complete_steps
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.processes import wait_until


def make_manager(folder, **rule) -> CheckpointManager:
    return CheckpointManager(folder, keep_latest_k=0, **rule)


def filled(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((300, 1000), float(value)),
        "half": torch.full((3, 5), value, dtype=torch.bfloat16),
        "count": torch.tensor(int(value)),
        "empty": torch.zeros(0, 2),
    }


def take(manager: CheckpointManager) -> list:
    return wait_until(manager.poll, "no save ended")


def test_a_background_save_holds_the_values_of_its_call(tmp_path):
    manager, tensors, meta = make_manager(tmp_path), filled(1), {"clock": 1}
    for step in (1, 2, 3):
        assert manager.save_in_background(step, tensors, meta)
        for tensor in tensors.values():
            tensor.fill_(step + 1)
        meta["clock"] = step + 1
        (outcome,) = take(manager)
        assert outcome.step == step
        # 1.2 MB of values; records of DCP add about 1.4 kB for each of four tensors, metadata and manifest the rest
        assert 1_200_000 < outcome.bytes < 1_212_000
    for step in (1, 2, 3):
        target = filled(0)
        assert manager.load(step, target) == {"clock": step}
        assert all((tensor == step).all() for tensor in target.values())
    manager.close()


def test_storage_that_hangs_costs_checkpoints_but_no_training_time(tmp_path, monkeypatch):
    manager, gate = make_manager(tmp_path), threading.Event()
    monkeypatch.setattr(dcp, "fsync", lambda descriptor: gate.wait(600))
    assert manager.save_in_background(1, filled(1), {})
    started = time.monotonic()
    assert not manager.save_in_background(2, filled(2), {})
    assert manager.poll() == []
    assert time.monotonic() - started < 60  # the disk would have taken ten minutes
    gate.set()
    assert [outcome.step for outcome in take(manager)] == [1]
    assert manager.save_in_background(3, filled(3), {})
    assert [outcome.step for outcome in manager.close()] == [3]
    assert manager.newest() == 3


def test_a_step_is_published_after_what_has_to_be_written_before(tmp_path):
    manager, published = make_manager(tmp_path), []
    manager.before_publishing = lambda: published.append(complete_steps(tmp_path))
    manager.save(1, filled(1), {})
    assert manager.save_in_background(2, filled(2), {})
    take(manager)
    assert published == [[], [1]]


@pytest.fixture
def small_disk():
    """Writes fail beyond a file size, as on a full disk; a call lifts the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_the_next_save_works(tmp_path, small_disk):
    manager = make_manager(tmp_path)
    manager.save(1, {"small": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match="rank 0, writing tensors: OSError"):
        manager.save(2, filled(2), {})
    assert manager.save_in_background(3, filled(3), {})
    with pytest.raises(CheckpointError, match="rank 0, writing tensors: OSError"):
        take(manager)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert manager.newest() == 1
    small_disk()
    assert manager.save_in_background(4, filled(4), {})
    assert [outcome.step for outcome in manager.close()] == [4]
    assert manager.newest() == 4


def test_a_failed_background_save_is_not_lost_when_another_save_comes_first(tmp_path, monkeypatch):
    def broken_once(descriptor):
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    manager = make_manager(tmp_path)
    monkeypatch.setattr(dcp, "fsync", broken_once)
    assert manager.save_in_background(1, filled(1), {})
    manager.save(2, filled(2), {})
    with pytest.raises(CheckpointError, match="rank 0, writing tensors: OSError: .*Input/output error"):
        manager.poll()
    assert manager.poll() == [] and manager.newest() == 2


def test_meta_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    manager = make_manager(tmp_path / "run")
    for save in (manager.save, manager.save_in_background):
        with pytest.raises(CheckpointError, match="TypeError"):
            save(1, filled(1), {"tensor": torch.ones(1)})
    assert not (tmp_path / "run").exists()


def test_best_checkpoints_stay_and_staging_is_kept_while_shapes_stay(tmp_path):
    manager = CheckpointManager(tmp_path, keep_latest_k=1, keep_best_k=1, keep_every=40)
    for step, loss in ((10, 3.0), (20, 1.5), (30, 2.5), (40, None), (50, float("nan")), (60, 2.0)):
        assert manager.save_in_background(step, filled(step), {}, validation_loss=loss)
        take(manager)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000020", "step-000040", "step-000060"]
    other = {"weight": torch.ones(7), "new": torch.ones(2)}
    assert manager.save_in_background(70, other, {})
    manager.close()
    assert manager.load(70, {name: torch.zeros_like(tensor) for name, tensor in other.items()}) == {}


def test_nothing_is_removed_until_the_new_checkpoint_was_read_back(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep_latest_k=1)
    manager.save(1, filled(1), {})

    def lying_disk(descriptor):
        monkeypatch.undo()
        os.pwrite(descriptor, b"\xff", 100_000)  # after the bytes were hashed and written

    monkeypatch.setattr(dcp, "fsync", lying_disk)
    with pytest.raises(CheckpointError, match="step-000002/__0_0.distcp: SHA-256"):
        manager.save(2, filled(2), {})
    assert manager.newest() == 1
    manager.save(3, filled(3), {})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003"]
