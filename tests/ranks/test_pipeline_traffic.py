"""What the stages of a pipeline send each other is what docs/parallelism.md says, byte by byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("pipeline_traffic.py")
FP32 = 4


def test_stages_send_hidden_states_and_gather_weights_once_per_step():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(SCRIPT)]
    root = SCRIPT.parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{SCRIPT.parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 3
    for case in cases:
        layout, shape = case["layout"], case["shape"]
        # A V has three borders for its four stages, but the middle one is inside a rank.
        borders_of_a_rank = {"1F1B": 1, "ZBVZeroBubble": 2}[layout["schedule"]]
        readers = 4 // layout["pipeline"] // layout["tensor"]
        tokens = case["rows"] // readers * case["seq_len"] // layout["tensor"]  # of all micro-batches of a step
        tensors = 1 + shape["num_nextn_predict_layers"]
        for rank in case["ranks"]:
            # On each border one rank sends results forward, the other one gradients back.
            assert rank["bytes"]["send"] == borders_of_a_rank * tensors * tokens * shape["hidden_size"] * FP32, layout
            assert rank["calls"]["send"] == borders_of_a_rank * layout["micro_batches"] * 2, layout
            if layout["tensor"] == 1:
                # However many micro-batches: once per step, where other layouts gather for each forward and backward.
                for name in ("all_gather", "reduce_scatter"):
                    assert rank["bytes"][name] == rank["parameters"] * readers * FP32, (name, layout)
