"""The probe of bandwidth measures each axis of the mesh when it is time, and changes nothing of the training."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ranks.bandwidth import INTERVAL

GROUPS = {
    "replicas": {"dp_replicate@nodes", "shard@node"},
    "tensor and experts": {"shard@nodes", "tp@node", "efsdp@nodes", "ep@node"},
    "pipeline and context": {"shard@node", "cp@node", "pp@nodes"},
}
SIZE, RANKS = 2**20, 2


def test_the_probe_writes_rows_of_its_groups_and_changes_no_loss(server):
    layouts = {row["name"]: row for row in server.rows("bandwidth.main")}
    assert layouts.keys() == GROUPS.keys()
    for name, layout in layouts.items():
        rows, without = layout["rows"], layout["without"]
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
            for family in text_string_to_metric_families(layout["exported"])
            for sample in family.samples
        }
        names = {"nccl_allreduce_time_ms": "allreduce_ms", "nccl_bandwidth_gbps": "allreduce_bandwidth",
                 "nccl_busbw_gbps": "bus_bandwidth"}  # fmt: skip
        for exported_as, column in names.items():
            for group in GROUPS[name]:
                assert exported[exported_as, group] == measured[-1][f"{column}/{group}"]
