"""Stages of text with a sliding window and a RoPE scaling of their own equal runs of [model] with the same keys."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from glm46.commands.convert import convert_command
from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.engine.inference.loading import load_for_inference
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.stored_values import StepTensors
from tests.builders import metric_rows
from tests.step_tensors import step_tensors

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LENGTHS = [
    {"start_tokens": 0, "seq_len": 16, "documents": [0.0, 0.4]},
    {"start_tokens": 250, "seq_len": 32, "documents": [0.4, 0.8]},
    {"start_tokens": 700, "seq_len": 64, "documents": [0.8, 1.0]},
]
ATTENTION = [{"sliding_window": 6}, {"sliding_window": -1, "rope_scaling": LINEAR}, {"rope_scaling": YARN}]
"""Of each stage, where [model] has a window of 24 and a scaling by YaRN."""
MODEL = {"sliding_window": 24, "rope_scaling": YARN | {"factor": 2.0}}
SHAPES = [
    {"sliding_window": 6, "rope_scaling": YARN | {"factor": 2.0}},
    {"rope_scaling": LINEAR},
    {"sliding_window": 24, "rope_scaling": YARN},
]
"""The same as keys of [model]."""
ENDS = [256, 704, 1_216]
"""Tokens at which the stages end: after whole samples, and the last one after whole steps."""


@pytest.fixture
def make_run(make_config, tmp_path):
    """A function that makes a run with these stages."""

    def make(name, tokens, attention=({}, {}, {}), **tables):
        stages = [length | of_stage for length, of_stage in zip(LENGTHS, attention, strict=True)]
        return make_config(
            job={"dump_folder": str(tmp_path / name)},
            data={"stages": stages},
            training={"seq_len": 64, "steps": None, "tokens": tokens, "global_batch_size": 4},
            lr_scheduler={"total_tokens": ENDS[-1]},
            checkpoint={"interval": 1000, "async_mode": "disabled", "keep_latest_k": 0} | tables.pop("checkpoint", {}),
            validation={"enable": True, "freq": 1, "steps": 1},
            **tables,
        )

    return make


def figures(folder: Path) -> tuple[list, dict]:
    """Loss and gradient norm of each step with the validation after it, and the tensors of the last checkpoint."""
    rows = metric_rows(folder)
    keys = ("step", "tokens", "loss", "mtp_loss", "grad_norm", "validation_loss")
    steps = [{key: row[key] for key in keys if key in row} for row in rows]
    return steps, step_tensors(last_step(folder))


def last_step(folder: Path) -> Path:
    return sorted((folder / "checkpoint").glob("step-*"))[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "stop"), [("none", 400), ("full", 800)])
def test_stages_equal_runs_with_the_keys_of_each_stage(make_run, tmp_path, checkpointing, stop):
    """Also where the run resumes inside the second or third stage. A checkpoint has the attention of its step."""
    common = {"activation_checkpoint": {"mode": checkpointing}}
    for tokens in (stop, ENDS[-1]):
        staged = make_run("staged", tokens, ATTENTION, model=MODEL, **common)
        assert check_config(staged, world_size=1) == []
        assert train(staged) == 0
    for end, shape in zip(ENDS, SHAPES, strict=True):
        assert train(make_run("separate", end, model=shape, **common)) == 0
    steps, tensors = figures(tmp_path / "staged")
    expected_steps, expected = figures(tmp_path / "separate")
    assert steps == expected_steps and steps[-1]["tokens"] == ENDS[-1]
    assert all(torch.equal(tensors[name], expected[name]) for name in expected) and set(tensors) == set(expected)
    plain = make_run("plain", ENDS[-1], model=MODEL, **common)
    assert train(plain) == 0
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (steps, figures(tmp_path / "plain")[0])]
    assert all(ours != theirs for ours, theirs in zip(*losses, strict=True)), "the keys of a stage change every step"
    folders = sorted((tmp_path / "staged" / "checkpoint").glob("step-*"))
    for folder, shape in zip(folders, (SHAPES[1 if stop < ENDS[1] else 2], SHAPES[2]), strict=True):
        shape_of_step = load_for_inference(folder, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))[
            0
        ].shape
        assert shape_of_step.sliding_window == shape.get("sliding_window")
        scaling = shape_of_step.rope_scaling.model_dump(include=set(shape["rope_scaling"]))
        assert scaling == shape["rope_scaling"]
    log = (tmp_path / "staged" / "log.txt").read_text()
    assert "stage 2 of 3: 32 tokens per sequence, window none, RoPE scaling linear x 2, test 100.0%" in log


@pytest.mark.slow
def test_a_checkpoint_has_the_window_and_scaling_of_its_step(make_run, tmp_path, tokenizer, capsys):
    attention = [{"sliding_window": 6}, {"rope_scaling": LINEAR}, {"rope_scaling": YARN}]
    last_in_hf = {"last_save_in_hf": True, "interval": 1}
    assert train(make_run("out", ENDS[-1], attention, checkpoint=last_in_hf, inference={"prompt": "def"})) == 0
    tokens = {}
    for folder in (tmp_path / "out" / "checkpoint").glob("step-*"):
        tokens[StepTensors(folder).meta["progress"]["tokens"]] = folder
    for end, window, scaling in zip(ENDS, (6, None, None), (None, LINEAR, YARN), strict=True):
        model, _ = load_for_inference(
            tokens[end], tokenizer=None, dtype=torch.float32, device=torch.device("cpu")
        )  # at the end of a stage: as it was trained, not as the next step would be
        assert model.shape.sliding_window == window
        found = model.shape.rope_scaling
        assert (None if found is None else found.model_dump(include=set(scaling))) == scaling
    with pytest.raises(UserError, match="sliding_window = 6 of"):
        convert_command(["to-hf", "--checkpoint", str(tokens[ENDS[0]]), "--output", str(tmp_path / "refused")])
    exported = tmp_path / "exported"
    assert convert_command(["to-hf", "--checkpoint", str(tokens[ENDS[1]]), "--output", str(exported)]) == 0
    assert "RoPE scaling of its last step: linear x 2" in capsys.readouterr().out
    assert json.loads((exported / "config.json").read_text())["rope_scaling"] == LINEAR
    theirs = AutoConfig.from_pretrained(next((tmp_path / "out" / "huggingface").iterdir())).rope_parameters
    assert {key: theirs[key] for key in YARN} == YARN
    # A run that is over trains no step, and yet exports what the last step was trained with.
    again = make_run("out", ENDS[-1], attention, checkpoint=last_in_hf, inference={"prompt": "def"})
    next((tmp_path / "out" / "huggingface").iterdir()).rename(tmp_path / "before")
    assert train(again) == 0
    config = (next((tmp_path / "out" / "huggingface").iterdir()) / "config.json").read_text()
    assert config == (tmp_path / "before" / "config.json").read_text()
    # The next phase says in what its attention differs.
    following = {"initial_load_path": str(last_step(tmp_path / "out"))}
    assert train(make_run("next", 64, attention, checkpoint=following)) == 0
    log = (tmp_path / "next" / "log.txt").read_text()
    assert 'changed      rope_scaling: none; the phase before ended with {rope_type = "yarn", factor = 4.0' in log
    assert "changed      sliding_window: 6; the phase before ended with none" in log
    folder = {"initial_load_path": str(tmp_path / "before"), "initial_load_in_hf": True}
    assert train(make_run("from_hf", 64, model={"rope_theta": 5e4}, checkpoint=folder)) == 0
    log = (tmp_path / "from_hf" / "log.txt").read_text()
    assert "changed      rope_theta: 50000.0; the phase before ended with 10000.0" in log
    assert "changed      rope_scaling: none; the phase before" in log and "changed      sliding" not in log


def test_a_factor_of_one_and_a_window_of_minus_one_switch_off(make_run):
    from glm46.run.plan import resolve_plan

    off = [{}, {"sliding_window": -1, "rope_scaling": {"rope_type": "linear", "factor": 1.0}}, {"sliding_window": 8}]
    shapes = [stage.shape for stage in resolve_plan(make_run("x", ENDS[-1], off, model=MODEL), 1).text_stages]
    assert [shape.sliding_window for shape in shapes] == [24, None, 8]
    assert [shape.rope_scaling is None for shape in shapes] == [False, True, False]


@pytest.mark.parametrize("stage, fault", [
    ({"sliding_window": 33}, "data.stages[1].sliding_window = 33: longer than the sequences of this stage, 32 tokens"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        'data.stages[1].rope_scaling.rope_type = "yarn": needs data.stages[1].rope_scaling.original_max_position_emb',
    ),
    (
        {"rope_scaling": LINEAR | {"beta_fast": 16.0}},
        "data.stages[1].rope_scaling.beta_fast = 16.0: has no effect without data.stages[1].rope_scaling.rope_type",
    ),
])  # fmt: skip
def test_attention_that_makes_no_sense_is_refused(make_run, stage, fault):
    faults = check_config(make_run("x", ENDS[-1], [{}, stage, {}]), world_size=1)
    assert len(faults) == 1 and faults[0].startswith(fault), faults


@pytest.mark.parametrize("tokens, attention, key", [
    (ENDS[-1], [{}, {}, {"sliding_window": 8}], "data.stages[2].sliding_window = 8"),
    (ENDS[0], [{"sliding_window": 8}, {}, {}], "data.stages[0].sliding_window = 8"),
    (ENDS[-1], [{"sliding_window": 8}, {}, {"sliding_window": -1}], None),
    (ENDS[0], [{}, {}, {"sliding_window": 8}], None),
])  # fmt: skip
def test_the_last_stage_decides_if_hugging_face_knows_the_model(make_run, tokens, attention, key):
    faults = check_config(make_run("x", tokens, attention, checkpoint={"last_save_in_hf": True}), world_size=1)
    assert len(faults) == (key is not None) and all(key in fault for fault in faults), faults
    inherited = make_run("x", tokens, [{}] * 3, checkpoint={"last_save_in_hf": True}, model={"sliding_window": 9})
    assert "model.shape.sliding_window = 9" in check_config(inherited, world_size=1)[0]
