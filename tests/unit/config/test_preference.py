"""What [finetune.preference] refuses: each message has the key, its value and what to write instead."""

import pytest

from glm46.config.loader import load_config

SOUND = """
[model]
flavor = "debug"
[model.shape]
num_nextn_predict_layers = 0
[data]
document_mask = true
[[data.sources]]
name = "a"
path = "data/a"
packing = "best_fit"
[data.sources.recipe]
input = ["a.jsonl"]
format = "preference"
max_tokens = 16
[training]
steps = 2
seq_len = 16
[optimizer]
name = "AdamW"
[checkpoint]
initial_load_path = "base"
[finetune.preference]
beta = 0.1
"""
LORA = "[moe]\nbalance = 'none'\nsequence_aux_loss_weight = 0.0\n[adapter]\nrank = 8\n"
START = 'initial_load_path = "base"'


def load(text, folder):
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(path)


def changed(*texts: str) -> str:
    """The sound config with each second text in place of the one before it."""
    config = SOUND
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert old in config
        config = config.replace(old, new)
    return config


RESUMED, KTO = START + '\nload_path = "other/checkpoint/step-000002"', 'loss_type = "kto"'


@pytest.mark.parametrize("change", [
    (), (START, RESUMED), ("[training]", LORA + "[training]"),
    ("beta = 0.1", KTO, "max_tokens = 16", "max_tokens = 8"),
    ("beta = 0.1", KTO, "max_tokens = 16", "max_tokens = 8", '"preference"', '"unpaired_preference"'),
])  # fmt: skip
def test_a_sound_one_is_taken(change, tmp_path):
    config = load(changed(*change), tmp_path)
    assert config.preference.beta == 0.1 and config.keeps_its_start and config.has_preference_reference


@pytest.mark.parametrize("loss_type", ["simpo", "orpo"])
@pytest.mark.parametrize("change", [
    (), (START, 'load_path = "other/checkpoint/step-000002"'), (START, START + '\ninitial_load_exclude = ["lm_head*"]'),
    ("[training]", LORA + "initial_load_path = 'peft'\n[training]"),
])  # fmt: skip
def test_a_loss_without_a_reference_asks_nothing_of_its_start(change, loss_type, tmp_path):
    config = load(changed("beta = 0.1", f'loss_type = "{loss_type}"', *change), tmp_path)
    assert not config.has_preference_reference and config.keeps_its_start == (config.adapter is not None)
