"""The command that `rl-servers` prints for a CPU starts a vLLM that a run accepts: `pytest -m servers`."""

import json
from pathlib import Path

from glm46.commands.rl_servers import rl_servers_command
from glm46.config.loader import load_config
from glm46.operate.launch.train_rank import train
from glm46.tasks.rl.rewards import function_pool
from tests.processes import free_port
from tests.servers.policy import MARKS
from tests.servers.vllm_process import VllmProcess
from tests.unit.tasks.rl.conftest import brightness

pytestmark = MARKS
RECIPES = Path(__file__).parents[2] / "train_configs"


def small(name: str, folder: Path, *words: str) -> tuple[Path, list[str]]:
    """A debug recipe, and the words that make a short run of it."""
    sizes = ["--rl.prompts_per_rollout", "4", "--training.global_batch_size", "32"]
    sizes += ["--rl.validation=", "--validation.enable", "false"]
    return RECIPES / name, ["--job.dump_folder", str(folder), "--metrics.log_freq", "1", *sizes, *words]


def test_the_printed_command_starts_what_the_run_accepts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(function_pool._HERE, "format", brightness)  # random weights sort no digits
    saved = ["--training.steps", "1", "--checkpoint.interval", "1", "--checkpoint.last_save_in_hf", "true"]
    base, port = tmp_path / "base", free_port()
    path, words = small("rl_debug_labels.toml", base, *saved, "--rl.warm_up_rollouts", "1")
    assert train(load_config(path, words, world_size=1)) == 0
    served = ["--rollout.kind", "vllm", "--rollout.urls", json.dumps([f"http://127.0.0.1:{port}"])]
    start = ["--checkpoint.initial_load_path", str(base / "checkpoint" / "step-000001"), "--training.steps", "2"]
    rewards = ["--rl.rewards", '[{name = "format"}]']
    path, words = small("rl_debug.toml", tmp_path / "run", *served, *start, *rewards)
    capsys.readouterr()
    assert (
        rl_servers_command(["--config", str(path), "--folder", str(base / "huggingface" / "step-000001"), *words]) == 0
    )
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    monkeypatch.chdir(tmp_path)  # the command has no relative places
    server = VllmProcess(["sh", "-c", command], port, tmp_path / "log")
    try:
        print(f"vLLM answers after {server.wait():.1f} s")
        monkeypatch.chdir(RECIPES.parent)
        assert train(load_config(path, words, world_size=1)) == 0
    finally:
        server.kill()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [row["mismatch_kl"] for row in map(json.loads, lines) if "loss" in row]
    print(found)
    assert len(found) == 2 and all(abs(value) < 1e-9 for value in found)
