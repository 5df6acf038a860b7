"""Keys of the command line: how they are read, what they replace, and how their faults are told from the file's.

Commands that are printed for a person work as they are, in the form in which the run was started.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.config import command_line
from glm46.config.command_line import Start, module_command, replace_overrides
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.config.overrides import Override, key_parts, parse_overrides

SOUND = """
[model]
flavor = "debug"
[training]
tokens = 100_000
seq_len = 128
[[data.sources]]
name = "a"
path = "data/a"
[[data.sources]]
name = "b"
path = "data/b"
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    return path


def faults_of(file: Path, *overrides: str) -> list[str]:
    """Messages, without the file's folder."""
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    return [fault.replace(str(file), "run.toml") for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("3e-4", 3e-4),
        ("1_000", 1000),
        ("true", True),
        ("AdamW", "AdamW"),
        ('"3"', "3"),
        ("a b", "a b"),
        ("2026-01-01", "2026-01-01"),
        ("./outputs/x", "./outputs/x"),
        ("[[0, 1.0], [5, 2]]", [[0, 1.0], [5, 2]]),
        ('{rope_type = "yarn"}', {"rope_type": "yarn"}),
        ("1\nb = 2", "1\nb = 2"),
        ("# no value", "# no value"),
        ("1 # one", 1),
    ],
)
def test_value_is_a_toml_literal_or_else_a_string(text, value):
    for tokens in (["--a.b", text], [f"--a.b={text}"]):
        assert parse_overrides(tokens) == ([Override("a.b", value)], [])


def test_key_is_split_at_dots_and_indices():
    assert key_parts("data.sources[10].weight") == ["data", "sources", 10, "weight"]


def test_later_overrides_win_over_earlier_ones_and_the_file(file):
    config = load_config(file, ["--training.seq_len", "64", "--training.seq_len=32", "--optimizer.name", "AdamW"])
    assert (config.training.seq_len, config.optimizer.name, config.training.tokens) == (32, "AdamW", 100_000)


def test_entry_of_an_array_can_be_overridden(file):
    config = load_config(file, ["--data.sources[1].weight", "2.5"])
    assert [source.weight for source in config.data.sources] == [1.0, 2.5]
    config = load_config(file, ["--data.sources[0]", '{name = "c", path = "data/c"}'])
    assert [source.name for source in config.data.sources] == ["c", "b"]


def test_whole_array_can_be_overridden(file):
    config = load_config(file, ["--data.sources", '[{name = "c", path = "data/c"}]'])
    assert [source.name for source in config.data.sources] == ["c"]


def test_missing_tables_are_made(file):
    overrides = ["--model.shape.rope_scaling.rope_type", "yarn", "--model.shape.rope_scaling.factor", "2"]
    overrides += ["--model.shape.rope_scaling.original_max_position_embeddings", "1024"]
    assert load_config(file, overrides).model.shape.rope_scaling.factor == 2.0


def test_nothing_behind_the_equals_sign_takes_the_key_out_of_the_file(file):
    file.write_text(SOUND + '[inference]\nprompt = "def"\n[lr_scheduler]\nwarmup_tokens = 9\n')
    config = load_config(file, ["--inference.prompt=", "--lr_scheduler.warmup_tokens="])
    assert (config.inference.prompt, config.lr_scheduler.warmup_tokens) == ("", 0)
    config = load_config(file, ["--data.sources[0]="])
    assert [source.name for source in config.data.sources] == ["b"]


def test_budget_of_the_command_line_replaces_the_files_in_either_unit(file):
    config = load_config(file, ["--training.steps", "7"])
    assert (config.training.steps, config.training.tokens) == (7, None)
    (fault,) = faults_of(file, "--training.steps", "7", "--training.tokens", "9")
    assert fault.startswith("command line: training.tokens = 9, training.steps = 7: ") and "remove one" in fault


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--training.seq_len"], "command line: --training.seq_len: no value given; write --training.seq_len VALUE"),
        (
            ["--training.seq_len", "--debug.seed", "3"],
            "command line: --training.seq_len: no value given; write --training.seq_len VALUE",
        ),
        (
            ["training.seq_len=3"],
            'command line: "training.seq_len=3": expected --section.key value; quote a value that has spaces',
        ),
        (["--training.seq_len", "64", "72"], 'command line: "72": expected --section.key value; quote a value that has '
         "spaces"),
        (["--trainin.seq_len", "64"], "command line: trainin: unknown key; did you mean 'training'?"),
        (["--training.seqlen", "64"], "command line: training.seqlen: unknown key; did you mean 'seq_len'?"),
        (
            ["--training.seq_len", "x"],
            'command line: training.seq_len = "x": must be a valid integer (Tokens per sequence)',
        ),
        (
            ["--compile.enable", "True"],
            'command line: compile.enable = "True": must be a valid boolean; write true without quotes',
        ),
        (
            ["--data.sources[2].weight", "1"],
            "command line: data.sources[2].weight: data.sources has 2 entries, counted from 0; set the whole "
            "value of data.sources instead",
        ),
        (
            ["--data.sources.recipe.format", "chat"],
            "command line: data.sources.recipe.format: data.sources is an array of 2 tables; write "
            "data.sources[0].recipe.format for the first one",
        ),
        (
            ["--data.sources.path", "a"],
            "command line: data.sources.path: data.sources is an array of 2 tables; write data.sources[0].path for "
            "the first one",
        ),
        (
            ["--data.sources.1.path", "a"],
            "command line: data.sources.1.path: data.sources is an array of 2 tables; write data.sources[1].path",
        ),
        (
            ["--training.seq_len.x", "1"],
            "command line: training.seq_len.x: training.seq_len = 128 is not a table; set the whole value of "
            "training.seq_len instead",
        ),
        (
            ["--data[0].x", "1"],
            "command line: data[0].x: data is not an array in the file; set the whole value of data instead",
        ),
        (["--training", "3"], "command line: training = 3: must be a table"),
    ],
)  # fmt: skip
def test_mistake_on_the_command_line_is_said_to_be_there(tokens, message, file):
    assert faults_of(file, *tokens)[0] == message


