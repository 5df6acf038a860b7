"""Checkpoints of tensors on a CUDA device: pinned staging, values of the moment, load into the device, and a run that
continues bit for bit."""

import pytest
import torch

from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.background import Staging
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.data.tokenizer import load_tokenizer
from tests.builders import metric_rows, small_config, write_source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((1000, 333), value, device="cuda"),
        "half": torch.full((7, 5), value, device="cuda", dtype=torch.bfloat16),
        "rng": torch.full((9,), int(value), dtype=torch.uint8),
        "scalar": torch.tensor(value, device="cuda"),
        "empty": torch.zeros(0, 3, device="cuda"),
    }


def test_staging_is_pinned_and_kept():
    staging = Staging()
    first = staging.copy(tensors(1.0))
    assert first["weight"].is_pinned() and first["weight"].device.type == "cpu"
    address = first["weight"].data_ptr()
    assert staging.copy(tensors(2.0))["weight"].data_ptr() == address
    assert (first["weight"] == 2).all()
    del first
    other = staging.copy({"weight": torch.ones(5, device="cuda")})  # other shapes: the old memory is unpinned
    assert other["weight"].tolist() == [1] * 5


def test_saves_hold_the_values_of_their_moment_and_load_into_the_device(tmp_path):
    manager, state = CheckpointManager(tmp_path, keep_latest_k=0), tensors(1.0)
    assert manager.save_in_background(1, state, {})
    for tensor in state.values():
        tensor.fill_(9)
    assert [outcome.step for outcome in manager.close()] == [1]
    CheckpointManager(tmp_path, keep_latest_k=0).save(2, tensors(2.0), {})
    for step in (1, 2):
        CheckpointManager(tmp_path, keep_latest_k=0).load(step, state)
        assert state["weight"].is_cuda and all((tensor == step).all() for tensor in state.values())


@pytest.mark.usefixtures("nondeterministic_afterwards")
def test_a_deterministic_run_continues_bit_for_bit(tmp_path):
    """In BF16, with documents of many lengths: attention is the flash kernel, experts are grouped products."""
    source = tmp_path / "source"
    source.mkdir()
    write_source(source, load_tokenizer("builtin"), documents=200)
    figures = []
    for name in ("whole", "continued"):
        config = small_config(
            source, tmp_path / name, debug={"deterministic": True},
            training={"seq_len": 512, "local_batch_size": 4, "steps": 6, "mixed_precision_param": "bfloat16"},
            model={"num_nextn_predict_layers": 1, "num_attention_heads": 8}, checkpoint={"interval": 3}
            | ({"load_path": str(tmp_path / "whole/checkpoint/step-000003")} if name == "continued" else {}),
        )  # fmt: skip
        assert train(config) == 0
        rows = metric_rows(tmp_path / name)
        figures.append({row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row})
    whole, continued = figures
    assert list(whole) == [1, 2, 3, 4, 5, 6] and continued == {step: whole[step] for step in (4, 5, 6)}
