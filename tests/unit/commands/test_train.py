"""``python -m glm46 train`` without a launcher: one process, from the command line to the last line it prints."""

import re

import pytest
import torch.distributed as dist

from glm46.cli import main
from glm46.compute.distributed import environment
from glm46.config.loader import dump_config
from glm46.engine.observe.heartbeat import read_heartbeat
from glm46.engine.observe.history import read_history, rows_by_kind
from tests.small_run import small_config


@pytest.mark.slow
def test_one_process_trains_and_says_what_to_type_next(source_folder, tmp_path, capsys):
    file = tmp_path / "run.toml"
    metrics = {"prometheus_port": 9400, "prometheus_sd_folder": str(tmp_path / "targets"), "log_freq": 1}
    config = small_config(source_folder, tmp_path / "out", training={"steps": 2}, metrics=metrics)
    file.write_text(dump_config(config))
    assert main(["train", "--config", str(file)]) == 0
    assert not dist.is_initialized()
    said = capsys.readouterr().out
    assert "Next: train longer" in said and f"--config {file}" in said
    assert "/metrics\n" in said and not list((tmp_path / "targets").iterdir())
    beat, last = read_heartbeat(tmp_path / "out"), rows_by_kind(read_history(tmp_path / "out" / "metrics.jsonl"))[0][-1]
    assert (beat.phase, beat.step, beat.steps_done, beat.saved_step) == ("stop", 2, 2, 2)
    assert (beat.tokens, beat.tokens_done, beat.loss) == (last["tokens"], last["tokens"], last["loss"])
    assert (beat.info["hosts"], beat.info["world_size"]) == ("1", "1")
    assert re.fullmatch("[0-9a-f]{12}(-dirty)?|", beat.info["commit"])  # empty without git
    assert beat.info["task"] == "pretrain" and beat.tokens_budget == last["tokens"]


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
