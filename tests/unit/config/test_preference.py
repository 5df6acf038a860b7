"""What [finetune.preference] refuses: each message has the key, its value and what to write instead."""

import pytest

from glm46.config.errors import UserError
from glm46.config.loader import load_config

SOUND = """
[model]
flavor = "debug"
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
# Old and new text; what the message says.
BAD = {
    "beta": (("beta = 0.1", "beta = 0.0"), ["finetune.preference.beta = 0", "greater than 0"]),
    "smoothing": (("beta = 0.1", "label_smoothing = 0.5"), ["finetune.preference.label_smoothing = 0.5", "less than"]),
    "weight": (("beta = 0.1", "sft_weight = -1.0"), ["finetune.preference.sft_weight = -1"]),
    "text": (
        ('format = "preference"\nmax_tokens = 16', 'format = "text"'),
        ['data.sources[0].recipe.format = "text": no pairs', 'format = "preference"'],
    ),
    "chats": (('format = "preference"', 'format = "alpaca"'), ['recipe.format = "alpaca": no pairs']),
    "pairs without it": (
        ("[finetune.preference]\nbeta = 0.1", "[finetune]"), ["pairs, which only [finetune.preference]"],
    ),
    "no start": ((START, ""), ["[finetune]", "checkpoint.initial_load_path is absent"]),
    "no start of a continued run": (
        (START, 'load_path = "other/checkpoint/step-000002"'),
        ["checkpoint.initial_load_path: absent", "reference", "name the weights"],
    ),
    "part of the start": (
        (START, START + '\ninitial_load_exclude = ["lm_head*"]'), ["initial_load_exclude", "remove checkpoint.initial"],
    ),
    "MTP": (("num_nextn_predict_layers = 0", ""), ["model.num_nextn_predict_layers = 1", "must be 0", "set it to 0"]),
    "tasks": (("[training]", "[validation]\nenable = true\ntasks = [{kind = 'needle', lengths = [16]}]\n[training]"),
              ["validation.tasks", "remove them"]),
    "adapters of another run": (
        ("[training]", LORA + "initial_load_path = 'peft'\n[training]"),
        ['adapter.initial_load_path = "peft"', "convert merge"],
    ),
    "history": (("max_tokens", "history = 'all'\nmax_tokens"), ["recipe.history", "no effect"]),
    "cut rows": (('packing = "best_fit"', ""), ["data.sources[0].packing", "best_fit"]),
}  # fmt: skip


def load(text, folder):
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(path)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_preference_is_refused_in_one_message(name, tmp_path):
    change, said = BAD[name]
    assert change[0] in SOUND
    with pytest.raises(UserError) as caught:
        load(SOUND.replace(*change), tmp_path)
    (fault,) = caught.value.faults
    assert all(part in fault for part in said), fault


@pytest.mark.parametrize("change", [("", ""), (START, START + '\nload_path = "other/checkpoint/step-000002"'),
                                    ("[training]", LORA + "[training]")])  # fmt: skip
def test_a_sound_one_is_taken(change, tmp_path):
    config = load(SOUND.replace(*change) if change[0] else SOUND, tmp_path)
    assert config.preference.beta == 0.1 and config.keeps_its_start
