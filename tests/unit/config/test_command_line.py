"""Commands that are printed for a person: they work as they are, in the form in which the run was started."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.config import command_line
from glm46.config.command_line import Start, module_command, replace_overrides

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
