"""The probe of bandwidth measures each axis of the mesh when it is time, and changes nothing of the training."""

import os
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.history import read_history
from glm46.operate.launch.train_rank import train
from tests.builders import small_config
from tests.harness import run_ranks

LAYOUTS = {
    "replicas": {"data_parallel_replicate_degree": 2},
    "tensor and experts": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "pipeline and context": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
}
INTERVAL = 2


def train_as_on_two_nodes(config) -> None:
    """On each rank."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    sys.exit(train(config))


GROUPS = {
    "replicas": {"dp_replicate@nodes", "shard@node"},
    "tensor and experts": {"shard@nodes", "tp@node", "efsdp@nodes", "ep@node"},
    "pipeline and context": {"shard@node", "cp@node", "pp@nodes"},
}
SIZE, RANKS = 2**20, 2


def test_the_probe_writes_rows_of_its_groups_and_changes_no_loss(source_folder, tmp_path):
    """Five steps on each layout, rows every third step."""

    def rows_of(degrees: dict[str, int], folder: Path, interval: int) -> list[dict]:
        config = small_config(
            source_folder, folder, parallelism=degrees, checkpoint={"enable": False},
            comm={"bandwidth_interval": interval}, model={"num_key_value_heads": 2},
            training={"steps": 5, "global_batch_size": 8},
        )  # fmt: skip
        run_ranks(train_as_on_two_nodes, 4, config)
        return read_history(folder / "metrics.jsonl")

    assert LAYOUTS.keys() == GROUPS.keys()
    for name, degrees in LAYOUTS.items():
        without, rows = (rows_of(degrees, tmp_path / f"{name} {interval}", interval) for interval in (0, INTERVAL))
        exporter = Exporter(name, None, print)
        for row in rows:
            exporter.row({column: value for column, value in row.items() if column != "kind"})
        registry = CollectorRegistry(auto_describe=False)
        registry.register(exporter)
        assert [(row["step"], row["loss"], row["grad_norm"]) for row in rows] == [
            (row["step"], row["loss"], row["grad_norm"]) for row in without
        ]
        columns = {
            f"{column}/{g}" for column in ("allreduce_ms", "allreduce_bandwidth", "bus_bandwidth") for g in GROUPS[name]
        }
        columns.add("bandwidth_probe_seconds")
        for row, other in zip(rows, without, strict=True):
            assert row.keys() - other.keys() == (columns if row["step"] % INTERVAL == 0 else set()), name
        measured = [row for row in rows if row["step"] % INTERVAL == 0]
        for row in measured:
            seconds = sum(row[f"allreduce_ms/{group}"] for group in GROUPS[name]) / 1e3
            assert 0 < seconds < row["bandwidth_probe_seconds"]
            for group in GROUPS[name]:
                bandwidth = SIZE / (row[f"allreduce_ms/{group}"] / 1e3) / 1e9
                assert row[f"allreduce_bandwidth/{group}"] == pytest.approx(bandwidth, rel=1e-9)
                assert row[f"bus_bandwidth/{group}"] == pytest.approx(bandwidth * 2 * (RANKS - 1) / RANKS, rel=1e-9)
        exported = {
            (sample.name, sample.labels.get("group")): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        }
        names = {"nccl_allreduce_time_ms": "allreduce_ms", "nccl_bandwidth_gbps": "allreduce_bandwidth",
                 "nccl_busbw_gbps": "bus_bandwidth"}  # fmt: skip
        for exported_as, column in names.items():
            for group in GROUPS[name]:
                assert exported[exported_as, group] == measured[-1][f"{column}/{group}"]
