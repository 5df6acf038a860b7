"""Extreme routing, padding, windows and compiled layers on two processes compute what one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("edge_cases.py")


def test_every_case_equals_one_process():
    root = SCRIPT.parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]  # a compilation after the second step ends the process
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 16
    for row in rows:
        case = row["case"]
        if case["favourite"] is not None:
            assert row["busiest"] == row["assignments"], "the case is as extreme as it says"
        assert row["counts_equal"], case
        # FP32 sums in another order, over the gradients of four steps.
        assert row["loss_error"] < 1e-6, case
        assert row["gradient_error"][0] < 1e-5, (case, row["gradient_error"])
