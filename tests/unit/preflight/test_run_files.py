"""Checks of what a run reads and writes, with a small run of the tests."""

import pytest

from glm46.planner.machine import Machine
from glm46.planner.plan import resolve_plan
from glm46.preflight.results import FAIL, PASS, SKIP, WARN, Subject, run_checks
from glm46.preflight.run_files import RUN_CHECKS
from glm46.preflight.storage import STORAGE_CHECKS, probe_folder

GIB = 2**30


def examine(config, checks, *, ranks: int = 2, free: int = 8 * GIB, is_full: bool = False):
    machine = Machine(2, 16 * GIB, free)
    subject = Subject(machine=machine, processes=ranks, plan=resolve_plan(config, 2), is_full=is_full)
    return {result.check: result for result in run_checks(subject, checks, 30)}


def test_a_run_that_can_start_passes(make_config):
    found = examine(make_config(), RUN_CHECKS | STORAGE_CHECKS)
    assert {result.verdict for result in found.values()} == {PASS}
    assert {"job.dump_folder", "space for checkpoints", "data test", "tokenizer", "layout"} <= set(found)


def test_a_damaged_shard_is_named(make_config, source_folder, tmp_path):
    import shutil

    folder = shutil.copytree(source_folder, tmp_path / "copy")
    shard = next(folder.glob("train*"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    found = examine(make_config(data={"sources": [{"name": "test", "path": str(folder)}]}), RUN_CHECKS)
    assert found["data test"].verdict == FAIL and shard.name in found["data test"].value


def test_a_source_that_the_run_will_make_and_one_that_is_missing(make_config, tmp_path):
    source = {"name": "test", "path": str(tmp_path / "later")}
    recipe = {"recipe": {"input": ["builtin:python_stdlib"]}}
    assert examine(make_config(data={"sources": [source | recipe]}), RUN_CHECKS)["data test"].verdict == SKIP
    assert examine(make_config(data={"sources": [source]}), RUN_CHECKS)["data test"].verdict == FAIL


def test_degrees_and_memory_that_do_not_fit(make_config):
    config = make_config(parallelism={"data_parallel_shard_degree": 2})
    assert examine(config, RUN_CHECKS, ranks=3)["layout"].verdict == FAIL
    assert examine(config, RUN_CHECKS, free=2**20)["memory of the run"].verdict == FAIL


def test_a_checkpoint_that_is_incomplete_or_of_nobody(make_config, tmp_path):
    config = make_config(checkpoint={"interval": 2})
    (config.checkpoint_folder / "step-000002").mkdir(parents=True)
    found = examine(config, RUN_CHECKS)["start"]
    assert found.verdict == FAIL and "manifest.json" in found.value
    missing = make_config(job={"dump_folder": str(tmp_path / "new")}, checkpoint={"initial_load_path": "nowhere"})
    assert examine(missing, RUN_CHECKS)["start"].verdict == FAIL


def test_a_full_disk_and_too_little_space_for_checkpoints(make_config, small_disk):
    mount, resize = small_disk
    config = make_config(job={"dump_folder": str(mount / "out")}, checkpoint={"interval": 2})
    found = examine(config, STORAGE_CHECKS)
    assert found["job.dump_folder"].verdict == FAIL and "No space" in found["job.dump_folder"].value
    assert list(mount.iterdir()) == []  # nothing is left behind
    resize("48m")
    assert examine(config, STORAGE_CHECKS)["job.dump_folder"].verdict == PASS
    big = make_config(
        job={"dump_folder": str(mount / "out")},
        checkpoint={"interval": 2},
        model={"flavor": "debug", "hidden_size": 512},
    )
    found = examine(big, STORAGE_CHECKS)["space for checkpoints"]
    assert found.verdict == FAIL and "checkpoint.keep_latest_k" in found.remedy


def test_a_slow_folder_is_a_warning(tmp_path):
    found = {result.check: result for result in probe_folder("job.dump_folder", tmp_path, 1e6, 2**20)}
    assert found["job.dump_folder"].verdict == WARN and ">= 1000000.00 GB/s" in found["job.dump_folder"].limit


@pytest.mark.parametrize("folder", ["/proc/none", "/sys/none"])
def test_a_folder_that_cannot_be_written(folder):
    from pathlib import Path

    [found] = probe_folder("job.dump_folder", Path(folder), 0, 2**20)
    assert found.verdict == FAIL and found.remedy
