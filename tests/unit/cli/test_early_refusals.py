"""Mistakes that can be found without torch are refused before it is imported, which takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm46.config.loader import dump_config
from glm46.config.presets import resolve_shape
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.tokenizer_files import files_beside_weights

ROOT = Path(__file__).parents[3]
_PROGRAM = """
import sys
sys.modules["torch"] = None  # an import of it raises ModuleNotFoundError
from glm46.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_torch(*words: str | Path) -> subprocess.CompletedProcess:
    """Run a command line in a process that cannot import torch, on a machine without GPUs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _PROGRAM, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def check_refusal(words: list[str | Path], *parts: str) -> None:
    """Check that a command line is refused in one line with these parts."""
    done = run_without_torch(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and all(part in done.stderr for part in parts), done.stderr


@pytest.mark.parametrize(("keys", "part"), [
    ({"checkpoint": {"initial_load_path": "nowhere"}}, "checkpoint.initial_load_path = 'nowhere': no such folder"),
    ({"model": {"tokenizer_path": "nowhere"}}, "tokenizer 'nowhere': no such file"),
    ({"model": {"vocab_size": 300}}, "model.shape.vocab_size = 300: the tokenizer 'builtin' has ids up to 8191"),
    ({"job": {"dump_folder": "file"}}, "file is a file, not a folder; set another folder"),
    ({"job": {"dump_folder": "file/run"}}, "file is a file, not a folder; set another folder"),
    ({"data": {"sources": [{"name": "a", "path": "nowhere"}]}}, "nowhere: no such folder; make it with"),
])  # fmt: skip
def test_train_refuses_folders_tokenizer_and_data(keys, part, make_config, tmp_path):
    (tmp_path / "file").touch()
    if "job" in keys:
        keys = {"job": {"dump_folder": str(tmp_path / keys["job"]["dump_folder"])}}
    file = tmp_path / "run.toml"
    file.write_text(dump_config(make_config(**keys)))
    before = sorted(tmp_path.rglob("*"))
    check_refusal(["train", "--config", file], part)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_are_listed_without_torch(tmp_path):
    check_refusal(["checkpoint", "list", tmp_path / "nowhere"], "no such folder")
    check_refusal(["checkpoint", "show", tmp_path], str(tmp_path))
    check_refusal(["checkpoint", "prune", tmp_path, "--keep-latest-k", "1"], str(tmp_path))
    manager = CheckpointManager(tmp_path / "run", keep_latest_k=0)
    manager.save(7, {"model.weight": torch.zeros(3)}, {}, validation_loss=2.5)
    done = run_without_torch("checkpoint", "list", tmp_path / "run")
    assert done.returncode == 0 and "2.5000" in done.stdout, done.stderr


def test_rl_inspect_refuses_a_run_without_rollouts(tmp_path):
    check_refusal(["rl", "inspect", tmp_path / "nowhere"], "no such folder")
    check_refusal(["rl", "inspect", tmp_path, "--tokenizer", "builtin"], "no rollout", "run with [rl]")


@pytest.mark.parametrize(("device", "part"), [
    ("cuda", "this machine has 0 GPUs; use cpu"), ("cuda:1", "this machine has 0 GPUs"), ("tpu", "unknown device"),
])  # fmt: skip
def test_generate_refuses_a_device(device, part, tokenizer, tmp_path, make_config):
    shape = resolve_shape(make_config().model)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in files_beside_weights(tokenizer, max_length=64).items():
        (tmp_path / name).write_bytes(content)
    check_refusal(["generate", "--model", tmp_path, "--prompt", "a", "--device", device], f"--device {device}", part)
