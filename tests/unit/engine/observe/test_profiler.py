"""Profiles: FLOPs by kind of module; what a recording leaves on the disk; disks that fail."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from glm46 import compat
from glm46.compute.optim.muon import Muon
from glm46.config.adapter import AdapterConfig
from glm46.config.presets import PRESETS
from glm46.config.profiling import ProfilingConfig
from glm46.engine.observe import profiler as profiler_module
from glm46.engine.observe.module_flops import KINDS, OPTIMIZER, flops_by_kind, names_of_depths
from glm46.engine.observe.profiler import REQUEST_FILE, Profiled, Profiler
from glm46.operate.launch.train_rank import train
from glm46.run.flops import batch_flops, newton_schulz_flops, training_flops
from glm46.run.parameters import adapter_rows, named_rows
from tests.builders import metric_rows
from tests.processes import wait_until
from tests.ranks.test_figures import wait_for_request


@pytest.mark.parametrize("flavor", ["debug", "GLM-4.6", "GLM-4.5-Air", "GLM-4.7-Flash", "GLM-5.2"])
def test_flops_of_all_kinds_are_those_of_the_step(flavor):
    shape = PRESETS[flavor]
    flops = flops_by_kind(named_rows(shape), shape, 3000, 10**6)
    assert sum(flops.values()) == pytest.approx(batch_flops(shape, 3000, 10**6), rel=1e-12)
    assert set(KINDS) - flops.keys() == ({OPTIMIZER} if shape.is_sparse else {OPTIMIZER, "indexer"})
    # Two pipeline stages have the parts of the whole: prediction layers use the head of their own stage.
    names = list(named_rows(shape))
    parts = [[n for n in names if n.startswith(("layers.0.", "embed"))], [n for n in names if n[:9] != "layers.0."]]
    assert sum(sum(flops_by_kind(part, shape, 3000, 10**6).values()) for part in parts) == pytest.approx(
        sum(flops.values())
    )


@pytest.mark.parametrize("depths", [1, 3])
def test_flops_of_drafts_alone_are_those_of_the_step(depths):
    """Forward of the main model, all of the prediction layer, and its head without the gradient of the weight."""
    shape = PRESETS["debug"]
    unrolled = shape.model_copy(update={"num_nextn_predict_layers": depths})
    names = names_of_depths(named_rows(shape), 1, depths)
    assert sorted(names) == sorted(named_rows(unrolled))
    flops = flops_by_kind(names, unrolled, 3000, 10**6, only_drafts=True)
    assert sum(flops.values()) == pytest.approx(batch_flops(unrolled, 3000, 10**6, only_drafts=True), rel=1e-12)
    whole = training_flops(unrolled, 4096)
    alone = training_flops(unrolled, 4096, only_drafts=True)
    head = 6 * shape.vocab_size * shape.hidden_size
    assert alone.matrices == pytest.approx(whole.matrices / 3) and alone.attention == pytest.approx(whole.attention / 3)
    assert alone.mtp == pytest.approx(whole.mtp - depths * head / 3)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_flops_of_adapters_are_those_of_the_step(name):
    shape = PRESETS["debug"].model_copy(update={"num_nextn_predict_layers": 0})
    adapter = AdapterConfig(name=name, rank=8, expert_rank=4)
    names = [*named_rows(shape), *adapter_rows(shape, adapter)]
    flops = flops_by_kind(names, shape, 3000, 10**6, adapter)
    assert sum(flops.values()) == pytest.approx(batch_flops(shape, 3000, 10**6, adapter), rel=1e-12)
    assert flops.keys() < set(KINDS)


def test_flops_of_the_optimizer_are_those_of_its_matrices():
    tensors = [torch.randn(4, 16, 8).requires_grad_(), torch.randn(12, 8).requires_grad_()]
    muon = Muon([{"params": tensors[:1], "row_blocks": (8, 8)}, {"params": tensors[1:]}], ns_steps=3)
    assert muon.flops() == 4 * 2 * newton_schulz_flops(8, 8, 3) + newton_schulz_flops(12, 8, 3)


WAITED = "waited for all ranks"


def profiler(folder: Path, rank: int = 0, **keys) -> tuple[Profiler, list[str]]:
    said: list[str] = []
    about = Profiled(
        rank,
        torch.device("cpu"),
        lambda tokens, pairs: {},
        lambda: said.append(WAITED),
    )
    return Profiler(ProfilingConfig(**{"enable_profiling": True} | keys), folder, about, said.append), said


def steps_of(service: Profiler, first: int, last: int) -> list[int]:
    """Run steps; the ones in which the profiler was on."""
    on = []
    for number in range(first, last + 1):
        service.step_begins(number)
        on += [number] if service._profile is not None else []
        torch.ones(3).sum()
        service.step_ends(number, 10, 10)
    return on


def test_steps_and_warm_up_are_those_of_the_config(tmp_path):
    service, said = profiler(tmp_path, profile_freq=5)
    with service:
        assert steps_of(service, 1, 11) == [2, 3, 4, 5, 7, 8, 9, 10]
        assert [number for number in range(1, 12) if service.covers(number)] == [2, 3, 4, 5, 7, 8, 9, 10]
        tables = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/*/rank0_flops.json"))]
        assert [table["step"] for table in tables] == [5, 10]
        assert len(said) == 4 and said[1] == said[3] == WAITED
        assert "profile_traces/step-000005/rank0_trace.json" in said[0] and "step-000010" in said[2]
        # A run that continues inside of a profile records what is left of it.
        assert steps_of(service, 15, 15) == [15] and steps_of(service, 19, 19) == [19]
    assert json.loads((tmp_path / "profile_traces/step-000015/rank0_flops.json").read_text())["step"] == 15
    assert not (tmp_path / "profile_traces/step-000020").exists()


@pytest.mark.slow
def test_a_file_requests_a_profile_of_the_next_steps_once(tmp_path):
    service, said = profiler(tmp_path, enable_profiling=False, profile_freq=100)
    with service:
        assert steps_of(service, 1, 2) == [] and not service.is_requested()
        (tmp_path / REQUEST_FILE).touch()
        wait_until(service.is_requested)
        assert not (tmp_path / REQUEST_FILE).exists() and not service.is_requested()
        service.step_begins(3)
        service.record_after(3)  # the ranks agree on it within a step
        assert steps_of(service, 3, 9) == [4, 5, 6, 7]
        assert [number for number in range(1, 10) if service.covers(number)] == [4, 5, 6, 7]
    assert said[0] == "a profile was requested: step 7 is recorded on rank 0"
    assert "profile of step 7, rank 0" in said[1] and said[2:] == [WAITED]
    table = json.loads((tmp_path / "profile_traces/step-000007/rank0_flops.json").read_text())
    assert table["step"] == 7


def test_a_request_beside_a_periodic_profile_is_that_profile(tmp_path):
    service, said = profiler(tmp_path, profile_freq=10)
    with service:
        assert steps_of(service, 1, 6) == []
        service.record_after(6)
        service.record_after(7)  # a second request, while the first one is recorded
        assert steps_of(service, 7, 11) == [7, 8, 9, 10]
    assert said[0] == said[1] == "a profile was requested: step 10 is recorded on rank 0"
    assert sorted(path.name for path in (tmp_path / "profile_traces").iterdir()) == ["step-000010"]


def test_a_request_takes_a_memory_snapshot_of_its_steps_on_a_gpu(tmp_path, monkeypatch):
    service, _ = profiler(tmp_path, enable_profiling=False)
    calls = []
    monkeypatch.setattr(compat, "record_allocations", calls.append)
    monkeypatch.setattr(compat, "write_memory_snapshot", lambda path: calls.append(str(path.relative_to(tmp_path))))
    monkeypatch.setattr(service, "_on_gpu", True)
    monkeypatch.setattr(
        profiler_module,
        "profile",
        lambda activities, schedule: profile(activities=[ProfilerActivity.CPU], schedule=schedule),
    )
    with service:
        service.record_after(1)
        steps_of(service, 1, 6)
    written = "memory_snapshot/step-000005/rank0_memory_snapshot.pickle"
    assert calls == [True, written, False, False]  # the last one at the end of the run


def test_other_ranks_do_nothing(tmp_path):
    service, said = profiler(tmp_path, rank=1, profile_freq=1)
    with service:
        assert steps_of(service, 1, 3) == [] and service.covers(1)
    assert said == [WAITED] * 3 and list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_said_once_and_leaves_no_part_of_a_file(tmp_path, small_disk):
    mount, resize = small_disk
    (mount / "filler").write_bytes(b"x" * (1 << 20))
    service, said = profiler(mount, profile_freq=1)
    with service:
        steps_of(service, 1, 2)
        assert len(said) == 3 and said[1] == said[2] == WAITED
        assert f"{mount}/profile_traces/step-000001/rank0_trace.json: cannot be written (No space left" in said[0]
        assert [path for path in mount.rglob("*") if path.is_file()] == [mount / "filler"]
        resize("8m")
        steps_of(service, 3, 3)
    assert (mount / "profile_traces/step-000003/rank0_trace.json").is_file()
    assert len(said) == 5 and "profile of step 3" in said[3]


@pytest.mark.slow
def test_a_run_is_profiled_and_computes_the_same(make_config, tmp_path):
    keys = {"optimizer": {"name": "Muon"}, "training": {"steps": 10}}
    plain = make_config(job={"dump_folder": str(tmp_path / "plain")}, **keys)
    profiled = make_config(profiling={"enable_profiling": True, "profile_freq": 3}, **keys)
    (tmp_path / "out").mkdir()
    losses = []
    for config in (plain, profiled):
        assert train(config) == 0
        rows = metric_rows(config.job.dump_folder)
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1] and len(losses[0]) == 10
    folders = sorted((tmp_path / "out/profile_traces").iterdir())
    assert [folder.name for folder in folders] == ["step-000003", "step-000006", "step-000009"]
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["rank0_flops.json", "rank0_trace.json"]
        table = json.loads((folder / "rank0_flops.json").read_text())
        rows = {row["kind"]: row for row in table["rows"]}
        assert rows.keys() == {*KINDS} - {"indexer"}
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    log = (tmp_path / "out/log.txt").read_text()
    assert log.count("profile of step 3, rank 0 (CPU)") == 1 and "attention core" in log


@pytest.mark.slow
def test_a_run_without_profiling_is_traced_on_request_and_computes_the_same(make_config, tmp_path, monkeypatch):
    losses = []
    for name in ("plain", "requested"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "requested":
            (folder / REQUEST_FILE).touch()
            monkeypatch.setattr(Profiler, "is_requested", wait_for_request())
        assert train(make_config(job={"dump_folder": str(folder)}, training={"steps": 6})) == 0
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1] and len(losses[0]) == 6
    (trace,) = folder.glob("profile_traces/*/rank0_trace.json")
    assert json.loads(trace.read_text(), strict=False)["traceEvents"]
    log = (folder / "log.txt").read_text()
    assert log.count("a profile was requested: step ") == 1 and log.count("profile of step ") == 1
    assert not (folder / REQUEST_FILE).exists() and not (tmp_path / "plain/profile_traces").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_does_not_stop_training(make_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/profile_traces").write_text("a file")
    config = make_config(profiling={"enable_profiling": True, "profile_freq": 1})
    assert train(config) == 0
    log = (tmp_path / "out/log.txt").read_text()
    assert log.count("profile_traces/step-000001/rank0_trace.json: cannot be written") == 1
    assert log.count("training continues without it") == 1
