"""Reinforcement learning computes the same on one rank and on two, and goes on after kills as if nothing was."""

import pytest

from tests.ranks.reinforcement import KILLED, RUNS

# FP32 sums in another order, over three rollouts that are generated from the weights of the steps before. Losses are
# differences of terms near the advantages, which are of order 1.
BOUND = 1e-5
# The critic's values agree to 2e-6 after four steps of AdamW, which divides small gradients by their own size, and
# PPO's advantages are divided by their deviation of 0.15: 1.8e-5 between the kernels of two devices on a CPU with
# AVX-512, 1.2e-6 between one rank and two.
BOUND_OF_WHITENED = 5e-5


def test_ranks_agree_and_kills_lose_nothing(server):
    by_name = {row["name"]: row for row in server.rows("reinforcement.main")}
    interrupted = {label: by_name.pop(f"killed {label}") for label in KILLED}
    found = {name: row["rows"] for name, row in by_name.items()}
    assert found.keys() == RUNS.keys() and all(len(rows) == 6 for rows in found.values())
    for name, rows in found.items():
        expected, bound = found[f"{name.split()[0]} 1"], BOUND_OF_WHITENED if "ppo" in name else BOUND
        for row, one in zip(rows, expected, strict=True):
            assert row == pytest.approx(one, rel=1e-4, abs=bound), name
            assert (row["mismatch_kl"] < 1e-8) == (name != "live 1"), "the engine has other selection biases"
    assert len({row["reward"] for row in found["gspo 1"]}) == 3
    assert any(row["loss"] != 0 for row in found["gspo 1"])
    assert all("loss/critic" in row for row in found["ppo 2"])
    assert found["ppo 2"][-1]["reference_kl"] > 1e-9, "the reference in host memory is not the policy"
    distances = [row["reference_kl"] for row in found["lora 1"]]
    assert distances[0] < 1e-12 < 1e-9 < distances[-1], "adapters begin as their base, which is the reference"

    assert all(was_killed for row in interrupted.values() for was_killed, *_ in row["kills"].values())
    kills = interrupted["gspo 2"]["kills"]
    assert kills["rollout"][2] == [0]
    assert kills["update"][1:] == [[3], [0, 2], 2]
    assert kills["journal"][1:] == [[3], [0, 2], 2]
    assert kills["manifest"][1:] == [[3], [0, 2], 3], "a rollout without manifest does not exist"
    assert kills["save"][1:] == [[3], [0, 2, 4], 3], "nor does a checkpoint"
    assert interrupted["ppo 2"]["kills"]["save"][1:] == [[], [0, 2], 2]
    for label, row in interrupted.items():
        assert row["rows"] == found[label]
        assert row["tensors"] > 20
        assert row["different"] == []
