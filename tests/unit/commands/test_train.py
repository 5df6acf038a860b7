"""``python -m glm46 train`` without a launcher: one process, from the command line to the last line it prints."""

import torch.distributed as dist

from glm46.cli import main
from glm46.config.loader import dump_config
from tests.small_run import small_config


def test_one_process_trains_and_says_what_to_type_next(source_folder, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(dump_config(small_config(source_folder, tmp_path / "out", training={"steps": 2})))
    assert main(["train", "--config", str(file)]) == 0
    assert not dist.is_initialized()
    said = capsys.readouterr().out
    assert "Next: train longer" in said and f"--config {file}" in said
