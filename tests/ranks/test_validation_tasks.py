"""Loss by position and the needle are the same on every layout."""

import pytest

# FP32 logits whose sums have another order; losses are about 9.
BOUND = 1e-6


def test_every_layout_validates_what_one_process_does(server):
    one, *others = server.rows("validation_tasks.main", seconds=300)
    columns = {name for name in one["row"] if name.startswith(("validation_position", "validation_needle"))}
    positions = {f"validation_position/{place}" for place in ("0-15", "16-31", "32-60")}
    lengths = {
        f"{name}{length}" for name in ("validation_needle", "validation_needle_loss") for length in ("", "/50", "/64")
    }
    assert columns == {"validation_position"} | positions | lengths
    assert len(others) == 7
    for found in others:
        for name in columns | {"validation_loss"}:
            assert found["row"][name] == pytest.approx(one["row"][name], rel=BOUND), (found["name"], name)
