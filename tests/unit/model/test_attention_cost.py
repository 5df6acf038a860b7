"""Memory of attention grows with the row, and time with the squares of its documents."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm46.model.attention import attend
from glm46.model.attention_layout import attention_layout

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/measure_attention.py"


@pytest.mark.slow
def test_memory_grows_with_the_row_and_falls_with_the_ranks():
    """Two ranks: half of what the layer holds, and besides the keys and values of the whole row, a twelfth of it."""
    lengths = (8192, 16384)  # docs/parallelism.md has them up to 65,536
    command = [sys.executable, str(SCRIPT), "--document", "256", "--lengths", *map(str, lengths)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    peak = {(row["ranks"], row["length"]): row["peak"] for row in rows}
    for ranks in (1, 2):
        assert all(peak[ranks, 2 * length] <= 2.1 * peak[ranks, length] for length in lengths[:-1]), peak
    assert all(peak[2, length] <= 0.58 * peak[1, length] for length in lengths), peak


@pytest.mark.slow
def test_sixteen_documents_cost_a_tenth_of_one():
    """Processor time, in turns; the least of three."""
    length, seconds = 8192, {1: [], 16: []}
    q, k, v = (torch.randn(1, length, n, 64, requires_grad=True) for n in (2, 1, 1))
    for _ in range(3):
        for documents, times in seconds.items():
            ids = torch.arange(length).div(length // documents, rounding_mode="floor").unsqueeze(0)
            layout = attention_layout(ids, (1, length), None)
            began = time.process_time()
            attend(q, k, v, layout).sum().backward()
            times.append(time.process_time() - began)
    assert min(seconds[16]) <= min(seconds[1]) / 10, seconds
