"""Memory of a run with [rl]: what comes beside the policy."""

from pathlib import Path

import pytest

from glm46.config.loader import load_config
from glm46.operate.estimate.memory import plan_memory

RECIPE = Path("train_configs/rl_debug_labels.toml")


def memory_of(*overrides: str, ranks: int = 1):
    return plan_memory(load_config(RECIPE, overrides), ranks, device="cpu")


def test_networks_beside_the_policy_are_counted():
    alone = memory_of()
    trained = alone.weights + alone.gradients + alone.optimizer
    assert alone.networks == 0
    ppo = memory_of("--rl.algorithm", "ppo")
    assert ppo.networks == pytest.approx(trained)
    kl = memory_of("--rl.kl.weight", "0.1", "--rl.warm_up_rollouts", "0", "--checkpoint.initial_load_path", "base")
    assert kl.networks == pytest.approx(alone.weights)
    assert ppo.total == pytest.approx(alone.total + trained)


def test_ranks_with_parts_of_the_policy_hold_a_copy_to_draw_from():
    cache = 64 * 256 * 2 * 2 * 32 * 2 * 4
    assert memory_of().generation == cache
    assert memory_of(ranks=2).generation == pytest.approx(cache + 4 * 311_400, rel=1e-3)
    servers = ("--rollout.kind", "vllm", "--rollout.urls", '["http://localhost:8000"]')
    assert memory_of(*servers).generation == 0


def test_ranks_that_draw_together_hold_parts_and_gather_one_tensor():
    cache, copy = memory_of().generation, memory_of(ranks=4).generation - memory_of().generation
    gate_up, down = 4 * 8 * 96 * 96, 4 * 8 * 96 * 48  # of the one layer with experts

    def generation(axis: str, degree: int) -> float:
        return memory_of(f"--rollout.{axis}_parallel_degree", str(degree), ranks=4).generation - gate_up

    assert generation("expert", 4) == pytest.approx(cache + copy - 3 / 4 * (gate_up + down))
    # Norms and routers, less than a hundredth, are whole on both ranks; experts are, too.
    assert generation("tensor", 2) == pytest.approx(cache / 2 + (copy + gate_up + down) / 2, rel=1e-2)
