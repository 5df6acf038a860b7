"""What verbs print, whole, against the golden files of tests/golden."""

import re
import sys

import pytest

from glm46.cli import main
from glm46.config.command_line import module_command
from glm46.config.loader import dump_config
from glm46.config.options import VERBS
from tests.builders import small_config, write_source

PLANS = {
    "debug": ["train_configs/debug.toml", "--gpu", "H100", "--gpus", "4"],
    "pipeline": [
        "train_configs/glm45_air_pretrain.toml", "--gpu", "H100", "--gpus", "128", "--price", "2.5",
        "--parallelism.expert_parallel_degree", "8", "--parallelism.pipeline_parallel_degree", "2",
        "--parallelism.data_parallel_shard_degree", "-1",
    ],
    "rl": ["train_configs/rl_debug_labels.toml", "--gpu", "H100", "--gpus", "8"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_output(monkeypatch):
    """Output is 120 columns wide and has no colours, whatever the terminal of the tests."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="argparse of Python 3.13 writes options of two names differently"
)
@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb, capsys, golden):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    golden(f"help/{verb}", capsys.readouterr().out)


@pytest.mark.parametrize("recipe", PLANS)
def test_the_plan_of_a_recipe(recipe, capsys, golden):
    does_not_fit = recipe == "pipeline"
    assert main(["plan", "--config", *PLANS[recipe]]) == int(does_not_fit)
    golden(f"plan/{recipe}", capsys.readouterr().out)


def test_what_a_folder_of_shards_holds(tmp_path, tokenizer, monkeypatch, capsys, golden):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    write_source(tmp_path / "shards", tokenizer)
    assert main(["inspect", "shards", "--rows", "2", "--seq_len", "64"]) == 0
    golden("inspect/shards", capsys.readouterr().out)


@pytest.mark.slow
def test_the_console_of_a_short_run(source_folder, tmp_path, monkeypatch, capsys, golden):
    monkeypatch.chdir(tmp_path)
    validation = {"enable": True, "freq": 2, "steps": 1}
    config = small_config(source_folder, tmp_path / "out", training={"steps": 2}, validation=validation)
    (tmp_path / "run.toml").write_text(dump_config(config))
    assert main(["train", "--config", "run.toml"]) == 0
    printed = capsys.readouterr().out.replace(module_command(), "python -m glm46")
    printed = printed.replace(str(source_folder), "SOURCE").replace(str(tmp_path), "FOLDER")
    # Speeds and times are those of the machine; losses and norms differ in the last digits between CPUs.
    printed = re.sub(r" *[\d,.]+ tok/s", " # tok/s", printed)
    printed = re.sub(r"\d[\d.:hms]*( s after|s left)", r"#\1", printed)
    golden("console/train", re.sub(r"(?m)^step .*", lambda line: re.sub(r"\d+\.\d+", "#", line[0]), printed))
