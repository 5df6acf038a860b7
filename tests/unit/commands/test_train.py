"""``python -m glm46 train`` without a launcher: one process, from the command line to the last line it prints."""

import re

import torch.distributed as dist

from glm46.cli import main
from glm46.config.loader import dump_config
from glm46.observe.heartbeat import read_heartbeat
from glm46.observe.history import read_history, rows_by_kind
from tests.small_run import small_config


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
