"""Configs that other versions have stored: keys that are gone and keys that never were, for all readers."""

import json

import pytest
import tomli
import tomli_w

from glm46.config.errors import UserError
from glm46.config.finetune import FineTuneConfig
from glm46.config.loader import config_from, dump_config, stored_config
from glm46.engine.inference.stored_model import stored_model
from glm46.engine.training.saved_config import saved_run
from glm46.operate.models.evaluate_ranks import _training
from glm46.run.function import function_of_meta, next_temperature

SOURCE = {"name": "code", "path": "data/code", "weight": 1.0, "recipe": {"input": ["here.jsonl"]}}
RL = {"prompts_per_rollout": 2, "kl": {"weight": 0.1}, "reference": {"load_path": "here"}}


@pytest.fixture
def stored() -> dict:
    """The table of a run of this version."""
    return tomli.loads(
        dump_config(config_from({"data": {"sources": [SOURCE]}, "training": {"seq_len": 64, "steps": 1}}))
    )


def test_keys_that_are_gone_are_skipped_by_each_reader(stored, tmp_path):
    now = stored_config(tomli_w.dumps(stored))
    stored["model"] |= {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    stored["training"] |= {"gc_freq": 50}
    stored["data"]["sources"][0]["recipe"] |= {"processes": 8, "fim_spm_rate": 0.5}
    stored["data"]["sources"][0]["prepare"] = {}
    text = tomli_w.dumps(stored)
    assert stored_config(text) == now and now.data.sources[0].recipe.input == ("here.jsonl",)
    meta = {"config": text, "progress": {"samples": 3}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert saved_run(tmp_path) == now and stored_model(tmp_path).tokenizer_path == "builtin"
    training = _training(tmp_path)
    assert (training.window, training.seq_len, list(training.sources)) == (64, 64, ["code"])
    assert function_of_meta(meta) == function_of_meta({"config": dump_config(now)}) and next_temperature(meta) == 1.0


def test_keys_of_two_sections_of_a_run_with_rl(stored):
    stored["rl"] = RL
    now = stored_config(tomli_w.dumps(stored))
    stored["rl"] = RL | {"mode": "full", "reference": {"load_path": "here", "load_in_hf": True}}
    stored["job"]["print_config"] = True
    stored["finetune"] = {"distillation": {"load_path": "teacher", "top_k": 8}}
    read = stored_config(tomli_w.dumps(stored))
    assert read.finetune == FineTuneConfig()
    assert read.model_copy(update={"finetune": None}) == now and now.rl.reference.load_path == "here"


@pytest.mark.parametrize(("section", "keys", "words"), [
    ("model", {"n_group": 2}, "model.shape.n_group = 2 of the checkpoint: this version computes the model"),
    ("moe", {"jitter": 0.1}, "moe.jitter: unknown key; valid keys are"),
    ("moe", {"balance": "softmax"}, 'moe.balance = "softmax": must be'),
    ("adapter", {"name": "lora", "rank": 8, "init": "pissa"}, "adapter.init: unknown key"),
])  # fmt: skip
def test_keys_that_a_model_computes_by_are_refused(stored, tmp_path, section, keys, words):
    stored[section] = stored.get(section, {}) | keys
    text = tomli_w.dumps(stored)
    (tmp_path / "meta.json").write_text(json.dumps({"config": text}))
    for read in (lambda: stored_config(text), lambda: saved_run(tmp_path), lambda: stored_model(tmp_path)):
        with pytest.raises(UserError) as error:
            read()
        assert words in str(error.value) and "read the checkpoint with the version of glm46" in str(error.value)


def test_the_scale_of_rank_stabilised_adapters_is_kept(stored):
    stored["adapter"] = {"rank": 16, "alpha": 4.0, "rank_stabilized": True}
    assert stored_config(tomli_w.dumps(stored)).adapter.scale == 4.0 / 16**0.5
    stored["adapter"]["rank_stabilized"] = False
    assert stored_config(tomli_w.dumps(stored)).adapter.scale == 4.0 / 16


def test_a_key_that_never_was_is_skipped_elsewhere(stored):
    now = stored_config(tomli_w.dumps(stored))
    stored["training"]["never"], stored["never"] = 1, {"key": 1}
    assert stored_config(tomli_w.dumps(stored)) == now
