"""Configs that other versions have stored: keys that are gone and keys that never were, for all readers.

A TOML file with a key that earlier versions had gets one message, and a stored config is read without it, or with it
in its new place.
"""

import json
from collections.abc import Iterator

import pytest
import tomli
import tomli_w

from glm46.config.errors import UserError
from glm46.config.finetune import FineTuneConfig
from glm46.config.loader import config_from, dump_config, load_config, stored_config
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.config.section import Removed, Section
from glm46.config.validation import section_of
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


BASE = """
[model]
flavor = "debug"
[training]
steps = 1
seq_len = 64
[[data.sources]]
name = "text"
path = "data/text"
recipe = { input = ["here.jsonl"] }
[adapter]
[checkpoint]
initial_load_path = "base"
initial_load_in_hf = true
[finetune.preference]
[rl]
prompts_per_rollout = 2
correction = { level = "token" }
[[rl.rewards]]
name = "math"
[rl.environment]
kind = "command"
command = ["agent"]
[rollout]
max_new_tokens = 8
[ablation]
"""


def removed_keys(section: type[Section], place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple, Removed]]:
    for key, removed in section.removed.items():
        yield (*place, key), removed
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            index = (0,) if "tuple[" in str(field.annotation) else ()
            yield from removed_keys(inner, (*place, name, *index))


KEYS = dict(removed_keys(RunConfig))


def with_key(place: tuple[str | int, ...], value: object) -> dict:
    """The table of `BASE` with one more key."""
    root = tomli.loads(BASE)
    table = root
    for part in place[:-1]:
        table = table[part] if isinstance(part, int) else table.setdefault(part, {})
    table[place[-1]] = value
    return root


def dotted_name(place: tuple[str | int, ...]) -> str:
    return ".".join(map(str, place)).replace(".0.", "[0].")


@pytest.mark.parametrize("place", KEYS, ids=dotted_name)
def test_a_file_with_a_removed_key_gets_one_message(place, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(with_key(place, 1)))
    with pytest.raises(UserError) as caught:
        load_config(file)
    name = dotted_name(place)
    messages = [fault for fault in caught.value.faults if name in fault]
    assert messages == [f"{file}: {name}: was removed; {KEYS[place].instead}"]


@pytest.mark.parametrize("place", KEYS, ids=dotted_name)
def test_a_stored_config_with_a_removed_key_is_read_without_it(place):
    without = stored_config(BASE)
    value = KEYS[place].value
    stored = with_key(place, {} if value is ... else value)
    assert stored_config(tomli_w.dumps(stored)) == without


MOVED = {
    "hidden_size": 64,
    "num_attention_heads": 7,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}


def test_a_file_with_keys_of_the_shape_in_their_old_place_gets_one_message_for_each(tmp_path):
    root = tomli.loads(BASE)
    root["model"] |= MOVED
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(root))
    with pytest.raises(UserError) as caught:
        load_config(file, ["--model.vocab_size", "100"])
    keys = (*MOVED, "vocab_size")
    messages = [fault for fault in caught.value.faults if any(key in fault for key in keys)]
    expected = [f"{file}: model.{key}: was moved; write it as model.shape.{key}" for key in MOVED]
    assert messages == [*expected, "command line: model.vocab_size: was moved; write it as model.shape.vocab_size"]


def test_a_stored_config_with_keys_of_the_shape_in_their_old_place_is_read():
    now = tomli.loads(BASE)
    now["model"]["shape"] = MOVED
    before = tomli.loads(BASE)
    before["model"] |= MOVED
    config = stored_config(tomli_w.dumps(before))
    assert config == stored_config(tomli_w.dumps(now))
    assert resolve_shape(config.model).rope_scaling.factor == 2.0
