"""Train on four ranks, as on two nodes, with the probe of bandwidth and without it; print one JSON object per layout.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/bandwidth.py
"""

import json
import os
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, generate_latest

from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.history import read_history
from glm46.operate.launch.train_rank import train
from tests.ranks.forked_ranks import run_whole
from tests.small_run import folder_with_source, small_config

LAYOUTS = {
    "replicas": {"data_parallel_replicate_degree": 2},
    "tensor and experts": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "pipeline and context": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
}
INTERVAL = 2


def main() -> None:
    """Five steps on each layout, rows every third step."""
    with folder_with_source() as (base, source):
        for label, degrees in LAYOUTS.items():
            rows = [_rows(source, base / f"{label} {interval}", degrees, interval) for interval in (0, INTERVAL)]
            exporter = Exporter(label, None, print)
            for row in rows[1]:
                exporter.row({column: value for column, value in row.items() if column != "kind"})
            registry = CollectorRegistry(auto_describe=False)
            registry.register(exporter)
            exported = generate_latest(registry).decode()
            print(json.dumps({"name": label, "without": rows[0], "rows": rows[1], "exported": exported}), flush=True)


def _rows(source: Path, folder: Path, degrees: dict[str, int], interval: int) -> list[dict]:
    config = small_config(
        source, folder, parallelism=degrees, checkpoint={"enable": False}, comm={"bandwidth_interval": interval},
        model={"num_key_value_heads": 2}, training={"steps": 5, "global_batch_size": 8},
    )  # fmt: skip

    def work(_rank: int) -> int:
        torch.set_num_threads(1)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        return train(config)

    log = folder.with_name(f"{folder.name} log")
    run_whole(4, log, work)
    return read_history(folder / "metrics.jsonl")


if __name__ == "__main__":
    main()
