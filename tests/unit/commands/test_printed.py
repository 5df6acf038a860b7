"""What verbs print, whole, against the golden files of tests/golden.

``python -m glm46 train`` without a launcher: one process, from the command line to the last line it prints.
"""

import re
import sys

import pytest
import torch.distributed as dist

from glm46.cli import main
from glm46.compute.distributed import environment
from glm46.config.command_line import module_command
from glm46.config.loader import dump_config
from glm46.config.options import VERBS
from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.history import read_history, rows_by_kind
from tests.builders import small_config, write_source
from tests.processes import free_port

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


@pytest.mark.slow
def test_one_process_trains_and_says_what_to_type_next(source_folder, tmp_path, capsys, monkeypatch):
    ended = []
    close = Exporter.close
    monkeypatch.setattr(
        Exporter, "close", lambda exporter, **how: (ended.append((exporter, how)), close(exporter, **how))
    )
    file = tmp_path / "run.toml"
    metrics = {"prometheus_port": free_port(), "log_freq": 1}
    config = small_config(source_folder, tmp_path / "out", training={"steps": 2}, metrics=metrics)
    file.write_text(dump_config(config))
    assert main(["train", "--config", str(file)]) == 0
    assert not dist.is_initialized()
    output = capsys.readouterr().out
    assert "Next: train longer" in output and f"--config {file}" in output
    assert f":{metrics['prometheus_port']}/metrics\n" in output
    last = rows_by_kind(read_history(tmp_path / "out" / "metrics.jsonl"))[0][-1]
    ((exporter, how),) = ended
    assert how == {"has_failed": False}
    families = {family.name: family for family in exporter.collect()}
    labels = families["training_info"].samples[0].labels
    exported = {name: family.samples[0].value for name, family in families.items()}
    assert {sample.labels["phase"]: sample.value for sample in families["training_phase"].samples}["stop"] == 1
    positions = ("training_step", "training_steps", "training_last_checkpoint_step")
    assert [exported[name] for name in positions] == [2, 2, 2]
    assert all(exported[name] == last["tokens"] for name in ("training_tokens", "training_tokens_budget"))
    assert exported["training_loss"] == last["loss"]
    assert (labels["run"], labels["hosts"], labels["world_size"], labels["task"]) == ("out", "1", "1", "pretrain")
    assert re.fullmatch("[0-9a-f]{12}(-dirty)?|", labels["commit"])  # empty without git


_POD = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize("variables, named", [
    (_POD, "WORLD_SIZE = 4, RANK = 2"), ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2"), ({"WORLD_SIZE": ""}, "WORLD_SIZE = "),
])  # fmt: skip
def test_processes_of_another_launcher_are_refused_at_once(variables, named, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--config", "train_configs/debug.toml"]) == 2
    said = capsys.readouterr().err
    assert named in said and "launch, or unset WORLD_SIZE" in said


@pytest.mark.parametrize("variables, of_torchrun", [
    ({}, False), ({"RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "node7"}, False), ({"WORLD_SIZE": "1"}, False),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, True),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, False),
])  # fmt: skip
@pytest.mark.parametrize("mark", ["True", "False"])
def test_only_variables_of_torchrun_make_a_rank(variables, of_torchrun, mark, monkeypatch):
    for name, value in (variables | ({environment.RANK_MARK: mark} if of_torchrun else {})).items():
        monkeypatch.setenv(name, value)
    facts = (
        environment.launched_world_size(), environment.launched_rank(), environment.launched_local_rank(),
        environment.launched_local_world_size(), environment.ranks_of_another_launcher(),
    )  # fmt: skip
    assert facts == ((2, 1, 1, 2, {}) if of_torchrun else (None, 0, 0, 1, {}))
