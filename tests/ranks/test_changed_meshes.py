"""The short form of changed_meshes.py, which says how to start the long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("changed_meshes.py")


def test_a_run_goes_on_on_another_mesh_with_equal_bits_and_equal_losses():
    saving = ["FSDP", "TP and EP", "PP and TP"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", PROGRAM, *saving],
        capture_output=True, text=True, timeout=400,
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len({(row["saved on"], row["went on with"]) for row in rows}) == 12
    assert {row["saved on"] for row in rows} == set(saving)
    for row in rows:
        assert row["saved on"] != row["went on with"]
        assert row["different"] == [] and row["states"] > 200, row
        assert len(row["loss errors"]) == 2 and max(row["loss errors"]) < 1e-6, row  # FP32 sums in another order
