"""Losses of a short run, stored per torch release: what changes the training of every layout alike shows here.

    PYTHONPATH=. python tests/unit/engine/training/test_golden_losses.py

prints the line for the installed release. A change that is meant to alter training replaces the line and says why.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from glm46.operate.launch.train_rank import train
from glm46.storage.data.tokenizer import load_tokenizer
from tests.builders import small_config, write_source

RELEASE = ".".join(torch.__version__.split(".")[:2])
LOSSES = {
    "2.11": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561628, 7.4542913, 7.2401661, 7.0960170],
    "2.13": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561628, 7.4542913, 7.2401661, 7.0960170],
    "2.14": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561633, 7.4542913, 7.2401661, 7.0960175],
    "2.15": [9.0080392, 8.6269124, 8.2540545, 7.9434316, 7.6561628, 7.4542913, 7.2401661, 7.0960170],
}  # fmt: skip
# FP32 kernels of other CPUs sum in another order. Seen between torch's scalar, AVX2 and AVX-512 kernels, with one and
# with two threads: 1e-7 in twelve steps. A learning rate that is 1 % wrong moves the second loss by 3e-4.
TOLERANCE = 1e-5


def measure_losses(folder: Path, source: Path) -> list[float]:
    """Losses of eight steps: Muon, multi-token prediction, both balance terms, documents, FP32."""
    config = small_config(
        source,
        folder,
        training={"steps": 8, "seq_len": 64},
        optimizer={"name": "Muon", "lr": 1e-2},
        moe={"balance": "sign", "bias_update_rate": 0.01, "sequence_aux_loss_weight": 0.01},
    )
    assert train(config) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.skipif(
    RELEASE not in LOSSES, reason=f"no losses are stored for torch {RELEASE}; see the head of this file"
)
def test_losses_are_those_of_this_torch_release(source_folder, tmp_path):
    assert measure_losses(tmp_path / "out", source_folder) == pytest.approx(LOSSES[RELEASE], rel=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        places = Path(scratch) / "source", Path(scratch) / "out"
        places[0].mkdir()
        found = measure_losses(places[1], write_source(places[0], load_tokenizer("builtin")))
    print(f'    "{RELEASE}": [{", ".join(f"{loss:.7f}" for loss in found)}],')
