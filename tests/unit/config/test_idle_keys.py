"""A key that a person states has an effect, or is refused; a default that nobody stated never is."""

import pytest

from glm46.commands.prepare import read_recipe
from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config

SOUND = (
    'model.flavor = "debug"\ntraining.steps = 2\ntraining.seq_len = 16\n[[data.sources]]\nname = "a"\npath = "data/a"\n'
)


def write(folder, *lines: str):
    """A sound file with lines of dotted keys before it."""
    path = folder / "run.toml"
    path.write_text("\n".join([*lines, SOUND]))
    return path


def test_a_stated_off_is_not_in_vain(tmp_path):
    lines = ["checkpoint.enable = false", "training.max_rollbacks = 0", "checkpoint.keep_best_k = 0"]
    assert load_config(write(tmp_path, *lines, "checkpoint.initial_load_model_only = false"))
    assert load_config(write(tmp_path, 'parallelism.expert_exchange = "auto"'))


def test_command_line_switches_off_what_the_file_sets_up(tmp_path):
    """`--optimizer.name AdamW` tries another rule with the same file; the keys of the first one are not in the way."""
    path = write(tmp_path, "optimizer.momentum = 0.9", "validation.enable = true", "validation.freq = 5")
    config = load_config(path, ["--optimizer.name", "AdamW", "--validation.enable", "false"])
    assert config.optimizer.momentum == 0.95 and config.validation.freq == 100
    (tmp_path / "dumped.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.toml") == config
    with pytest.raises(UserError, match=r"^command line: optimizer.momentum = 0.8: has no effect"):
        load_config(path, ["--optimizer.name", "AdamW", "--optimizer.momentum", "0.8"])
    with pytest.raises(UserError, match=r"run.toml and command line: optimizer.momentum"):
        load_config(write(tmp_path, 'optimizer.name = "AdamW"'), ["--optimizer.momentum", "0.8"])


def test_recipe_is_held_to_the_same_rule(tmp_path):
    with pytest.raises(UserError, match=r'^command line: answer_key = "b": has no effect without verify = "maths"'):
        read_recipe(None, {"input": ["a.txt"], "output": "out", "answer_key": "b"})
    line = 'recipe = { input = ["a.txt"], answer_key = "result" }'
    path = write(tmp_path)
    path.write_text(path.read_text() + line)
    with pytest.raises(UserError, match=r'recipe.answer_key = "result": has no effect without .*verify = "maths"'):
        load_config(path)


def test_the_text_key_of_chats_belongs_to_evaluation_text(tmp_path):
    chats = {"input": ["a.jsonl"], "output": "out", "format": "messages", "max_tokens": 8, "text_key": "question"}
    with pytest.raises(UserError, match=r'text_key = "question": has no effect without format = "text" or decontam'):
        read_recipe(None, chats)
    assert read_recipe(None, chats | {"decontaminate": ["exam.jsonl"]}).text_key == "question"
