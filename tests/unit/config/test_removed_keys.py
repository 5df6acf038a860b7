"""Keys that earlier versions had, here or elsewhere: a TOML file with one gets one message, and a stored config is read
without it, or with it in its new place."""

from collections.abc import Iterator

import pytest
import tomli
import tomli_w

from glm46.config.errors import UserError
from glm46.config.loader import load_config, stored_config
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.config.section import Removed, Section
from glm46.config.validation import section_of

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
