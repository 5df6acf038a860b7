"""On 4 ranks: count what a step of each pipeline sends, and print it from rank 0."""

import json

import torch
import torch.distributed as dist

from glm46.compute.distributed.process import join, leave
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.ranks.sharded_layouts import (
    ROWS,
    SEQ_LEN,
    SHAPE,
    Layout,
    build_job,
    make_batch,
    make_config,
    micro_batches,
    schedule_here,
)
from tests.ranks.traffic import Traffic

CASES = [
    Layout(pipeline=2),
    Layout(pipeline=2, schedule=schedule_here("ZBVZeroBubble"), micro_batches=4),
    Layout(pipeline=2, tensor=2, micro_batches=4),
]


def main() -> None:
    """Measure the second step: the first one also agrees on shapes."""
    torch.set_num_threads(1)
    process = join(300)
    for layout in CASES:
        job = build_job(make_config(layout), process)
        totals = count_step(job, [make_batch(0)])
        for _ in range(2):
            with Traffic() as traffic:
                train_step(job, micro_batches(job, 0, layout.micro_batches), totals, 0, 1.0)
        figures = {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}
        figures["parameters"] = sum(parameter.to_local().numel() for parameter in job.network.parameters.values())
        ranks: list = [None] * process.world_size
        dist.all_gather_object(ranks, figures)
        if process.is_main:
            case = {"layout": layout._asdict(), "rows": ROWS, "seq_len": SEQ_LEN, "shape": SHAPE, "ranks": ranks}
            print(json.dumps(case), flush=True)
    leave()
