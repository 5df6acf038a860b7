"""What [finetune.preference] refuses: each message has the key, its value and what to write instead."""

import pytest

from glm46.config.errors import UserError
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
# Old and new text; what the message says.
BAD = {
    "beta": (("beta = 0.1", "beta = 0.0"), ["finetune.preference.beta = 0", "greater than 0"]),
    "a teacher": (
        ("beta = 0.1", 'beta = 0.1\n[finetune.distillation]\nload_path = "teacher"'),
        ["finetune.distillation: was removed", 'with rl.algorithm = "distillation"; remove the section'],
    ),
    "weight": (("beta = 0.1", "sft_weight = -1.0"), ["finetune.preference.sft_weight = -1"]),
    "loss": (("beta = 0.1", 'loss_type = "dpo"'), ["finetune.preference.loss_type", "sigmoid", "kto"]),
    "margin of IPO": (
        ("beta = 0.1", 'loss_type = "ipo"\nsimpo_gamma = 0.1'),
        ["simpo_gamma", "no effect without", 'loss_type = "simpo"', "remove"],
    ),
    "beta of a reward model": (
        ("beta = 0.1", 'loss_type = "reward"\nbeta = 0.2'), ["preference.beta", "no effect without", "remove"],
    ),
    "adapters of a reward model": (
        ("beta = 0.1", 'loss_type = "reward"', "[finetune.preference]", LORA + "[finetune.preference]"),
        ["[adapter]: not possible", 'loss_type = "reward"', "a reward model trains all weights", "remove adapter"],
    ),
    "answers of a reward model": (
        ("beta = 0.1", 'loss_type = "reward"', "[finetune.pre", "[finetune]\nsamples = ['Hello']\n[finetune.pre"),
        ['finetune.samples = ["Hello"]: not possible', "gives a number and no text", "remove finetune.samples"],
    ),
    "export of a reward model": (
        ("beta = 0.1", 'loss_type = "reward"', START, START + "\nlast_save_in_hf = true"),
        ["checkpoint.last_save_in_hf = true", "transformers has no form for it", "remove checkpoint.last_save_in_hf"],
    ),
    "margin of DPO": (("beta = 0.1", "simpo_gamma = 0.5"), ["simpo_gamma", 'loss_type = "simpo"']),
    "weights of DPO": (("beta = 0.1", "desirable_weight = 1.0"), ["desirable_weight", 'loss_type = "kto"']),
    "cross-entropy of ORPO": (
        ("beta = 0.1", 'loss_type = "orpo"\nsft_weight = 1.0'), ["preference.sft_weight", "no effect", "sigmoid"],
    ),
    "labels for DPO": (
        ('format = "preference"', 'format = "unpaired_preference"'),
        ['recipe.format = "unpaired_preference": labelled answers', 'loss_type = "kto"', 'format = "preference"'],
    ),
    "chats for KTO": (
        ('"preference"\nmax_tokens = 16', '"chat"\nmax_tokens = 8', "beta = 0.1", 'loss_type = "kto"'),
        ['recipe.format = "chat": no pairs', '"preference" or "unpaired_preference"'],
    ),
    "long answers of KTO": (
        ("beta = 0.1", 'loss_type = "kto"'),
        ["recipe.max_tokens = 16: longer than half", "16 tokens, and KTO needs several", "lower it to 8"],
    ),
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
    "MTP": (
        ("num_nextn_predict_layers = 0", ""),
        ["model.shape.num_nextn_predict_layers = 1", "must be 0", "set it to 0"],
    ),
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


def changed(*texts: str) -> str:
    """The sound config with each second text in place of the one before it."""
    config = SOUND
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert old in config
        config = config.replace(old, new)
    return config


@pytest.mark.parametrize("name", BAD)
def test_a_bad_preference_is_refused_in_one_message(name, tmp_path):
    change, said = BAD[name]
    with pytest.raises(UserError) as caught:
        load(changed(*change), tmp_path)
    (fault,) = caught.value.faults
    assert all(part in fault for part in said), fault


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
