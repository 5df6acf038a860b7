"""Reinforcement learning learns: a small policy in seconds, and rl_debug.toml by three algorithms in the long test.

python -m pytest tests/unit/tasks/rl/test_learning.py -m long
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.tasks.rl.task import train

ALGORITHMS = {"gspo": [], "grpo": [], "ppo": ["--rl.critic.lr", "1e-3", "--rl.critic.warmup_tokens", "655360"]}
"""Keys beside the algorithm, see docs/rl.md."""


TOY = Path(__file__).parents[5] / "shared" / "cases" / "agentic"
"""A run of others that learns in conversations of two turns: its reward is 0.20, 0.41, 0.61, 0.72 in steps of 40."""


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
@pytest.mark.skipif(not TOY.is_dir(), reason="the cases of others are not beside this checkout")
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([], id="function"),
        pytest.param(
            ["--rl.environment.kind", "worker", "--rl.environment.function=", "--rl.rewards", '[{name = "exact"}]',
             "--rl.environment.command", f'["{sys.executable}", "train_configs/programs/sort_digits.py"]'],
            id="worker",
        ),
    ],
)  # fmt: skip
def test_a_handed_conversation_of_two_turns_is_learned(keys, tmp_path):
    """Three minutes on two cores."""

    def run(name: str, config: Path | str, *keys: str) -> None:
        command = [sys.executable, "-m", "glm46", "train", "--config", str(config), *keys]
        paths = os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])])
        folder = ["--job.dump_folder", str(tmp_path / name)]
        subprocess.run(
            [*command, *folder], check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": paths}
        )

    run("labels", "train_configs/rl_debug_labels.toml")
    start = tmp_path / "labels" / "checkpoint" / "step-000040"
    run("two", TOY / "second_try.toml", "--checkpoint.initial_load_path", str(start), *keys)
    found = [row["validation_reward/sorting"] for row in rows(tmp_path / "two") if "validation_reward/sorting" in row]
    # 512 answers: a deviation of 0.02.
    assert len(found) == 4 and found[0] < 0.3 and found[-1] >= 0.65, found
