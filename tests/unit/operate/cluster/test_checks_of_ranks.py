"""Checks of the ranks, with ranks of one process that answer alike: products, folders, inputs, the small job."""

import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from glm46.compute.distributed.process import Process
from glm46.operate.cluster import devices, small_job, storage
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, PASS, WARN
from glm46.run.plan import resolve_plan
from tests.processes import HANG_SECONDS

CPU = torch.device("cpu")


class EqualRanks(RankGroup):
    """Ranks of one host, all of which have the values of this process."""

    def meet(self) -> None:
        pass

    def gather(self, value):
        return [value] * self.process.world_size


def ranks_of(count: int = 2, *, is_full: bool = False) -> RankGroup:
    return EqualRanks(Process(0, count, CPU), None, count, HANG_SECONDS, is_full)


def test_a_product_that_is_nan_is_wrong(monkeypatch):
    assert devices.products(ranks_of()).status == PASS
    monkeypatch.setattr(torch.Tensor, "double", lambda tensor: torch.full(tensor.shape, math.nan, dtype=torch.float64))
    result = devices.products(ranks_of())
    assert result.status == FAIL and "inf" in result.value


def test_the_largest_of_differences_with_nan_is_infinite():
    assert devices.largest(torch.tensor([1.0, math.nan])) == math.inf
    assert devices.largest(torch.tensor([1.0, -2.0])) == 2.0


def test_a_rank_slower_than_most_is_named(monkeypatch):
    monkeypatch.setattr(EqualRanks, "gather", lambda ranks, value: [value, 10 * value, 10 * value])
    result = devices.products(ranks_of(3))
    assert result.status == FAIL and "TFLOP/s" in result.value and "throttling" in result.remedy


def plan_of(config):
    return resolve_plan(config, 2)


def test_folders_that_can_be_written_pass_and_nothing_is_left_in_them(make_config):
    plan = plan_of(make_config())
    before = sorted(storage.existing(plan.config.checkpoint_folder).iterdir())
    result = storage.storage(ranks_of(), plan)
    assert result.status == PASS and "job.dump_folder: " in result.value and "GB/s" in result.requirement
    assert sorted(storage.existing(plan.config.checkpoint_folder).iterdir()) == before


def test_a_full_disk_and_too_little_space_for_checkpoints(make_config, small_disk):
    mount, resize = small_disk
    tables = {"job": {"dump_folder": str(mount / "out")}, "checkpoint": {"interval": 2}}
    result = storage.storage(ranks_of(), plan_of(make_config(**tables)))
    assert result.status == FAIL and "job.dump_folder: OSError: [Errno 28] No space" in result.value
    assert list(mount.iterdir()) == []  # nothing is left there
    resize("256m")
    assert storage.storage(ranks_of(), plan_of(make_config(**tables))).status == PASS
    big = make_config(**tables, model={"flavor": "debug", "hidden_size": 4096})
    result = storage.storage(ranks_of(), plan_of(big))
    assert result.status == FAIL and "checkpoint.keep_latest_k" in result.remedy


@pytest.mark.parametrize("folder", ["/proc/none", "/sys/none"])
def test_a_folder_that_cannot_be_written(folder, make_config):
    result = storage.storage(ranks_of(), plan_of(make_config(job={"dump_folder": folder})))
    assert result.status == FAIL and "job.dump_folder: " in result.value and "writable" in result.remedy


def test_a_slow_folder_is_a_warning(make_config, monkeypatch):
    monkeypatch.setattr(storage, "_SAVE_SECONDS", 1e-9)
    result = storage.storage(ranks_of(), plan_of(make_config(checkpoint={"interval": 2})))
    assert result.status == WARN and "job.dump_folder: " in result.value and " GB/s < " in result.value


def test_states_are_written_by_all_ranks_and_must_pass_once_in_a_minute(make_config, tmp_path, monkeypatch):
    states = {"state_offload": "nvme", "state_offload_folder": str(tmp_path)}
    plan = plan_of(make_config(optimizer={"name": "Muon", **states}, checkpoint={"enable": False}))
    sizes = []
    monkeypatch.setattr(storage, "write_speed", lambda folder, size: sizes.append(size) or 2.0)
    # 32 MiB of all ranks; the states of a small model are small.
    assert storage.storage(ranks_of(4), plan).status == PASS and set(sizes) == {8 * 2**20}
    monkeypatch.setattr(storage, "largest_stage", lambda _: SimpleNamespace(disk=90e9))
    result = storage.storage(ranks_of(8), plan)
    # 8 x 90 GB, both ways, in 60 s.
    assert result.status == WARN
    assert result.value == "optimizer.state_offload_folder: 16.00 GB/s < 24.00 GB/s"


