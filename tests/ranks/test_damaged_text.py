"""A shard that is damaged during a run ends it on all ranks before anything is trained on it, whatever the layout."""

import re


def test_damaged_text_ends_all_ranks_before_the_step_that_would_use_it(server):
    rows = server.rows("damaged_text.main")
    assert len(rows) == 6
    for row in rows:
        assert row["code"] == 2, row
        assert row["steps"] == [1, 2, 3], row
        assert max(row["saved"], default=0) <= 3, row
        kind = "missing, the file is truncated" if row["case"] == "cut short" else "do not match the checksum"
        part = "validation" if row["case"].startswith("held-out") else "train"
        found = re.findall(rf"error: \S+/{part}-00000.safetensors: bytes \d+ to \d+: {kind}", row["said"])
        # Once for each damaged place, however many ranks have seen it; ranks that read other rows may see another.
        assert 1 <= len(found) <= 2 and len(set(found)) == len(found), f"{row['case']}\n{row['said']}"
        assert "Traceback" not in row["said"], row
        assert kind in row["log"], row
