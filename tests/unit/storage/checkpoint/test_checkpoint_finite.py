"""A checkpoint with NaN or infinity is not published, used or reported as verified."""

import pytest
import torch

from glm46.commands.checkpoint import checkpoint_command
from glm46.config.errors import UserError
from glm46.storage.checkpoint import finite, save
from glm46.storage.checkpoint.finite import NotFiniteError, names_not_finite
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.tasks.weights.write_model import write_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_one_bad_value_is_found_in_every_type(dtype):
    tensors = {"good": torch.zeros(3, 7, dtype=dtype), "empty": torch.zeros(0, dtype=dtype), "whole": torch.arange(5)}
    tensors["large"] = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
    assert names_not_finite(tensors) == []
    for number, bad in enumerate([float("nan"), *([] if dtype.itemsize == 1 else [float("inf"), -float("inf")])]):
        tensors[f"bad{number}"] = torch.zeros(9).index_fill(0, torch.tensor([4]), bad).to(dtype)
    assert names_not_finite(tensors) == [name for name in tensors if name.startswith("bad")]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_with_a_bad_value_publishes_nothing_and_names_the_tensor(tmp_path, in_background):
    manager, tensor = CheckpointManager(tmp_path, keep_latest_k=1), torch.ones(4)
    manager.save(1, {"model.w": tensor}, {})
    tensor[2] = float("inf")
    with pytest.raises(NotFiniteError, match=r"model\.w holds values that are not finite"):
        if in_background:
            manager.save_in_background(2, {"model.w": tensor}, {})
            manager.close()
        else:
            manager.save(2, {"model.w": tensor}, {})
    assert manager.newest() == 1 and [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]


def test_an_existing_checkpoint_with_bad_values_is_not_verified_and_not_used(tmp_path, monkeypatch, capsys):
    manager, tensor = CheckpointManager(tmp_path, keep_latest_k=0), torch.ones(40, 3)
    manager.save(1, {"model.w": tensor}, {})
    tensor[39, 2] = float("nan")
    monkeypatch.setattr(finite, "_PIECE_BYTES", 100)
    with monkeypatch.context() as patch:  # as an earlier version, which checked no values
        patch.setattr(save, "refuse_not_finite", lambda tensors, ranks: None)
        patch.setattr(save.Snapshot, "facts", lambda self, size, **_: {"saved_at": 0.0, "validation_loss": None})
        manager.save(2, {"model.w": tensor}, {})
    assert checkpoint_command(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED" in said and "step-000002: model.w holds values that are not finite" in said
    fresh = CheckpointManager(tmp_path, keep_latest_k=0)
    assert fresh.newest() == 1
    with pytest.raises(UserError, match="not finite"):
        fresh.load(2, {"model.w": tensor})


def test_weights_of_a_conversion_are_checked_when_a_run_starts_from_them(tmp_path):
    nan = lambda name, tensor: tensor.fill_(float("nan"))  # noqa: E731
    step = write_model(tmp_path, {"w": ((2, 2), torch.float32)}, nan, {})
    with pytest.raises(UserError, match=r"model\.w holds values that are not finite"):
        CheckpointManager(tmp_path / "run", keep_latest_k=0).load(step, {"model.w": torch.ones(2, 2)})
