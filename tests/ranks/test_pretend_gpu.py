"""What a GPU refuses, and what makes a host wait for one, on a device without hardware."""

from collections import Counter
from collections.abc import Iterator

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from glm46.compute.distributed.process import join, leave
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.storage.checkpoint.finite import names_not_finite
from tests import pretend_gpu
from tests.harness import differences, run_ranks
from tests.ranks.sharded_layouts import (
    LAYOUTS,
    bf16_run,
    build_job,
    compare,
    make_batch,
    make_config,
    micro_batches,
    run_layout,
    run_reference,
)
from tests.ranks.test_sharded_layouts import BOUNDS

CHOSEN = [
    (2, "tp2-ep2"), (2, "cp2-selective_ac-ring"), (2, "pp2-DualPipeV-micro4-offload"),
    (4, "cp2-ep4-experts12-full_ac-routes-hosts_of_2"),
]  # fmt: skip


def compare_layouts(names: list[str], shared: None) -> Iterator[dict]:
    """On each rank."""
    pretend_gpu.install()
    process = join(300)
    for name in names:
        layout = LAYOUTS[process.world_size][name]
        found = run_layout(process, layout, None)
        with _disable_current_modes():  # all is on the CPU from here on
            yield compare(layout, found, run_reference(make_config(layout), layout))
    leave()


def count_waits(name: str) -> dict:
    """On each rank: reads of a training step, and of a save's look for NaN, that make a host wait for its GPU."""
    pretend_gpu.install()
    process = join(300)
    layout = LAYOUTS[process.world_size][name]
    config = bf16_run(layout)
    moe = config.moe.model_copy(update={"router_temperature": 1.5})  # goes to the device in each step
    job = build_job(config.model_copy(update={"moe": moe}), process)
    for step in range(2):
        totals = count_step(job, [make_batch(step)])
        batches = micro_batches(job, step, layout.micro_batches)
        pretend_gpu.waits.clear()
        train_step(job, batches, totals, step, 1.0)
    waits = dict(Counter(pretend_gpu.waits))
    pretend_gpu.waits.clear()
    assert names_not_finite(job.network.parameters) == []
    waits_of_a_save = list(pretend_gpu.waits)
    leave()
    return {"waits": waits, "waits_of_a_save": waits_of_a_save}


@pytest.mark.parametrize(("ranks", "case"), CHOSEN)
def test_a_layout_with_its_tensors_on_a_device_equals_one_process(case_row, ranks, case):
    """No operator mixes tensors of the device with others; attention is the form for devices other than the CPU."""
    row = case_row(compare_layouts, ranks, case=case, at_once=4)
    assert not row["initial_weights_different"]
    assert not row["steps_of_different_counts"]
    assert differences(row, BOUNDS) == []


@pytest.mark.parametrize(("ranks", "name", "waits"), [
    (2, "ep2", [1, 10]), pytest.param(1, "fsdp", [1], marks=pytest.mark.thorough),
])  # fmt: skip
def test_the_host_waits_once_per_step_and_once_per_layer_with_distributed_experts(ranks, name, waits):
    """In BF16 with the flash kernel's operands. The layout with distributed experts has five such layers and two
    micro-batches."""
    row = run_ranks(count_waits, ranks, name)[0]
    assert sorted(row["waits"].values()) == waits, row
    assert len(row["waits_of_a_save"]) == 1, row
