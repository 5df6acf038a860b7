"""Rank 0 records, and counts its part of the FLOPs of the step."""

import pytest

from glm46.config.presets import PRESETS
from glm46.engine.observe.module_flops import KINDS, OPTIMIZER
from glm46.run.flops import batch_flops
from tests.small_run import TINY


def test_the_first_rank_records_its_part_of_the_step(server):
    rows = {row["name"]: row for row in server.rows("profiles.main")}
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
