"""Rank 0 records, and counts its part of the FLOPs of the step."""

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from glm46.config.presets import PRESETS
from glm46.engine.observe.module_flops import KINDS, OPTIMIZER
from glm46.engine.observe.profiler import REQUEST_FILE, Profiler
from glm46.operate.launch.train_rank import train
from glm46.run.flops import batch_flops
from tests.builders import TINY, small_config
from tests.harness import Ranks, call, in_halves
from tests.processes import wait_until

LAYOUTS = {
    "fsdp": ({}, "none"),
    "pipeline": ({"pipeline_parallel_degree": 2}, "none"),
    "experts": ({"expert_parallel_degree": 2}, "full"),
    "tensor": ({"tensor_parallel_degree": 2}, "selective"),
    "requested": ({}, "none"),
}
"""Degrees and activation checkpointing."""


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


def run_layouts(source: Path, folder: Path) -> dict[str, dict]:
    """Two steps on each layout, the second one recorded; six where a file requests it, which the first rank sees."""

    def run(label: str) -> dict:
        degrees, mode = LAYOUTS[label]
        profiling = {"enable_profiling": True, "profile_freq": 2}
        if label == "requested":
            profiling = {}
            (folder / label).mkdir()
            (folder / label / REQUEST_FILE).touch()
        config = small_config(
            source, folder / label, parallelism=degrees, checkpoint={"enable": False},
            activation_checkpoint={"mode": mode}, model={"num_key_value_heads": 2},
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

    return dict(zip(LAYOUTS, in_halves(list(LAYOUTS), run), strict=True))


def test_the_first_rank_records_its_part_of_the_step(source_folder, tmp_path):
    rows = call(run_layouts, source_folder, tmp_path)
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
        assert {*KINDS} - table.keys() <= {OPTIMIZER}
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
