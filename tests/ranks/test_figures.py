"""What runs on several ranks report: figures of all ranks, bandwidths, profiles, and steps that a NaN skips."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.config.presets import PRESETS
from glm46.engine.observe import observers
from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.hardware import HardwareMonitor
from glm46.engine.observe.module_flops import KINDS, OPTIMIZER
from glm46.engine.observe.profiler import REQUEST_FILE, Profiler
from glm46.engine.training import loop
from glm46.engine.training import network as network_module
from glm46.operate.launch.train_rank import train
from glm46.run.flops import batch_flops
from glm46.tasks.pretrain import next_token, task
from tests.builders import TINY, metric_rows, small_config
from tests.harness import Ranks, call, in_halves, run_ranks, this_rank
from tests.processes import wait_until

DEGREES = {
    "fsdp": {}, "replicas": {"data_parallel_replicate_degree": 2}, "experts": {"expert_parallel_degree": 2},
    "tensor": {"tensor_parallel_degree": 2}, "context": {"context_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2},
}  # fmt: skip
"""The layouts of two ranks."""


SENSORS = (
    {"memory_peak_gib": 60.5, "gpu_utilization_ratio": 0.25},
    {"memory_peak_gib": 70.0, "gpu_utilization_ratio": 1.0, "gpu_power_watts": 300.0},
)
"""By rank; the first GPU tells nothing of its power."""


def train_with_sensors(config) -> None:
    """On each rank."""
    observers.HardwareMonitor = partial(HardwareMonitor, sensor=lambda: SENSORS[this_rank()])
    sys.exit(train(config))


def run_with_sensors(source: Path, folder: Path) -> list[dict]:
    """Three steps on each layout."""

    def run(label: str) -> dict:
        config = small_config(
            source, folder / label, parallelism=DEGREES[label], checkpoint={"enable": False},
            model={"num_key_value_heads": 2}, moe={"capacity_factor": 0.75},
            training={"steps": 3, "global_batch_size": 8},
        )  # fmt: skip
        ranks = Ranks(2, train_with_sensors, config)
        ranks.results()
        return {"said": ranks.text(0), "rows": metric_rows(folder / label)}

    return in_halves([label for label in DEGREES if label != "replicas"], run)


MOE_LAYERS = 2
"""One of the two decoder layers, and the prediction layer."""


def test_rows_have_the_figures_of_all_ranks(source_folder, tmp_path):
    for layout in call(run_with_sensors, source_folder, tmp_path):
        assert len(layout["rows"]) == 3
        for row in layout["rows"]:
            assert [row[f"memory_peak_gib/{part}"] for part in ("min", "mean", "max")] == [60.5, 65.25, 70.0]
            assert [row[f"gpu_utilization_ratio/{part}"] for part in ("min", "mean", "max")] == [0.25, 0.625, 1.0]
            assert {row[f"gpu_power_watts/{part}"] for part in ("min", "mean", "max")} == {300.0}
            assert "gpu_temperature_celsius/max" not in row and "extreme_rank/gpu_temperature_celsius/max" not in row
            ranks = [row[f"extreme_rank/{figure}"] for figure in ("memory_peak_gib/min", "memory_peak_gib/max")]
            assert ranks == [0, 1]
            # The one rank that has a sensor has both.
            assert row["extreme_rank/gpu_power_watts/min"] == row["extreme_rank/gpu_power_watts/max"] == 1
            low, mean, high = (row[f"resident_memory_gib/{part}"] for part in ("min", "mean", "max"))
            assert 0 < low <= high and mean == pytest.approx((low + high) / 2, rel=1e-12)
            # All assignments of all ranks, dropped or not: the ratio is of these.
            assigned = row["batch_tokens"] * TINY["num_experts_per_tok"] * MOE_LAYERS
            dropped = row["expert_overflow_count"]
            assert isinstance(dropped, int) and assigned / 4 <= dropped < assigned
            assert row["expert_overflow_ratio"] == dropped / assigned
        assert "GiB  70.0" in layout["said"]  # the line has the largest alone


PROBED = {
    "replicas": DEGREES["replicas"],
    "tensor and experts": DEGREES["tensor"] | DEGREES["experts"],
    "pipeline and context": DEGREES["pipeline"] | DEGREES["context"],
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
        return metric_rows(folder)

    assert PROBED.keys() == GROUPS.keys()
    for name, degrees in PROBED.items():
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


PROFILED = {"fsdp": "none", "pipeline": "none", "experts": "full", "tensor": "selective", "requested": "none"}
"""Activation checkpointing of a layout."""


def wait_for_request(is_requested: Callable[[Profiler], bool] = Profiler.is_requested) -> Callable[[Profiler], bool]:
    """In place of `Profiler.is_requested` in a short run: the first call waits until the thread has seen the file."""
    calls = count()

    def waiting(profiler: Profiler) -> bool:
        if profiler._request is not None and next(calls) == 0:
            wait_until(profiler._request._is_seen.is_set)
        return is_requested(profiler)

    return waiting


def train_and_record(config) -> None:
    """On each rank."""
    if config.job.dump_folder.endswith("requested"):
        Profiler.is_requested = wait_for_request()
    sys.exit(train(config))


def run_profiled(source: Path, folder: Path) -> dict[str, dict]:
    """Two steps on each layout, the second one recorded; six where a file requests it, which the first rank sees."""

    def run(label: str) -> dict:
        profiling = {"enable_profiling": True, "profile_freq": 2}
        if label == "requested":
            profiling = {}
            (folder / label).mkdir()
            (folder / label / REQUEST_FILE).touch()
        config = small_config(
            source, folder / label, parallelism=DEGREES.get(label, {}), checkpoint={"enable": False},
            activation_checkpoint={"mode": PROFILED[label]}, model={"num_key_value_heads": 2},
            training={"steps": 6 if label == "requested" else 2, "global_batch_size": 8},
            profiling=profiling,
        )  # fmt: skip
        ranks = Ranks(2, train_and_record, config)
        ranks.results()
        files = sorted((folder / label / "profile_traces").rglob("*.json"))
        return {
            "said": [ranks.text(0), ranks.text(1)],
            "files": [str(file.relative_to(folder / label)) for file in files],
            "tables": [json.loads(file.read_text()) for file in files if file.name.endswith("flops.json")],
        }

    return dict(zip(PROFILED, in_halves(list(PROFILED), run), strict=True))


def test_the_first_rank_records_its_part_of_the_step(source_folder, tmp_path):
    rows = call(run_profiled, source_folder, tmp_path)
    files = [f"profile_traces/step-000002/rank0_{kind}.json" for kind in ("flops", "trace")]
    for name in ("fsdp", "pipeline"):
        assert rows[name]["files"] == files
        first, second = rows[name]["said"]
        assert first.count("profile of step 2, rank 0") == 1 and "profile of" not in second

    kinds = {name: [{row["kind"]: row for row in table["rows"]} for table in rows[name]["tables"]] for name in rows}
    (data_parallel,), (first,) = kinds["fsdp"], kinds["pipeline"]
    requested = rows["requested"]
    assert [name.rpartition("/")[2] for name in requested["files"]] == ["rank0_flops.json", "rank0_trace.json"]
    assert "a profile was requested: step " in requested["said"][0] and "profile of step" in requested["said"][0]
    (experts,), (tensor,) = kinds["experts"], kinds["tensor"]
    for table in (data_parallel, experts, tensor):
        # This model has no sparse attention, hence no indexer, and no products of Muon where AdamW trains it.
        assert {*KINDS} - table.keys() <= {OPTIMIZER, "indexer"}
    assert "head" not in first and "MTP" not in first
    # Without attention, whose pairs depend on the documents: a rank has half of the tokens.
    shape = PRESETS["debug"].model_copy(update={key: value for key, value in TINY.items() if key != "flavor"})
    shape = shape.model_copy(update={"num_key_value_heads": 2})
    whole = batch_flops(shape, 8 * 16, 0) / 1e9
    of_fsdp = 2 * products([data_parallel])
    assert products([first]) < of_fsdp and whole < of_fsdp < 1.2 * whole
    assert 2 * products([experts]) == 2 * products([tensor]) == pytest.approx(of_fsdp)


def products(tables: list[dict]) -> float:
    return sum(row["gflop"] for table in tables for kind, row in table.items() if kind != OPTIMIZER)


POISONED = ("fsdp", "replicas")
SITES = ("gradient", "gradient shard", "activation", "router", "loss")
BAD = {2 * (1 + i): (site, victim) for i, (site, victim) in enumerate((s, v) for s in SITES for v in (0, 1))}
"""Every second step: where the NaN appears, and on which rank."""
STEPS = max(BAD) + 1


def poison(hit) -> None:
    """Put a NaN at a place of the step whenever ``hit(place)``."""
    loss, norm, build = next_token.next_token_loss, network_module.global_grad_norm, task.build_network
    nan = float("nan")

    def poisoned_norm(parameters, *arguments):
        # After the gradients were summed: only the ranks of this shard, or of this copy, can see it.
        parameters = list(parameters)
        if hit("gradient shard"):
            next(g for g in (local_tensor(p.grad) for p in parameters) if g.numel()).view(-1)[0] = nan
        return norm(parameters, *arguments)

    def poisoned_build(*arguments, **options):
        network = build(*arguments, **options)
        layer = network.models[0].get_submodule("layers.1")
        for site, module in (("activation", layer), ("router", layer.mlp.router)):
            module.register_forward_pre_hook(
                lambda _, inputs, site=site: (inputs[0] * nan, *inputs[1:]) if hit(site) else None
            )
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, __, output: output.register_hook(lambda g: g * nan) and None if hit("gradient") else None
        )
        return network

    next_token.next_token_loss = lambda *arguments: loss(*arguments) * (nan if hit("loss") else 1.0)
    network_module.global_grad_norm, task.build_network = poisoned_norm, poisoned_build


def train_poisoned(config) -> list[bool]:
    """On each rank: whether each step kept all bits of the state."""
    rank = this_rank()
    step, pending, kept = 0, None, []
    original = loop.train_step

    def recorded(job, *arguments):
        nonlocal step, pending
        step += 1
        site, victim = BAD.get(step, (None, None))
        pending = site if rank == victim else None
        parts = job.network
        named = parts.parameters | parts.optimizer.state_tensors() | parts.balance.state_tensors()
        named |= {f"bias{i}": r.e_score_correction_bias for i, r in enumerate(parts.balance.routers.values())}
        before = {name: local_tensor(t.detach()).clone() for name, t in named.items()}
        outcome = original(job, *arguments)
        after = {name: local_tensor(t.detach()) for name, t in named.items()}
        assert pending is None, pending
        assert all(t.isfinite().all() for t in after.values())
        kept.append(all(torch.equal(before[n], after[n]) for n in before))
        return outcome

    def hit(site: str) -> bool:
        nonlocal pending
        is_due = pending == site
        pending = None if is_due else pending
        return is_due

    loop.train_step = recorded
    poison(hit)
    train(config)
    return kept


def run_poisoned(source: Path, folder: Path) -> list[dict]:
    def run(layout: str) -> dict:
        config = small_config(
            source, folder / layout, training={"steps": STEPS}, parallelism=DEGREES[layout],
            checkpoint={"enable": False},
            moe={"balance": "proportional", "bias_update_rate": 0.01},
        )  # fmt: skip
        kept = Ranks(2, train_poisoned, config).results()
        rows = metric_rows(folder / layout)
        row = {"layout": layout, "bad": list(BAD), "skipped": [row["skipped_steps"] for row in rows]}
        return row | {"log": (folder / layout / "log.txt").read_text(), "kept": kept}

    return in_halves(POISONED, run)


def test_a_nan_anywhere_on_any_rank_skips_one_step_and_changes_nothing(source_folder, tmp_path):
    rows = call(run_poisoned, source_folder, tmp_path)
    assert {row["layout"] for row in rows} == {*POISONED} and len(rows) == 2
    for row in rows:
        assert len(row["bad"]) == 5 * 2  # places, ranks
        steps = range(1, len(row["skipped"]) + 1)
        assert row["skipped"] == [sum(bad <= step for bad in row["bad"]) for step in steps], row
        for kept in row["kept"]:  # of each rank: whether a step left weights, states and biases as they were
            assert kept == [step in row["bad"] for step in steps], row
        assert "step 2 skipped: loss or gradient norm is not finite; samples 4 to 7" in row["log"], row
