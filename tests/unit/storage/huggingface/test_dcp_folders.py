"""Weights in folders that other programs wrote with `torch.distributed.checkpoint`: DCP itself writes them here."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import Glm4MoeForCausalLM

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.storage.checkpoint.stored_values import StepTensors
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.names import Form, HFNames
from tests.unit.storage.huggingface.test_hf_safetensors import (
    EOS,
    MODELS,
    empty_model,
    make_folder,
    model_of,
    require_equal_logits,
)

SHAPE = MODELS["4.6-like"][0]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def ours(seed=0):
    """Our tensors with values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(entry.shape, generator=generator)
        for name, entry in HFNames(SHAPE, repeat_shared=False).entries.items()
    }


def in_form(tensors, form, prefix=""):
    """Our tensors by the names of a form."""
    return {
        prefix + part.hf_name: tensors[name][part.index()].clone()
        for name, entry in HFNames(SHAPE, repeat_shared=False, form=form).entries.items()
        for part in entry.parts
    }


def optimizer_of(tensors):
    return {
        "state": {name: {"step": torch.tensor(3.0), "exp_avg": t.clone()} for name, t in tensors.items()},
        "param_groups": [{"lr": 0.1, "params": list(tensors)}],
    }


WRITERS = {
    "flat, our names": lambda t: in_form(t, Form.OURS),
    "flat, Hugging Face names": lambda t: in_form(t, Form.PER_EXPERT),
    "model and optimizer": lambda t: {
        "model": in_form(t, Form.PER_EXPERT), "optimizer": optimizer_of(in_form(t, Form.PER_EXPERT)), "step": 7,
    },
    "our names under model": lambda t: {"model": in_form(t, Form.OURS), "optim": optimizer_of(in_form(t, Form.OURS))},
    "experts in one tensor": lambda t: {"model_state": in_form(t, Form.STACKED), "train_state": {"tokens": [1, 2]}},
    "app": lambda t: {"app": {"model": in_form(t, Form.STACKED), "optim": optimizer_of(in_form(t, Form.STACKED))}},
    "compiled": lambda t: {"module": in_form(t, Form.PER_EXPERT, "_orig_mod.")},
    "flat, optimizer beside": lambda t: in_form(t, Form.STACKED) | {"optimizer": optimizer_of(in_form(t, Form.OURS))},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_weights_that_dcp_saved_are_loaded_with_one_warning(kind, tmp_path, caplog):
    saved = ours()
    dcp.save(WRITERS[kind](saved), checkpoint_id=tmp_path / "step-7")
    _, tensors = empty_model(SHAPE)
    import_weights(tmp_path / "step-7", SHAPE, tensors)
    assert tensors.keys() == saved.keys() and all(torch.equal(tensors[name], saved[name]) for name in saved)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "unverified" in warning and str(tmp_path / "step-7") in warning
    assert ("of its optimizer" in warning) == ("optim" in kind or kind in ("app", "our names under model"))


def test_a_state_of_transformers_computes_the_same_logits(tmp_path, caplog):
    make_folder(tmp_path / "in", SHAPE, False)
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    optimizer = torch.optim.AdamW(theirs.parameters())
    theirs(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    weights, states = get_state_dict(theirs, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "saved")
    without_mtp = SHAPE.model_copy(update={"num_nextn_predict_layers": 0})
    model, _ = model_of(tmp_path / "saved", without_mtp)
    require_equal_logits(model, theirs)
    with pytest.raises(UserError, match=r"saved: lacks the multi-token prediction layers.*set it to 0"):
        import_weights(tmp_path / "saved", SHAPE, empty_model(SHAPE)[1])


def test_from_dcp_makes_a_step_folder_with_the_same_weights(tmp_path, capsys):
    saved = ours()
    dcp.save(WRITERS["model and optimizer"](saved), checkpoint_id=tmp_path / "theirs")
    config = tmp_path / "hf"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(config_of(SHAPE, None, eos_ids=EOS, dtype="float32")))
    command = ["convert", "from-dcp", "--checkpoint", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]
    assert main([*command, "--config", str(config)]) == 0, capsys.readouterr().err
    step = StepTensors(tmp_path / "ours/step-000000")
    assert step.function.shape == SHAPE and set(step) == set(saved)
    assert all(torch.equal(step[name].read(), saved[name]) for name in saved)
    assert main(["checkpoint", "verify", str(tmp_path / "ours")]) == 0


FAULTS = {
    "no such names": (lambda t: {"model": {"wte.weight": torch.ones(2)}}, "by the names of.*wte.weight"),
    "one is missing": (
        lambda t: {n: v for n, v in in_form(t, Form.STACKED).items() if n != "model.norm.weight"},
        "1 tensors are missing: model.norm.weight",
    ),
    "a bias that the model lacks": (
        lambda t: in_form(t, Form.STACKED) | {"model.layers.0.self_attn.o_proj.bias": torch.ones(24)},
        "1 tensors are not part of this model: model.layers.0.self_attn.o_proj.bias",
    ),
    "another shape": (lambda t: in_form(t, Form.OURS) | {"norm.weight": torch.ones(25)}, r"norm.weight is \[25\]"),
    "not finite": (
        lambda t: in_form(t, Form.OURS) | {"norm.weight": torch.full((24,), torch.nan)}, "norm.weight holds NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_folders_that_do_not_fit_are_refused(name, tmp_path):
    write, words = FAULTS[name]
    dcp.save(write(ours()), checkpoint_id=tmp_path / "saved")
    with pytest.raises(UserError, match=words):
        import_weights(tmp_path / "saved", SHAPE, empty_model(SHAPE)[1])


class _Runs:
    def __reduce__(self):
        return print, ("was run",)


@pytest.mark.parametrize("change", ["a call", "a file outside", "a file is cut", "a file is missing"])
def test_a_hostile_or_damaged_folder_is_refused(change, tmp_path, capsys):
    folder = tmp_path / "saved"
    dcp.save(in_form(ours(), Form.OURS), checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if change == "a call":
        metadata.planner_data["x"] = _Runs()
    for info in metadata.storage_data.values() if change == "a file outside" else ():
        info.relative_path = "../saved/" + info.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    data = folder / "__0_0.distcp"
    if change == "a file is cut":
        data.write_bytes(data.read_bytes()[:-1000])
    elif change == "a file is missing":
        data.rename(tmp_path / "elsewhere")
    words = {"a call": "builtins.print", "a file is cut": "cannot hold it"}.get(change, "not a file of this checkpoint")
    with pytest.raises(UserError, match=words):
        import_weights(folder, SHAPE, empty_model(SHAPE)[1])
    assert "was run" not in capsys.readouterr().out
