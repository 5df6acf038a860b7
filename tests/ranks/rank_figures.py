"""Train on layouts of two ranks with sensors of our own and a capacity; print one JSON object per layout with the rows.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/rank_figures.py
"""

import json
from functools import partial

import torch

from glm46.engine.observe import observers
from glm46.engine.observe.hardware import HardwareMonitor
from glm46.engine.observe.history import read_history
from glm46.operate.launch.train_rank import train
from tests.ranks.forked_ranks import in_halves, run_whole
from tests.small_run import folder_with_source, small_config

LAYOUTS = {
    "fsdp": {}, "experts": {"expert_parallel_degree": 2}, "tensor": {"tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2}, "context": {"context_parallel_degree": 2},
}  # fmt: skip
SENSORS = (
    {"memory_peak_gib": 60.5, "gpu_utilization_ratio": 0.25},
    {"memory_peak_gib": 70.0, "gpu_utilization_ratio": 1.0, "gpu_power_watts": 300.0},
)
"""By rank; the first GPU tells nothing of its power."""


def main() -> None:
    """Three steps on each layout."""
    with folder_with_source() as (base, source):

        def run(label: str) -> None:
            config = small_config(
                source, base / label, parallelism=LAYOUTS[label], checkpoint={"enable": False},
                model={"num_key_value_heads": 2}, moe={"capacity_factor": 0.75},
                training={"steps": 3, "global_batch_size": 8},
            )  # fmt: skip

            def work(rank: int) -> int:
                torch.set_num_threads(1)
                observers.HardwareMonitor = partial(HardwareMonitor, sensor=lambda: SENSORS[rank])
                return train(config)

            log = base / f"log-{label}-"
            said = run_whole(2, log, work)
            rows = read_history(base / label / "metrics.jsonl")
            print(json.dumps({"name": label, "said": said[0], "rows": rows}), flush=True)

        in_halves(LAYOUTS, run)


if __name__ == "__main__":
    main()
