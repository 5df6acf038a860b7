"""The code that Inductor and Triton make of a step for an H100, on a machine that has none.

Nothing is run: `scripts/measure/compile_for_h100.py` says where it ends. In a process of its own, because it changes
torch.
"""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[4]
RELEASE = "2.14."
"""The figures are of this release of torch, with its Triton; another one joins other operations in a kernel."""
# Kernels of Triton, their launches, KB per token that they move, calls of libraries and of operators without code of
# Inductor, and bytes of spilled registers. A change that lowers a number writes the lower one here; none may raise one.
# Runs compile layers; the head and Muon's products run eager there, and are compiled here to see that they can be.
MOST = {
    ("MoE layer", "forward"): (15, 15, 337, 15, 0), ("MoE layer", "backward"): (20, 23, 604, 21, 0),
    ("dense layer", "forward"): (6, 6, 188, 8, 0), ("dense layer", "backward"): (10, 13, 340, 15, 0),
    ("dense network in FP8", "forward"): (6, 7, 178, 3, 0), ("dense network in FP8", "backward"): (15, 20, 690, 6, 8),
    ("attention", "forward"): (2, 2, 52, 5, 0), ("attention", "backward"): (6, 8, 112, 9, 0),
    ("summed loss", "forward"): (4, 4, 3288, 2, 0), ("summed loss", "backward"): (2, 2, 904, 1, 0),
    ("log-probabilities", "forward"): (2, 3, 592, 2, 0), ("log-probabilities", "backward"): (9, 10, 3288, 6, 0),
    ("Newton-Schulz", "forward"): (3, 3, 66, 15, 0), ("weights in 4 bits", "forward"): (1, 1, 56.3, 0, 0),
}  # fmt: skip
PARTS = dict.fromkeys(part for part, _ in MOST)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not built for CUDA")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_step_compiles_for_an_h100(part, warm_python):
    command = [warm_python, ROOT / "scripts/measure/compile_for_h100.py", "--json", part]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.pop("part") == part and found.keys() == {of for name, of in MOST if name == part}
    for direction, code in found.items():
        # Operators that would copy a tensor, or write it row by row, where Inductor's own code joins both with others.
        assert not {call for call in code["calls"] if call.startswith(("copy_", "clone", "index_put", "_to_copy"))}
        assert code["cubins"] >= code["kernels"] > 0
        if torch.__version__.startswith(RELEASE):
            figures = code["kernels"], code["launches"], code["kilobytes"], sum(code["calls"].values()), code["spilled"]
            most = MOST[part, direction]
            assert all(one <= limit + 0.5 for one, limit in zip(figures, most, strict=True)), (direction, figures)
            assert all(one >= 0.99 * limit - 0.5 for one, limit in zip(figures, most, strict=True)), f"lower {figures}"
