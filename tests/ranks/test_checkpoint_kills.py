"""The short form of checkpoint_kills.py, which says how to start the long one."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("checkpoint_kills.py")


def test_kill_9_of_one_rank_or_all_loses_no_published_step_and_hangs_nobody():
    rounds = 8
    done = subprocess.run(
        [sys.executable, PROGRAM, "--rounds", str(rounds), "--seed", "5"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{rounds} kills") and "nothing lost" in done.stdout
