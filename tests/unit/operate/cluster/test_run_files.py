"""Checks of what a run reads and writes, with a small run of the tests."""

import threading

import pytest
import torch

from glm46.compute.distributed.process import Process
from glm46.operate.cluster import rank_checks, storage
from glm46.operate.cluster.rank_checks import states_folder
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, Subject, run_checks
from glm46.operate.cluster.run_files import RUN_CHECKS
from glm46.operate.cluster.storage import STORAGE_CHECKS, probe_folder, write_synced
from glm46.operate.estimate.machine import Machine
from glm46.run.plan import resolve_plan
from tests.processes import HANG_SECONDS

CPU = torch.device("cpu")
GIB = 2**30


def examine(config, checks, *, ranks: int = 2, free: int = 8 * GIB, is_full: bool = False):
    machine = Machine(2, 16 * GIB, free)
    subject = Subject(machine=machine, processes=ranks, plan=resolve_plan(config, 2), is_full=is_full)
    return {result.check: result for result in run_checks(subject, checks, HANG_SECONDS)}


def test_a_run_that_can_start_passes(make_config, monkeypatch):
    monkeypatch.setattr(storage, "_SYNC_SECONDS", HANG_SECONDS)  # a busy disk takes more than a second
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
    found = {result.check: result for result in probe_folder("job.dump_folder", tmp_path, 1e6, 2**23)}
    assert found["job.dump_folder"].verdict == WARN and ">= 1000000.00 GB/s" in found["job.dump_folder"].limit


class Alone(RankGroup):
    """Ranks of one host, all of which have the values of this process."""

    def meet(self) -> None:
        pass

    def gather(self, value):
        return [value] * self.process.world_size


def test_states_are_written_by_all_ranks_and_must_pass_once_in_a_minute(make_config, tmp_path, monkeypatch):
    folder = tmp_path / "nvme"
    folder.mkdir()
    states = {"state_offload": "nvme", "state_offload_folder": str(folder)}
    plan = resolve_plan(make_config(optimizer={"name": "Muon", **states}), 2)
    written = []

    def write(path, chunk, size):
        written.append(size)
        return write_synced(path, chunk, size)

    monkeypatch.setattr(rank_checks, "write_synced", write)
    [result] = states_folder(Alone(Process(0, 3, CPU), None, 1.0), plan, folder)
    # 32 MiB of three ranks, in whole chunks of 8 MiB each; the states of a small model are small.
    assert result.verdict == PASS and result.limit == ">= 0.00 GB/s"
    assert written == [8 * 2**20] and list(folder.iterdir()) == []
    monkeypatch.setattr(rank_checks, "state_bytes", lambda _: 90e9)
    [result] = states_folder(Alone(Process(0, 8, CPU), None, 1.0), plan, folder)
    assert result.verdict == WARN and result.limit == ">= 24.00 GB/s"  # 8 x 90 GB, both ways, in 60 s


def test_storage_that_hangs_leaves_no_thread_that_the_end_of_the_program_would_wait_for(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(storage, "write_synced", lambda *_: answers.wait(600))
    before = set(threading.enumerate())
    checks = {"folders": lambda subject: probe_folder("job.dump_folder", tmp_path, 0, 2**20)}
    [found] = run_checks(Subject(machine=Machine(2, 16 * GIB, GIB), processes=1), checks, 0.3)
    assert found.verdict == FAIL and "no answer" in found.value
    [thread] = set(threading.enumerate()) - before
    assert thread.daemon
    answers.set()


@pytest.mark.parametrize("folder", ["/proc/none", "/sys/none"])
def test_a_folder_that_cannot_be_written(folder):
    from pathlib import Path

    [found] = probe_folder("job.dump_folder", Path(folder), 0, 2**20)
    assert found.verdict == FAIL and found.remedy
