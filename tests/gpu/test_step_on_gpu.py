"""A step of the engine on a CUDA device: how often the host waits for it."""

import warnings

import pytest
import torch

from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
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
