"""Every layout, with every pipeline schedule, computes what one process does: loss, gradients, counts, steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sharded_layouts.py")


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def figures(request) -> list[dict]:
    """What each layout of a world size prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    root = SCRIPT.parents[2]
    done = subprocess.run(
        [*command, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == {1: 4, 2: 22, 4: 27, 8: 10}[request.param]
    return rows


def test_every_layout_equals_one_process(figures):
    for row in figures:
        assert row["initial_weights_equal"], row
        assert row["counts_equal"], row
        # FP32 sums in another order: some units of 2**-24 over sums of some hundred terms.
        assert row["loss_error"] < 1e-6, row
        assert row["norm_error"] < 1e-6, row
        assert row["gradient_error"][0] < 1e-5, row
        # AdamW's first steps divide a gradient by its own size, which amplifies rounding where a gradient is tiny.
        assert row["update_error"][0] < 1e-3, row
        # Of the weights themselves; biases start at zero, so that they are nothing but their update.
        assert row["weight_error"][0] < 1e-5, row
