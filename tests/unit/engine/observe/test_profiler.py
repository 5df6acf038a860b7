"""Profiles: who spent the time, on made-up and on real traces; what a recording leaves behind; disks that fail."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from glm46 import compat
from glm46.compute.model.dispatch import LocalDispatcher
from glm46.compute.model.transformer import Transformer
from glm46.compute.optim.muon import Muon
from glm46.compute.parallelize import activation_checkpoint
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from glm46.compute.parallelize.plan import initialise
from glm46.config.adapter import AdapterConfig
from glm46.config.presets import PRESETS
from glm46.config.profiling import ProfilingConfig
from glm46.engine.observe import profiler as profiler_module
from glm46.engine.observe.module_times import (
    IDLE,
    KINDS,
    REST,
    flops_by_kind,
    format_table,
    kind_of,
    module_ranges,
    table_rows,
    time_by_kind,
)
from glm46.engine.observe.profiler import REQUEST_FILE, Profiled, Profiler
from glm46.run.flops import batch_flops, newton_schulz_flops
from glm46.run.parameters import adapter_rows, named_rows
from glm46.tasks.pretrain.task import train
from tests.processes import wait_until
from tests.ranks.profiles import wait_for_request
from tests.small_run import TINY


def event(name: str, start: float, duration: float, category: str = "cpu_op", thread: int = 1, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": duration, "args": arguments}


def link(number: int, forward: tuple[int, float], backward: tuple[int, float]) -> list[dict]:
    ends = zip(("s", "f"), (forward, backward), strict=True)
    return [{"ph": ph, "cat": "fwdbwd", "id": number, "tid": thread, "ts": start} for ph, (thread, start) in ends]


def step(backward_thread: int = 1) -> list[dict]:
    """A step of 1,000 us: a layer with experts, their backward, an optimizer."""
    engine = "autograd::engine::evaluate_function: "
    return [
        event("ProfilerStep#3", 0, 1000, "user_annotation"),
        event("layers.1", 100, 200, "user_annotation"),
        event("layers.1.mlp.experts", 150, 100, "user_annotation"),
        event("aten::mm", 160, 80),
        event(f"{engine}MmBackward0", 400, 150, thread=backward_thread),
        event("MmBackward0", 405, 140, thread=backward_thread),
        event("aten::mm", 410, 100, thread=backward_thread),
        event(f"{engine}torch::autograd::AccumulateGrad", 560, 20, thread=backward_thread),
        event("optimizer", 600, 300, "user_annotation"),
        event("aten::mul_", 650, 50),
        *link(7, (1, 160), (backward_thread, 405)),
    ]


def test_every_microsecond_of_a_step_belongs_to_one_kind():
    step_ms, times = time_by_kind(step())
    found = {time.kind: (time.forward, time.backward) for time in times}
    assert step_ms == 1.0 and sum(time.total for time in times) == pytest.approx(1.0)
    assert found["routed experts"] == pytest.approx((0.1, 0.15))  # the engine's part of a function is the function's
    assert found["rest of the layers"] == pytest.approx((0.1, 0.0))
    assert found["optimizer"] == pytest.approx((0.3, 0.0))
    assert found["FSDP and gradient sums"] == pytest.approx((0.0, 0.02))
    assert found[REST] == pytest.approx((1.0 - 0.1 - 0.15 - 0.1 - 0.3 - 0.02, 0.0))


def test_kernels_belong_to_what_launched_them_also_from_another_thread():
    launches = [
        (170, 1, 11), (420, 2, 12), (660, 1, 13), (950, 1, 14),  # experts, their backward, optimizer, nobody
    ]  # fmt: skip
    kernels = [(300.0, 200.0), (500.0, 300.0), (700.0, 200.0), (980.0, 5.0)]  # the third one beside the second one
    events = step(backward_thread=2)
    for (start, thread, number), (when, duration) in zip(launches, kernels, strict=True):
        events.append(event("cudaLaunchKernel", start, 5, "cuda_runtime", thread, correlation=number))
        events.append(event("gemm", when, duration, "kernel", 70, correlation=number))
    # What torch also draws beside the kernels.
    events.append(event("ProfilerStep#3", 300, 600, "gpu_user_annotation", 70))
    events.append({"ph": "C", "name": "queue", "ts": 0, "args": {}})
    step_ms, times = time_by_kind(events)
    found = {time.kind: (time.forward, time.backward) for time in times}
    assert step_ms == 1.0
    assert found == {
        "routed experts": pytest.approx((0.2, 0.3)),
        "optimizer": pytest.approx((0.2, 0.0)),
        REST: pytest.approx((0.005, 0.0)),
        IDLE: pytest.approx((1.0 - 0.6 - 0.005, 0.0)),  # 300 to 900 is covered once
    }


def test_times_are_per_step_of_several():
    second = [{**one, "ts": one["ts"] + 2000, "id": 8} for one in step()]
    step_ms, times = time_by_kind([*step(), *second])
    assert step_ms == 1.0
    assert {time.kind: time.total for time in times}["routed experts"] == pytest.approx(0.25)


@pytest.mark.parametrize("flavor", ["debug", "GLM-4.6", "GLM-4.5-Air"])
def test_flops_of_all_kinds_are_those_of_the_step(flavor):
    shape = PRESETS[flavor]
    flops = flops_by_kind(named_rows(shape), shape, 3000, 10**6)
    assert sum(flops.values()) == pytest.approx(batch_flops(shape, 3000, 10**6), rel=1e-12)
    assert flops.keys() < set(KINDS) and "embedding" not in flops
    # Two pipeline stages have the parts of the whole: prediction layers use the head of their own stage.
    names = list(named_rows(shape))
    parts = [[n for n in names if n.startswith(("layers.0.", "embed"))], [n for n in names if n[:9] != "layers.0."]]
    assert sum(sum(flops_by_kind(part, shape, 3000, 10**6).values()) for part in parts) == pytest.approx(
        sum(flops.values())
    )


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


def test_every_parameter_is_in_a_module_of_some_kind():
    assert [n for n in named_rows(PRESETS["debug"]) if kind_of(n.rpartition(".")[0]) is None] == []
    assert kind_of("critic/layers.3.self_attn.core") == "attention core"
    assert kind_of("model") is kind_of("layers.3.mlp (MoE)") is kind_of("aten::mm") is None


def small_model() -> Transformer:
    shape = PRESETS["debug"].model_copy(update={name: value for name, value in TINY.items() if name != "flavor"})
    model = Transformer(shape)
    initialise(model, 0)
    return model


def gradients(model: Transformer) -> tuple[float, torch.Tensor]:
    ids = torch.arange(64).view(2, 32) % 50
    model.zero_grad()
    sums = model(ids, labels=ids, mtp_input_ids=ids[:, None], mtp_labels=ids[:, None])
    (sums.loss + sums.mtp_losses.sum()).backward()
    return sums.loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_ranges_change_no_bit_and_leave_nothing_behind(mode, tmp_path):
    model = small_model()
    if mode != "none":
        activation_checkpoint.apply(model, mode)
    loss, gradient = gradients(model)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with module_ranges(model), profile() as recorded:
        again = gradients(model)
    assert again[0] == loss and torch.equal(again[1], gradient)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert all(not hook for module in model.modules() for hook in (module._forward_hooks, module._forward_pre_hooks))
    assert all(vars(m.dispatcher) == vars(LocalDispatcher()) for m in model.modules() if hasattr(m, "dispatcher"))
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    # One call of each module in forward, and one more where its layer is computed again. Dispatch: start and arrived.
    calls = 1 if mode == "none" else 2
    assert named.count("layers.1.self_attn") == calls and named.count("layers.1.mlp.dispatch") == 2 * calls
    assert {"model", "layers.1.mlp (MoE)", "layers.0.self_attn.core", "mtp.0.block.mlp.combine", "lm_head"} <= {*named}


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_rows_of_two_chunks_travel_in_ranges_of_their_own(one_rank):
    """The dispatcher calls the experts for the second chunk, and moves rows between the products of the first."""
    model = small_model()
    for moe in (module for module in model.modules() if hasattr(module, "dispatcher")):
        moe.dispatcher = AllToAllDispatcher(one_rank, chunks=2)
    with module_ranges(model), profile() as recorded:
        gradients(model)
    found = Counter()
    for event in recorded.events():
        what = next((what for what in ("grouped_mm", "alltoall", "all_to_all") if what in event.name), None)
        parent = event.cpu_parent
        while parent is not None and kind_of(parent.name) is None:
            parent = parent.cpu_parent
        if what is not None and parent is not None and parent.name.startswith("layers.1."):
            found[what[:3], parent.name.rpartition(".")[2]] += 1
    assert found.keys() == {("gro", "experts"), ("all", "dispatch"), ("all", "combine")}, found


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again_for_a_profile():
    model = small_model()
    for layer in (*model.layers.values(), *model.mtp.values()):
        layer.forward = torch.compile(layer.forward, backend="eager")
    loss, _ = gradients(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with module_ranges(model, is_compiled=True), profile() as recorded:
        assert gradients(model)[0] == loss
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert {"layers.0", "layers.1", "lm_head"} <= {event.name for event in recorded.events()}


def test_the_table_of_compiled_layers_has_their_flops_in_one_row():
    _, times = time_by_kind(step())
    flops = {"routed experts": 2e9, "router": 1e9, "head": 5e9}
    rows = {row["kind"]: row for row in table_rows(1.0, times, flops, is_compiled=True)}
    assert rows["rest of the layers"]["gflop"] == 3.0 and rows["routed experts"]["gflop"] is None
    rows = table_rows(1.0, times, flops, is_compiled=False)
    (experts,) = [row for row in rows if row["kind"] == "routed experts"]
    assert experts["gflop_per_second"] == pytest.approx(2.0 / 0.25e-3) and experts["share"] == pytest.approx(0.25)
    assert "routed experts" in format_table(rows, 1.0)


WAITED = "waited for all ranks"


def profiler(folder: Path, **keys) -> tuple[Profiler, list[str]]:
    said: list[str] = []
    about = Profiled(
        0,
        torch.device("cpu"),
        [("", torch.nn.Linear(2, 2))],
        False,
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
    service, said = profiler(tmp_path, profile_freq=5, profiler_warmup=2)
    with service:
        assert steps_of(service, 1, 11) == [3, 4, 5, 8, 9, 10]
        assert [number for number in range(1, 12) if service.covers(number)] == [3, 4, 5, 8, 9, 10]
        tables = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/*/rank0_modules.json"))]
        assert [table["step"] for table in tables] == [5, 10]
        assert len(said) == 4 and said[1] == said[3] == WAITED
        assert "profile_traces/step-000005/rank0_trace.json" in said[0] and "step-000010" in said[2]
        # A run that continues inside of a profile records what is left of it.
        assert steps_of(service, 15, 15) == [15] and steps_of(service, 19, 19) == [19]
    assert json.loads((tmp_path / "profile_traces/step-000015/rank0_modules.json").read_text())["step"] == 15
    assert not (tmp_path / "profile_traces/step-000020").exists()


@pytest.mark.slow
def test_a_file_requests_a_profile_of_the_next_steps_once(tmp_path):
    service, said = profiler(tmp_path, enable_profiling=False, profiler_warmup=2, profile_freq=100)
    with service:
        assert steps_of(service, 1, 2) == [] and not service.is_requested()
        (tmp_path / REQUEST_FILE).touch()
        wait_until(service.is_requested)
        assert not (tmp_path / REQUEST_FILE).exists() and not service.is_requested()
        service.step_begins(3)
        service.record_after(3)  # the ranks agree on it within a step
        assert steps_of(service, 3, 9) == [4, 5, 6]
        assert [number for number in range(1, 10) if service.covers(number)] == [4, 5, 6]
    assert said[0] == "a profile was requested: step 6 is recorded on ranks 0"
    assert "profile of step 6, rank 0" in said[1] and said[2:] == [WAITED]
    table = json.loads((tmp_path / "profile_traces/step-000006/rank0_modules.json").read_text())
    assert table["step"] == 6


def test_a_request_beside_a_periodic_profile_is_that_profile(tmp_path):
    service, said = profiler(tmp_path, profile_freq=10, profiler_warmup=1)
    with service:
        assert steps_of(service, 1, 6) == []
        service.record_after(7)
        service.record_after(8)  # a second request, while the first one is recorded
        assert steps_of(service, 7, 11) == [9, 10]
    assert said[0] == said[1] == "a profile was requested: step 10 is recorded on ranks 0"
    assert sorted(path.name for path in (tmp_path / "profile_traces").iterdir()) == ["step-000010"]


def test_a_request_takes_a_memory_snapshot_of_its_steps_on_a_gpu(tmp_path, monkeypatch):
    service, _ = profiler(tmp_path, enable_profiling=False, profiler_warmup=1)
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
        steps_of(service, 1, 4)
    written = "memory_snapshot/step-000003/rank0_memory_snapshot.pickle"
    assert calls == [True, written, False, False]  # the last one at the end of the run


def test_other_ranks_do_nothing(tmp_path):
    service, said = profiler(tmp_path, profile_freq=1, profiler_warmup=0, ranks=(1,))
    with service:
        assert steps_of(service, 1, 3) == [] and service.covers(1)
    assert said == [WAITED] * 3 and list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_said_once_and_leaves_no_part_of_a_file(tmp_path, small_disk):
    mount, resize = small_disk
    (mount / "filler").write_bytes(b"x" * (1 << 20))
    service, said = profiler(mount, profile_freq=1, profiler_warmup=0)
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
    profiled = make_config(profiling={"enable_profiling": True, "profile_freq": 3, "profiler_warmup": 1}, **keys)
    (tmp_path / "out").mkdir()
    losses = []
    for config in (plain, profiled):
        assert train(config) == 0
        rows = map(json.loads, (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1] and len(losses[0]) == 10
    folders, rests = sorted((tmp_path / "out/profile_traces").iterdir()), []
    assert [folder.name for folder in folders] == ["step-000003", "step-000006", "step-000009"]
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["rank0_modules.json", "rank0_trace.json"]
        table = json.loads((folder / "rank0_modules.json").read_text())
        rows = {row["kind"]: row for row in table["rows"]}
        assert rows.keys() == {*KINDS, REST}
        assert sum(row["ms"] for row in rows.values()) == pytest.approx(table["step_ms"])
        trained = {*KINDS} - {"optimizer"}
        assert all(rows[kind]["backward_ms"] > 0 for kind in trained) and rows["optimizer"]["backward_ms"] == 0
        assert rows["optimizer"]["gflop"] > 0 and rows["norms"]["gflop"] is None
        rests.append(rows[REST]["share"])
    # The rest of a step: reading text, the all-reduce of counts, the row of metrics, the engine of autograd. Another
    # program may take the core in the middle of one step.
    assert min(rests) < 0.6
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
        assert train(make_config(job={"dump_folder": str(folder)}, profiling={"profiler_warmup": 0})) == 0
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    (trace,) = folder.glob("profile_traces/*/rank0_trace.json")
    assert json.loads(trace.read_text(), strict=False)["traceEvents"]
    log = (folder / "log.txt").read_text()
    assert log.count("a profile was requested: step ") == 1 and log.count("profile of step ") == 1
    assert not (folder / REQUEST_FILE).exists() and not (tmp_path / "plain/profile_traces").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_does_not_stop_training(make_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/profile_traces").write_text("a file")
    config = make_config(profiling={"enable_profiling": True, "profile_freq": 1, "profiler_warmup": 0})
    assert train(config) == 0
    log = (tmp_path / "out/log.txt").read_text()
    assert log.count("profile_traces/step-000001/rank0_trace.json: cannot be written") == 1
    assert log.count("training continues without it") == 1
