"""What other libraries have to say about themselves does not reach a user of glm46."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from glm46.compat import quiet_libraries

ROOT = Path(__file__).parents[4]

PROGRAM = """
import os, sys
from pathlib import Path

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, and two workers
import torch
from glm46.operate.launch.train_rank import train
from scripts.measure.model_speed import Workload, race
from scripts.measure.speed_with_peers import CONTESTANTS
from tests.builders import small_config

run = small_config(
    Path(sys.argv[1]), Path(sys.argv[2]), training={"steps": 2}, optimizer={"state_dtype": "8bit"},
    metrics={"enable_tensorboard": True}, validation={"enable": True}, data={"num_workers": 2},
)
code = train(run)
work = Workload("debug", 1, 16, torch.device("cpu"), torch.float32, layers=2)
race(work, {name: CONTESTANTS[name] for name in ("ours", "transformers default")}, 1, lambda text: None)
sys.exit(code)
"""


@pytest.mark.slow
def test_a_run_with_eight_bit_states_and_many_workers_and_a_benchmark_write_no_errors(source_folder, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(source_folder), str(tmp_path / "out")]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (end.returncode, end.stderr) == (0, "")


def test_other_messages_of_these_libraries_still_arrive(caplog):
    quiet_libraries()
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).propagate = True  # caplog listens at the root
        logging.getLogger(name).warning("another fault")
    logging.getLogger("torchao").warning("Failed to load /some/_C.abi3.so: could not load this library")
    assert [record.message for record in caplog.records] == ["another fault"] * 2
    with pytest.warns(UserWarning, match="batch size"):
        warnings.warn("This DataLoader has an odd batch size", stacklevel=1)
