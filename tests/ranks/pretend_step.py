"""The reads of a training step, and of a save's look for NaN, that make a host wait for its GPU; prints JSON.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/pretend_step.py
"""

import json
from collections import Counter

from glm46.compute.distributed.process import join, leave
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.storage.checkpoint.finite import names_not_finite
from tests import pretend_gpu
from tests.ranks.bf16_layouts import bf16_run
from tests.ranks.forked_ranks import run_ranks
from tests.ranks.sharded_layouts import LAYOUTS, build_job, make_batch, micro_batches


def work(ranks: int, name: str) -> None:
    pretend_gpu.install()
    process, layout = join(300), LAYOUTS[ranks][name]
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
    if process.is_main:
        print(json.dumps({"layout": f"{ranks} {name}", "waits": waits, "waits_of_a_save": pretend_gpu.waits}))
    leave()


def main() -> None:
    for ranks, name in ((1, "fsdp"), (2, "ep2")):
        run_ranks(ranks, lambda ranks=ranks, name=name: work(ranks, name))


if __name__ == "__main__":
    main()
