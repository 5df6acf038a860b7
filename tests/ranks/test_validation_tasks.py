"""Loss by position and the needle are the same on every layout."""

from importlib.util import find_spec

import pytest

# FP32 logits whose sums have another order; losses are about 9.
BOUND = 1e-6
STANDARD = ("writing/number", "glm46_next_line/acc", "glm46_next_line/acc_norm", "glm46_documentation/word_perplexity",
            "glm46_documentation/byte_perplexity", "glm46_documentation/bits_per_byte")  # fmt: skip


def test_every_layout_validates_what_one_process_does(server):
    rows = {row["name"]: row["row"] for row in server.rows("validation_tasks.main")}
    one = rows.pop("one rank")
    starts = ("validation_position", "validation_needle", "validation_task")
    columns = {name for name in one if name.startswith(starts)}
    positions = {f"validation_position/{place}" for place in ("0-15", "16-31", "32-60")}
    lengths = {
        f"{name}{length}" for name in ("validation_needle", "validation_needle_loss") for length in ("", "/50", "/64")
    }
    standard = {f"validation_task/{name}" for name in STANDARD if find_spec("lm_eval")}
    assert columns == {"validation_position"} | positions | lengths | standard
    assert len(rows) == 7
    for layout, row in rows.items():
        for name in columns | {"validation_loss"}:
            # The exponent of a word is the sum of some ten losses.
            bound = 20 * BOUND if name.endswith("word_perplexity") else BOUND
            assert row[name] == pytest.approx(one[name], rel=bound), (layout, name)
