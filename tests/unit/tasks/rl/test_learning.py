"""Reinforcement learning learns: a small policy in seconds, and rl_debug.toml by three algorithms in the long test.

python -m pytest tests/unit/tasks/rl/test_learning.py -m long

Bounds of time, as shares within one run.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import tomli_w

from glm46.config.loader import load_config
from glm46.operate.launch.train_rank import train
from tests.builders import metric_rows

ROOT = Path(__file__).parents[4]
ALGORITHMS = {"gspo": [], "grpo": [], "ppo": ["--rl.critic.lr", "1e-3", "--rl.critic.warmup_tokens", "655360"]}
"""Keys beside the algorithm, see docs/rl.md."""


TWO_TRIES = {
    "rl": {"algorithm": "grpo"},
    "environment": {"function": "tests.unit.tasks.rl.two_tries:repeat_the_digits", "max_turns": 2},
    "first_try": {"name": "tests.unit.tasks.rl.two_tries:first_try", "weight": 0.0},
    "max_new_tokens": 40,
}
"""Changes of rl_debug.toml. Its held-out reward is about 0.20, 0.41, 0.61, 0.72 in steps of 40."""


def two_tries(folder: Path, *, worker: bool) -> Path:
    """A file of rl_debug.toml with conversations of two turns, by our function or by a program."""
    config = tomli.loads((ROOT / "train_configs" / "rl_debug.toml").read_text(encoding="utf-8"))
    config["rl"] |= TWO_TRIES["rl"]
    config["rollout"]["max_new_tokens"] = TWO_TRIES["max_new_tokens"]
    config["checkpoint"]["interval"] = 120
    if worker:
        program = "train_configs/programs/sort_digits.py"
        config["rl"]["environment"] = {"kind": "worker", "command": [sys.executable, program], "max_turns": 2}
    else:
        config["rl"]["environment"] = TWO_TRIES["environment"]
        config["rl"]["rewards"].append(TWO_TRIES["first_try"])
    file = folder / "two_tries.toml"
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    return file


def rows(folder: Path) -> list[dict]:
    return metric_rows(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["gspo", *(pytest.param(name, marks=pytest.mark.long) for name in ("grpo", "ppo"))]
)
def test_a_small_policy_raises_its_reward(make_run, tmp_path, algorithm):
    config = make_run(
        "run", 30, {"algorithm": algorithm, "prompts_per_rollout": 8, "group_size": 8},
        training={"steps": 30, "global_batch_size": 64, "local_batch_size": 4, "seq_len": 64},
        checkpoint={"enable": False},
    )  # fmt: skip
    assert train(config) == 0
    found = [row for row in rows(tmp_path / "run") if "reward" in row]
    # The tokens of all passes of a step: those that were generated, eight prompts, and little padding.
    computed = [row["tokens_per_second"] * row["step_seconds"] for row in found]
    generated = [64 * row["completion_tokens"] for row in found]
    assert all(own <= tokens <= 2.5 * own for own, tokens in zip(generated, computed, strict=True)), (
        generated,
        computed,
    )
    rewards = [row["reward"] for row in found]
    # 64 samples of up to six letters, each even or not: the mean of five steps has a deviation of about 0.02.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_debug_run_raises_its_reward(tmp_path, seed):
    """20 minutes on two cores for the nine runs; each algorithm starts from the same labels."""

    def run(name: str, recipe: str, *keys: str) -> list[float]:
        command = [sys.executable, "-m", "glm46", "train", "--config", f"train_configs/{recipe}.toml"]
        overrides = ["--job.dump_folder", str(tmp_path / name), "--debug.seed", str(seed), *keys]
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
        found = rows(tmp_path / name)
        return [row["validation_reward/sorting"] for row in found if "validation_reward/sorting" in row]

    run("labels", "rl_debug_labels")
    base = ["--checkpoint.initial_load_path", str(tmp_path / "labels" / "checkpoint" / "step-000040")]
    for algorithm, keys in ALGORITHMS.items():
        rewards = run(algorithm, "rl_debug", *base, "--rl.algorithm", algorithm, *keys)
        # 512 answers: a deviation of 0.02.
        assert rewards[-1] > rewards[0] + 0.2, (algorithm, rewards)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("worker", [False, True], ids=["function", "worker"])
def test_a_conversation_of_two_turns_is_learned(worker, tmp_path):
    """Three minutes on two cores."""

    def run(name: str, config: Path | str, *keys: str) -> None:
        command = [sys.executable, "-m", "glm46", "train", "--config", str(config), *keys]
        folder = ["--job.dump_folder", str(tmp_path / name)]
        subprocess.run([*command, *folder], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)

    run("labels", "train_configs/rl_debug_labels.toml")
    start = tmp_path / "labels" / "checkpoint" / "step-000040"
    run("two", two_tries(tmp_path, worker=worker), "--checkpoint.initial_load_path", str(start))
    validated = [row for row in rows(tmp_path / "two") if "validation_reward/sorting" in row]
    rewards = [row["validation_reward/sorting"] for row in validated]
    # 512 answers: a deviation of 0.02.
    assert len(rewards) == 4
    assert rewards[0] < 0.3
    assert rewards[-1] >= 0.65, rewards


@pytest.mark.parametrize("worker", [False, True], ids=["function", "worker"])
def test_the_file_of_two_turns_is_a_run(worker, tmp_path):
    """The test above is long: this one reads its file."""
    config = load_config(two_tries(tmp_path, worker=worker), [], world_size=1)
    assert config.rl is not None
    assert config.rl.environment is not None
    assert config.rl.environment.max_turns == 2


RECIPE = Path(__file__).parents[4] / "train_configs" / "rl_debug.toml"


@pytest.mark.slow
def test_a_step_is_mostly_generation_and_passes(make_run, tmp_path):
    """Steps of the debug recipe, with the fixture's reward, that random weights get some of."""
    words = ["--job.dump_folder", str(tmp_path / "run"), "--metrics.log_freq", "1", "--training.steps", "6"]
    words += ["--rl.rewards", '[{name = "format"}]', "--rl.validation=", "--validation.enable", "false"]
    words += ["--checkpoint.initial_load_path=", "--checkpoint.initial_load_model_only=", "--checkpoint.interval", "6"]
    words += ["--rl.warm_up_rollouts", "1"]
    assert train(load_config(RECIPE, words, world_size=1)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    shares = [row["overhead_ratio"] for row in map(json.loads, lines) if "loss" in row][1:]
    print(shares)
    # The goal is 0.1 on quiet cores, where 0.09 was measured. What is left is Python of one thread and two files that
    # wait for the disk: other programs lengthen it more than products of matrices. A pass too many would be above 0.25.
    assert len(shares) == 5 and statistics.median(shares) < 0.2
