"""Only the chosen ranks record, and together they count the FLOPs of the step."""

import pytest

from glm46.config.presets import PRESETS
from glm46.engine.observe.module_times import KINDS
from glm46.run.flops import batch_flops
from tests.small_run import TINY


def test_chosen_ranks_record_their_part_of_the_step(server):
    rows = {row["name"]: row for row in server.rows("profiles.main")}
    files = {rank: [f"profile_traces/step-000002/rank{rank}_{kind}.json" for kind in ("modules", "trace")]
             for rank in (0, 1)}  # fmt: skip
    fsdp, pipeline = rows["fsdp"], rows["pipeline"]
    assert fsdp["files"] == files[1] and pipeline["files"] == files[0] + files[1]
    assert "profile of step 2" not in fsdp["said"][0] and "rank 1: profile of step 2, rank 1" in fsdp["said"][1]
    assert pipeline["said"][0].count("profile of step 2, rank 0") == 1 and "profile of" not in pipeline["said"][1]

    kinds = {name: [{row["kind"]: row for row in table["rows"]} for table in rows[name]["tables"]] for name in rows}
    (data_parallel,), (first, last) = kinds["fsdp"], kinds["pipeline"]
    # A file that the first rank has seen makes the second one record.
    requested = rows["requested"]
    assert [name.rpartition("/")[2] for name in requested["files"]] == ["rank1_modules.json", "rank1_trace.json"]
    assert "a profile was requested: step " in requested["said"][0] and "profile of step" in requested["said"][1]
    (experts,), (tensor,) = kinds["experts"], kinds["tensor"]
    for table in (data_parallel, experts, tensor):
        trained = {*KINDS} - {"optimizer", "FSDP and gradient sums"}
        assert [
            kind for kind in trained if not (table[kind]["forward_ms"] > 0 and table[kind]["backward_ms"] > 0)
        ] == []
    assert data_parallel["FSDP and gradient sums"]["ms"] > 0
    assert "embedding" in first and "head" not in first and "head" in last and "MTP" in last
    # Without attention, whose pairs depend on the documents: a rank has half of the tokens, or some of the layers.
    shape = PRESETS["debug"].model_copy(update={key: value for key, value in TINY.items() if key != "flavor"})
    shape = shape.model_copy(update={"num_key_value_heads": 2})
    whole = batch_flops(shape, 8 * 16, 0) / 1e9
    of_fsdp = 2 * products([data_parallel])
    assert of_fsdp == pytest.approx(products([first, last])) and whole < of_fsdp < 1.2 * whole
    assert 2 * products([experts]) == 2 * products([tensor]) == pytest.approx(of_fsdp)


def products(tables: list[dict]) -> float:
    return sum(row["gflop"] or 0.0 for table in tables for kind, row in table.items() if kind != "optimizer")
