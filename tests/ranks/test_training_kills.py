"""The short form of training_kills.py, which says how to start the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("training_kills.py")


@pytest.mark.parametrize("by", ["kill", "signal"])
def test_a_run_that_is_ended_again_and_again_computes_what_an_undisturbed_one_does(by):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--kills", "2", "--steps", "18", "--seed", "2", "--by", by],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 ends in") and "all equal to an undisturbed one" in done.stdout
