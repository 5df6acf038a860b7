"""Runs in FP8 or with tensors in host memory resume, and hand their checkpoints to runs without these and back."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from glm46.config.float8 import Float8Config
from glm46.config.float8_layers import describe_float8
from glm46.config.presets import PRESETS
from glm46.operate.launch.train_rank import train
from tests.builders import metric_rows

TENSORWISE = {"recipe_name": "tensorwise", "experts_recipe_name": "rowwise", "emulate": True}
GATHERED = TENSORWISE | {"enable_fsdp_float8_all_gather": True}


def run(
    make_config, folder: Path, steps: int, float8: dict, dtype: str = "float32", *, offload: bool = False
) -> tuple[list[float], dict]:
    """Losses of all steps in this folder, and the tensors of its last checkpoint."""
    config = make_config(
        job={"dump_folder": str(folder)},
        training={"steps": steps, "mixed_precision_param": dtype, "parameter_offload": offload},
        optimizer={"name": "Muon", "state_offload": "cpu" if offload else "none"},
        lr_scheduler={"total_tokens": 1000},  # the same rates, however many steps
        checkpoint={"interval": 100, "last_save_in_hf": True},
        float8=float8,
    )
    assert train(config) == 0
    rows = metric_rows(folder)
    (exported,) = folder.rglob("*.safetensors")
    return [row["loss"] for row in rows if "loss" in row], load_file(exported)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_from_fp8_to_higher_precision_and_back(make_config, tmp_path, dtype):
    through, weights = run(make_config, tmp_path / "through", 6, GATHERED, dtype)
    first, _ = run(make_config, tmp_path / "stopped", 3, GATHERED, dtype)
    assert first == through[:3]
    shutil.rmtree(tmp_path / "stopped/huggingface")
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    again, same = run(make_config, tmp_path / "stopped", 6, GATHERED, dtype)
    assert again == through and all((same[name] == weights[name]).all() for name in weights)
    # Without FP8 the next step sees the same weights: it differs by what FP8 rounds, and no more.
    plain, _ = run(make_config, tmp_path / "other", 4, {}, dtype)
    assert plain[3] != through[3] and plain[3] == pytest.approx(through[3], rel=0.02)
    shutil.rmtree(tmp_path / "other/huggingface")
    back, _ = run(make_config, tmp_path / "other", 6, TENSORWISE, dtype)
    assert len(back) == 6 and back[:4] == plain and back[-1] < back[0]


@pytest.mark.slow
def test_gathering_in_fp8_changes_no_bit(make_config, tmp_path):
    """On one rank: the scale of a whole weight is the same before and after the gather."""
    losses, weights = run(make_config, tmp_path / "gathered", 3, GATHERED)
    expected, others = run(make_config, tmp_path / "plain", 3, TENSORWISE)
    assert losses == expected
    assert all((weights[name] == others[name]).all() for name in others)


def test_the_start_message_says_what_is_converted_and_why_the_rest_is_not():
    text = describe_float8(PRESETS["debug"], Float8Config(recipe_name="rowwise", filter_fqns=("k_proj", "mtp.")), tp=1)
    assert text == (
        "rowwise for 24 of 36 linear layers; not converted: embedding, router and output head by design; k_proj by "
        'filter_fqns "k_proj"; eh_proj, q_proj, v_proj, o_proj, gate_proj, up_proj, down_proj by filter_fqns "mtp."; '
        "routed experts, because experts_recipe_name is absent"
    )
    text = describe_float8(PRESETS["debug"], Float8Config(**GATHERED), tp=1)
    assert text.startswith("tensorwise for ") and "gathered in FP8, rowwise for the routed experts, emulated" in text


@pytest.mark.slow
@pytest.mark.parametrize("float8", [{}, GATHERED], ids=["fp32", "gathered in FP8"])
def test_an_offloaded_run_resumes_without_and_back(make_config, tmp_path, float8):
    losses, weights = run(make_config, tmp_path / "plain", 4, float8)
    for first in (False, True):
        folder = tmp_path / f"first {first}"
        run(make_config, folder, 2, float8, offload=first)
        shutil.rmtree(folder / "huggingface")
        again, same = run(make_config, folder, 4, float8, offload=not first)
        assert again == losses
        assert same.keys() == weights.keys() and all((same[name] == weights[name]).all() for name in weights)
