"""A step of the engine on a CUDA device: how often the host waits for it.

Profiles: traces have kernels, snapshots are written.
"""

import json
import pickle
import warnings

import pytest
import torch
from torch import nn

from glm46.config.presets import PRESETS
from glm46.config.profiling import ProfilingConfig
from glm46.engine.observe.module_flops import flops_by_kind
from glm46.engine.observe.profiler import Profiled, Profiler
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.run.parameters import named_rows
from tests.gpu.test_model_on_gpu import debug_batch, debug_model
from tests.ranks.sharded_layouts import LAYOUTS, bf16_run, build_job, make_batch, micro_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_the_host_waits_once_per_step(process):
    layout = LAYOUTS[1]["fsdp"]
    job = build_job(bf16_run(layout), process)  # attention in FP32 has no kernel, and reads its sizes on the host
    for step in range(3):
        totals = count_step(job, [make_batch(step)])
        batches = micro_batches(job, step, layout.micro_batches)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if step else "default")  # the first step also loads kernels
            try:
                train_step(job, batches, totals, 0, 1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        messages = [found for found in caught if "called a synchronizing" in str(found.message)]
        waits = [f"{found.filename}:{found.lineno}" for found in messages]
        assert len(waits) == (1 if step else 0), waits


def test_a_profile_has_kernels_and_writes_a_snapshot(tmp_path):
    model, said, shape = debug_model(torch.bfloat16), [], PRESETS["debug"]
    batch = debug_batch(model)
    names = list(named_rows(shape))
    about = Profiled(
        0, torch.device("cuda"), lambda tokens, pairs: flops_by_kind(names, shape, tokens, pairs), lambda: None
    )
    config = ProfilingConfig(enable_profiling=True, enable_memory_snapshot=True, profile_freq=3)
    with Profiler(config, tmp_path, about, said.append) as service:
        for step in (1, 2, 3):
            service.step_begins(step)
            sums = model(**batch)
            (sums.loss + sums.mtp_losses.sum()).backward()
            torch.cuda.synchronize()
            service.step_ends(step, 4 * 512, 4 * 512**2)
    folder = tmp_path / "profile_traces/step-000003"
    events = json.loads((folder / "rank0_trace.json").read_text(), strict=False)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    rows = {row["kind"]: row for row in json.loads((folder / "rank0_flops.json").read_text())["rows"]}
    assert rows["routed experts"]["gflop"] > 0
    assert len(said) == 1 and torch.cuda.get_device_name() in said[0]
    (snapshot,) = tmp_path.glob("memory_snapshot/step-000003/*.pickle")
    content = pickle.loads(snapshot.read_bytes())  # ours, from a moment ago
    assert content["segments"] and content["device_traces"]


def test_a_request_takes_a_trace_and_a_snapshot_with_the_allocations_of_its_steps(tmp_path):
    model = nn.Linear(512, 512, device="cuda")
    about = Profiled(0, torch.device("cuda"), lambda tokens, pairs: {}, lambda: None)
    with Profiler(ProfilingConfig(), tmp_path, about, print) as service:
        for step in range(1, 7):
            service.step_begins(step)
            if step == 1:
                service.record_after(1)
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            torch.cuda.synchronize()
            service.step_ends(step, 64, 64)
    assert (tmp_path / "profile_traces/step-000005/rank0_trace.json").is_file()
    (snapshot,) = tmp_path.glob("memory_snapshot/*/*.pickle")
    assert snapshot.parent.name == "step-000005"
    content = pickle.loads(snapshot.read_bytes())  # ours, from a moment ago
    assert content["segments"] and any(trace for trace in content["device_traces"])
