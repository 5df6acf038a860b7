"""Train on four ranks, as on two nodes, with the probe of bandwidth and without it; print one JSON object per layout.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/bandwidth.py
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, generate_latest

from glm46.engine.observe.exporter import RunCollector
from glm46.engine.observe.history import read_history
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.pretrain.task import train
from tests.ranks.forked_ranks import await_ranks, start_ranks
from tests.small_run import small_config, write_source

LAYOUTS = {
    "replicas": {"data_parallel_replicate_degree": 2},
    "tensor and experts": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "pipeline and context": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
}
INTERVAL = 2


def main() -> None:
    """Five steps on each layout, rows every third step."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "source").mkdir()
        source = write_source(base / "source", load_tokenizer("builtin"))
        for label, degrees in LAYOUTS.items():
            rows = [_rows(source, base / f"{label} {interval}", degrees, interval) for interval in (0, INTERVAL)]
            registry = CollectorRegistry(auto_describe=False)
            registry.register(RunCollector(base / f"{label} {INTERVAL}"))
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
    codes = await_ranks(start_ranks(4, log, work))
    if any(codes):
        raise SystemExit("".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(4)))
    return read_history(folder / "metrics.jsonl")


if __name__ == "__main__":
    main()
