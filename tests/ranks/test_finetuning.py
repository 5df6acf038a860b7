"""Fine-tuning computes the same on every kind of layout, and adapters go on from a checkpoint on any mesh."""

import pytest

BOUND = 1e-4  # FP32 sums in another order, over four steps of AdamW


def same(row: dict, expected: dict) -> bool:
    return row == pytest.approx(expected, rel=BOUND, abs=BOUND)


def test_chats_train_the_same_on_any_layout_and_adapters_resume_over_their_base(server):
    rows = {row["name"]: row for row in server.rows("finetuning.main")}
    one = rows["one rank"]
    assert one["answers"][0].startswith("Greedy answers after step 0") and len(one["answers"]) == 6
    assert one["rows"][-1]["validation_loss"] < one["rows"][0]["validation_loss"]
    for layout in ("tensor", "context", "pipeline", "experts"):
        assert rows[layout]["answers"] == one["answers"], layout
        assert all(map(same, rows[layout]["rows"], one["rows"])) and len(rows[layout]["rows"]) == len(one["rows"])
    for kind in ("lora", "dora"):
        again, moved = rows[f"{kind} resumed"], rows[f"{kind} moved"]
        whole = again["whole"]
        # Step 0 is the base, as it was before full fine-tuning.
        assert whole["rows"][0]["validation_loss"] == pytest.approx(one["rows"][0]["validation_loss"], rel=1e-6)
        assert whole["rows"][-1]["validation_loss"] < whole["rows"][0]["validation_loss"]
        assert again["rows"] == whole["rows"] and again["differences"] == {}
        assert all(map(same, moved["rows"], whole["rows"])) and len(moved["rows"]) == len(whole["rows"])
        assert max(moved["differences"].values(), default=0.0) < 1e-5
