"""A run leaves a Hugging Face folder, and another run starts from it where the first one was."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from glm46.config.errors import UserError
from glm46.operate.launch.train_rank import train
from glm46.tasks.weights.start_folders import refuse_weights
from tests.builders import metric_rows
from tests.step_tensors import step_tensors


@pytest.mark.slow
def test_weights_leave_and_enter_a_run_as_a_hugging_face_folder(make_config, tmp_path):
    first = make_config(
        checkpoint={"last_save_in_hf": True},
        validation={"enable": True, "freq": 4},
        training={"steps": 4},
        moe={"balance": "proportional", "bias_update_rate": 0.01},
    )
    assert train(first) == 0
    folder = tmp_path / "out/huggingface/step-000004"
    trained = step_tensors(tmp_path / "out/checkpoint/step-000004")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, trained["lm_head.weight"].bfloat16())
    bias = trained["layers.1.mlp.router.e_score_correction_bias"]
    assert bias.abs().max() > 0
    assert torch.equal(theirs.model.layers[1].mlp.gate.e_score_correction_bias, bias)

    stored = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "model.safetensors").write_bytes(b"of an older run")
    assert train(first) == 0, "the same command again ends well, and writes what the checkpoint holds"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == stored
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]

    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"their_field": 5}))
    second = make_config(
        job={"dump_folder": str(tmp_path / "second")},
        checkpoint={"initial_load_path": str(folder), "initial_load_in_hf": True, "last_save_in_hf": True},
        validation={"enable": True, "freq": 4},
        training={"steps": 1},
        optimizer={"lr": 1e-9},
    )
    assert train(second) == 0
    lines = metric_rows(tmp_path / "out")
    ended = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    lines = metric_rows(tmp_path / "second")
    began = [line["validation_loss"] for line in lines if "validation_loss" in line][0]
    assert ended == pytest.approx(began, rel=2e-3)  # the folder holds BF16, the first run held FP32
    again = tmp_path / "second/huggingface/step-000001"
    assert json.loads((again / "config.json").read_text())["their_field"] == 5


def test_a_folder_of_another_model_ends_the_start(make_config, tmp_path):
    first = make_config(checkpoint={"last_save_in_hf": True}, training={"steps": 1})
    assert train(first) == 0
    folder = str(tmp_path / "out/huggingface/step-000001")
    other = make_config(
        job={"dump_folder": str(tmp_path / "second")},
        model={"hidden_size": 64, "routed_scaling_factor": 1.0},
        checkpoint={"initial_load_path": folder, "initial_load_in_hf": True},
    )
    with pytest.raises(UserError) as error:
        train(other)
    assert len(error.value.faults) == 2
    assert "hidden_size = 32, but the config has model.shape.hidden_size = 64" in str(error.value)
    # Another model: three keys and the number of the others.
    wide = {"hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 40, "n_routed_experts": 2}
    step = str(tmp_path / "out/checkpoint/step-000001")
    for start, last in (
        (
            {"initial_load_path": folder, "initial_load_in_hf": True},
            "more keys of [model.shape] that differ: 1, so it is another",
        ),
        (
            {"initial_load_path": step, "initial_load_model_only": True},
            f"more keys that differ from {step}: 1; restore it, or",
        ),
        ({"load_path": step}, f"more keys that differ from {step}: 1; "),
    ):
        with pytest.raises(UserError) as error:
            train(make_config(job={"dump_folder": str(tmp_path / "third")}, model=wide, checkpoint=start))
        assert len(error.value.faults) >= 4 and last in error.value.faults[3], error.value.faults


def test_a_hugging_face_folder_without_its_config_is_refused(make_config, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").touch()
    start = {"initial_load_path": str(tmp_path / "hf"), "initial_load_in_hf": True}
    with pytest.raises(UserError, match=r"^checkpoint.initial_load_path = '.*config.json: no such file; download it"):
        refuse_weights(make_config(checkpoint=start))
    with pytest.raises(
        UserError, match="not a step folder but a Hugging Face folder; set checkpoint.initial_load_in_hf"
    ):
        refuse_weights(make_config(checkpoint=start | {"initial_load_in_hf": False}))
