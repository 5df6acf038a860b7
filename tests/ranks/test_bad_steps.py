"""A NaN at any place, on any rank: exactly one step is skipped, on all ranks, and no bit of the state changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_nan_anywhere_on_any_rank_skips_one_step_and_changes_nothing():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("bad_steps.py"))],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["layout"] for row in rows] == ["shards", "copies"]
    for row in rows:
        assert len(row["bad"]) == 5 * 2  # places, ranks
        steps = range(1, len(row["skipped"]) + 1)
        assert row["skipped"] == [sum(bad <= step for bad in row["bad"]) for step in steps], row
        for kept in row["kept"]:  # of each rank: whether a step left weights, states and biases as they were
            assert kept == [step in row["bad"] for step in steps], row
        assert "step 2 skipped: loss or gradient norm is not finite; samples 4 to 7" in row["log"], row
