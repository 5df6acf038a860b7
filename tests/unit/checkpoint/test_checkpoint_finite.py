"""A checkpoint with NaN or infinity is not published. Nothing else writes the format that a load accepts."""

import pytest
import torch

from glm46.checkpoint.finite import NotFiniteError, names_not_finite
from glm46.checkpoint.manager import CheckpointManager


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