def test_written_files_have_whole_chunks(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(storage.os, "fsync", lambda number: sizes.append(storage.os.fstat(number).st_size))
    storage.write_speed(tmp_path, 1)
    storage.write_speed(tmp_path, 20 * 2**20)
    assert sizes == [8 * 2**20, 16 * 2**20] and list(tmp_path.iterdir()) == []


def test_a_shared_folder_that_cannot_be_written_is_a_result(tmp_path, make_config):
    (tmp_path / "file").touch()
    plan = plan_of(make_config(job={"dump_folder": str(tmp_path / "file")}))
    result = storage.shared_folder(ranks_of(1), plan)
    assert result.status == FAIL and "0 of 1 hosts' files seen; NotADirectoryError" in result.value


def inputs(config, **options):
    return storage.inputs(ranks_of(**options), plan_of(config))


def test_inputs_of_a_run_that_can_start_pass(make_config):
    result = inputs(make_config())
    assert result.status == PASS and re.fullmatch(r"test: [1-9][\d,]* tokens, new weights", result.value)
    other = EqualRanks(Process(1, 2, CPU), None, 2, HANG_SECONDS)
    assert storage.inputs(other, plan_of(make_config())) is None  # the first rank of the host answers


def test_a_damaged_shard_is_named(make_config, source_folder, tmp_path):
    folder = shutil.copytree(source_folder, tmp_path / "copy")
    shard = next(folder.glob("train*"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    result = inputs(make_config(data={"sources": [{"name": "test", "path": str(folder)}]}))
    assert result.status == FAIL and shard.name in result.value


def test_a_source_that_the_run_will_make_and_one_that_is_missing(make_config, tmp_path):
    source = {"name": "test", "path": str(tmp_path / "later")}
    recipe = {"recipe": {"input": ["builtin:python_stdlib"]}}
    assert inputs(make_config(data={"sources": [source | recipe]})).status == PASS
    assert inputs(make_config(data={"sources": [source]})).status == FAIL


def test_a_checkpoint_that_is_incomplete_and_one_of_nobody(make_config, tmp_path):
    config = make_config(checkpoint={"interval": 2})
    (config.checkpoint_folder / "step-000002").mkdir(parents=True)
    result = inputs(config)
    assert result.status == FAIL and "manifest.json" in result.value
    missing = make_config(job={"dump_folder": str(tmp_path / "new")}, checkpoint={"initial_load_path": "nowhere"})
    assert inputs(missing).status == FAIL


@pytest.mark.parametrize(
    ("losses", "fault", "status"),
    [
        ([9.0, 8.9, 8.8], None, PASS),
        ([9.0, 9.0, 9.0], None, FAIL),
        ([9.0, math.nan, math.nan], None, FAIL),
        ([9.0, 8.9, 8.8], "loss or gradient norm is not finite", FAIL),
    ],
)
def test_the_small_job_wants_losses_that_fall_and_steps_that_are_not_skipped(losses, fault, status, monkeypatch):
    plan = small_job.small_plan(None, 1)
    remaining = iter(losses)

    def step(*_, **options):
        objective = {"loss": torch.tensor(next(remaining))}
        return SimpleNamespace(main=SimpleNamespace(objective=objective), fault=fault)

    totals = SimpleNamespace(real=1, main={"targets": 1})
    monkeypatch.setattr(small_job, "_SmallTask", lambda *_: None)
    monkeypatch.setattr(small_job, "count_step", lambda *_: None)
    monkeypatch.setattr(small_job, "sum_on_host", lambda _: SimpleNamespace(divided_by=lambda _: totals))
    monkeypatch.setattr(small_job, "train_step", step)
    result = small_job.small_job(plan, None)
    assert result.status == status and (fault or "losses") in result.value
