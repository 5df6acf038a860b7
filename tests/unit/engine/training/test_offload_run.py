"""Runs whose weights, gradients and states are in host memory give what others give, and hand over to them."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from glm46.operate.launch.train_rank import train
from tests.unit.engine.training.test_float8_run import GATHERED


def run(make_config, folder: Path, steps: int, float8: dict, *, offload: bool) -> tuple[list[float], dict]:
    """Losses of all steps in this folder, and the tensors of its export."""
    config = make_config(
        job={"dump_folder": str(folder)},
        training={"steps": steps, "parameter_offload": offload},
        optimizer={"name": "Muon", "state_offload": "cpu" if offload else "none"},
        lr_scheduler={"total_tokens": 1000},  # the same rates, however many steps
        checkpoint={"interval": 100, "last_save_in_hf": steps == 4},
        float8=float8,
    )
    assert train(config) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    exported = [load_file(file) for file in folder.rglob("*.safetensors")]
    return [row["loss"] for row in rows if "loss" in row], exported[0] if exported else {}


@pytest.mark.slow
@pytest.mark.parametrize("float8", [{}, GATHERED], ids=["fp32", "gathered in FP8"])
def test_an_offloaded_run_resumes_without_and_back(make_config, tmp_path, float8):
    losses, weights = run(make_config, tmp_path / "plain", 4, float8, offload=False)
    for first in (False, True):
        folder = tmp_path / f"first {first}"
        run(make_config, folder, 2, float8, offload=first)
        again, same = run(make_config, folder, 4, float8, offload=not first)
        assert again == losses
        assert same.keys() == weights.keys() and all((same[name] == weights[name]).all() for name in weights)