def test_rule_names_both_places_when_its_keys_come_from_both(file):
    file.write_text(SOUND.replace("seq_len = 128", "seq_len = 128\nlocal_batch_size = 4"))
    (fault,) = faults_of(file, "--training.global_batch_size", "6")
    assert fault.startswith("run.toml and command line: training.global_batch_size = 6: must be a multiple of 4")


def test_file_is_not_blamed_for_what_the_command_line_replaced(file):
    file.write_text(SOUND.replace("seq_len = 128", "seq_len = 1"))
    assert load_config(file, ["--training.seq_len", "64"]).training.seq_len == 64
    (fault,) = faults_of(file, "--training.seq_len", "0")
    assert fault.startswith("command line: training.seq_len = 0:")


def test_a_value_that_nobody_has_stated_is_called_a_default(tmp_path):
    """The command line is blamed for a section that needs another value of this key."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\nflavor = "debug"\n[training]\nsteps = 3\nseq_len = 64\n[moe]\nz_loss_weight = 0.1\n')
    with pytest.raises(UserError) as error:
        load_config(path, ["--adapter.rank", "8"])
    faults = {fault.partition(" = ")[0]: fault for fault in error.value.faults}
    rate = faults["command line: moe.bias_update_rate"]
    assert rate.startswith("command line: moe.bias_update_rate = 0.001 (the default): is not possible with [adapter]")
    assert "(the default)" not in faults["run.toml and command line: moe.z_loss_weight".replace("run.toml", str(path))]


START = Start(Path("my runs/a.toml"), ("--training.steps", "3", "--optimizer.lr=1e-3"), processes=4)


@pytest.mark.parametrize(("tokens", "values", "expected"), [
    ([], {"training.tokens": "9"}, ["--training.tokens", "9"]),
    (["--training.steps", "3"], {"training.tokens": "9"}, ["--training.tokens", "9"]),
    (["--training.tokens=3", "--a.b", "--2"], {"training.tokens": "9"}, ["--a.b", "--2", "--training.tokens", "9"]),
    (["--job.dump_folder", "x", "--a.b="], {"job.dump_folder": "y"}, ["--a.b=", "--job.dump_folder", "y"]),
])  # fmt: skip
def test_a_key_is_stated_once(tokens, values, expected):
    assert replace_overrides(tokens, values) == expected


def test_command_keeps_config_processes_options_and_overrides():
    command = replace(START, options=("--max-restarts", "2")).command({"training.tokens": "9"})
    assert shlex.split(command)[3:] == [
        "launch", "--config", "my runs/a.toml", "--nproc", "4", "--max-restarts", "2",
        "--optimizer.lr=1e-3", "--training.tokens", "9",
    ]  # fmt: skip
    assert shlex.split(START.plan_command(nodes=2))[-8:] == [
        "plan", "--config", "my runs/a.toml", "--nproc", "8", "--training.steps", "3", "--optimizer.lr=1e-3",
    ]  # fmt: skip


def test_command_of_the_script_is_the_one_that_was_typed():
    script = replace(START, script="CONFIG_FILE='my runs/a.toml' NGPU=4 ./run_train.sh")
    assert script.command({"training.tokens": "9"}) == (
        "CONFIG_FILE='my runs/a.toml' NGPU=4 ./run_train.sh --optimizer.lr=1e-3 --training.tokens 9"
    )
    assert replace(script, script="./run_train.sh").command({}).startswith("./run_train.sh --nproc 4 --training.steps")
    assert script.small_command() == "CONFIG_FILE=train_configs/debug.toml ./run_train.sh"


def test_python_is_named_so_that_the_shell_finds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(command_line, "_is_installed", lambda: False)
    monkeypatch.chdir(command_line.ROOT)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert module_command() == "python -m glm46"
    monkeypatch.setenv("PATH", "")
    assert module_command() == f"{shlex.quote(command_line.short(Path(sys.executable)))} -m glm46"
    monkeypatch.chdir(tmp_path)
    assert module_command().startswith(f"PYTHONPATH={shlex.quote(str(command_line.ROOT))} ")
    monkeypatch.setattr(command_line, "_is_installed", lambda: True)
    assert not module_command().startswith("PYTHONPATH")


def test_an_empty_path_of_a_source_is_refused_with_its_key(capsys):
    """It would be the current folder."""
    assert main(["train", "--config", "train_configs/debug.toml", "--data.sources[0].path", ""]) == 2
    assert 'data.sources[0].path = "": must have at least 1 character' in capsys.readouterr().err
