"""Spikes are found by robust distance, samples of bad steps are skipped after a rollback, one run locks a folder."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.engine.reliability.loss_spikes import SpikeDetector
from glm46.engine.reliability.run_lock import lock_run
from glm46.engine.training import loop
from glm46.engine.training.state import Progress
from glm46.operate.launch.train_rank import train
from tests.builders import metric_rows

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_spikes_are_found_and_noise_is_not():
    chance, false_alarms, missed, tried = random.Random(0), 0, 0, 0
    for _ in range(20):
        detector = SpikeDetector(6.0, 128)
        level, sigma = chance.uniform(1.0, 9.0), chance.uniform(0.02, 0.1)
        for step in range(1000):
            loss = level * (1 + sigma * chance.gauss(0, 1))
            norm = 0.3 * 2 ** chance.gauss(0, 0.3)
            if step >= 128 and step % 100 == 50:
                tried += 1
                missed += detector.check(level * (1 + 10 * sigma), norm) is None
                missed += detector.check(level, 0.3 * 2 ** (0.3 * 12)) is None
            false_alarms += detector.check(loss, norm) is not None
    # 128 values give their deviation to a tenth or so: ten deviations are far above six, five below. Twenty thousand
    # steps of normal noise reach 4.2 deviations; one exception is left for an unlucky window.
    assert missed == 0 and tried == 180
    assert false_alarms <= 1


def test_a_falling_loss_and_a_plateau_are_not_spikes_and_detection_can_be_off():
    detector = SpikeDetector(6.0, 32)
    assert all(detector.check(9.0 * 0.99**step, 5.0 * 0.99**step) is None for step in range(300))
    flat = SpikeDetector(6.0, 32)
    assert all(flat.check(2.0, 0.1) is None for _ in range(100))
    assert flat.check(2.05, 0.11) is None  # within the smallest deviation, which is relative
    assert "loss 3 spikes" in flat.check(3.0, 0.1)
    assert "gradient norm 1 spikes" in flat.check(2.0, 1.0)
    none = SpikeDetector(0.0, 32)
    assert all(none.check(10.0 ** (step % 7), 1.0) is None for step in range(100))


def test_a_bad_step_never_enters_the_window_and_the_window_is_saved():
    detector = SpikeDetector(6.0, 16)
    for step in range(20):
        detector.check(2.0 + 0.01 * (step % 3), 0.1)
    before = detector.to_meta()
    assert all(detector.check(50.0, 0.1) for _ in range(100))
    assert detector.to_meta() == before
    again = SpikeDetector(6.0, 16)
    again.restore(json.loads(json.dumps(before)))
    assert again.check(50.0, 0.1) == detector.check(50.0, 0.1)
    assert again.to_meta() == before


def test_excluded_samples_are_skipped():
    progress = Progress(samples=4, excluded_samples=[[20, 24], [8, 16], [16, 18]])
    for sequences, sample in ((4, 4), (6, 24), (6, 24)):  # the jump of 6 to 18 would touch the third range
        progress.skip_excluded(sequences)
        assert progress.samples == sample


def rows(config) -> list[dict]:
    return metric_rows(config.job.dump_folder)


def poison_samples(monkeypatch, bad: range) -> list[list[int]]:
    """Steps that read a bad sample have a loss that is not finite; returns the samples of the applied steps."""
    original, read = loop.train_step, []

    def poisoned_step(parts, micro_batches, *arguments):
        numbers = [int(n) for batch in micro_batches for n in batch["sample_numbers"]]
        if set(numbers) & set(bad):
            batches = [batch | {"labels": batch["labels"].clone()} for batch in micro_batches]
            outcome = original(parts, batches, *arguments[:-1], lambda loss, norm: "loss spikes")
        else:
            outcome = original(parts, micro_batches, *arguments)
            read.append(numbers)
        return outcome

    monkeypatch.setattr(loop, "train_step", poisoned_step)
    return read


@pytest.mark.slow
def test_a_sustained_spike_rolls_back_and_excludes_its_samples(make_config, monkeypatch):
    read = poison_samples(monkeypatch, range(8, 14))
    config = make_config(
        training={"steps": 10, "max_skipped_steps": 1, "max_rollbacks": 1},
        checkpoint={"interval": 2, "async_mode": "disabled", "keep_latest_k": 0},
    )
    assert train(config) == 0
    # Steps 5 and 6 were bad; the run rolled back to the checkpoint of step 4, and met another bad step later.
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [14, 15], [16, 17], [18, 19], [20, 21], [22, 23]]
    assert [row["step"] for row in rows(config)] == list(range(1, 11))
    assert rows(config)[-1]["skipped_steps"] == 3
    log = (Path(config.job.dump_folder) / "log.txt").read_text()
    assert "step 6 skipped: loss spikes; samples 10 to 11" in log and "excluded     samples 8 to 11" in log
    # A resumed run excludes them too.
    folder = Path(config.job.dump_folder) / "checkpoint"
    meta = json.loads((folder / "step-000010" / "meta.json").read_text())
    assert meta["progress"]["excluded_samples"] == [[8, 12]] and meta["progress"]["rollbacks"] == 1
    assert len(meta["spikes"]["losses"]) == 9


@pytest.mark.slow
def test_a_run_that_continues_another_one_may_roll_back_to_its_checkpoint(make_config, monkeypatch, tmp_path):
    before = make_config(training={"steps": 3}, checkpoint={"async_mode": "disabled"})
    assert train(before) == 0
    read = poison_samples(monkeypatch, range(8, 12))
    config = make_config(
        job={"dump_folder": str(tmp_path / "next")},
        training={"steps": 6, "max_skipped_steps": 1, "max_rollbacks": 1},
        checkpoint={"load_path": str(Path(before.job.dump_folder) / "checkpoint/step-000003")},
    )
    assert train(config) == 0
    assert read == [[6, 7], [6, 7], [12, 13], [14, 15]]
    assert [row["step"] for row in rows(config)] == [4, 5, 6]


@pytest.mark.slow
def test_rollbacks_are_limited(make_config, monkeypatch):
    poison_samples(monkeypatch, range(8, 100))
    config = make_config(
        training={"steps": 10, "max_skipped_steps": 1, "max_rollbacks": 1},
        checkpoint={"interval": 2, "async_mode": "disabled"},
    )
    with pytest.raises(UserError, match="had a spike or .* after 1 of training.max_rollbacks = 1"):
        train(config)


@pytest.mark.parametrize("shared", ["job.dump_folder", "checkpoint.folder", "metrics.save_tb_folder"])
def test_a_second_run_in_a_folder_is_refused(make_config, monkeypatch, tmp_path, shared):
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom glm46.engine.reliability.run_lock import lock_run\n"
        "lock = lock_run(Path(sys.argv[1]), {sys.argv[2]: Path(sys.argv[3])})\n"
        "print('held', flush=True)\ntime.sleep(1000)\n"
    )
    folders = {key: tmp_path / key for key in ("job.dump_folder", "checkpoint.folder", "metrics.save_tb_folder")}
    config = make_config(
        job={"dump_folder": str(folders["job.dump_folder"])},
        checkpoint={"folder": str(folders["checkpoint.folder"])},
        metrics={"enable_tensorboard": True, "save_tb_folder": str(folders["metrics.save_tb_folder"])},
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path / "first", shared, folders[shared]], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "held\n"
        monkeypatch.setattr("glm46.engine.reliability.run_lock._PATIENCE_SECONDS", 0.2)
        with pytest.raises(UserError, match=f"{shared} = .*process {process.pid} on .* is training in this folder"):
            train(config)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    finally:
        process.kill()
    process.wait()
    lock_run(folders["job.dump_folder"], {shared: folders[shared]}).close()  # kill -9 releases the lock


@pytest.mark.slow
def test_saves_go_through_a_node_local_folder(make_config, tmp_path):
    config = make_config(
        training={"steps": 3}, checkpoint={"interval": 2, "node_local_folder": str(tmp_path / "local")}
    )  # fmt: skip
    assert train(config) == 0
    folder = Path(config.job.dump_folder) / "checkpoint"
    assert (folder / "step-000003" / "manifest.json").is_file()
    assert list((tmp_path / "local").glob("step-*")) == []  # gathered, and removed
    assert train(make_config(training={"steps": 4}, checkpoint={"node_local_folder": str(tmp_path / "local")})) == 0


@pytest.mark.parametrize(("good_steps", "is_found"), [(4, False), (5, True)])
def test_detection_starts_after_half_of_the_window(good_steps, is_found):
    detector = SpikeDetector(6.0, 10)
    assert not any(detector.check(1.0, 1.0) for _ in range(good_steps))
    assert (detector.check(9.0, 1.0) is not None) == is_found
