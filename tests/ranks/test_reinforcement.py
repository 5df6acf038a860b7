"""Reinforcement learning computes the same on one rank and on two, and goes on after kills as if nothing was."""

import pytest

# FP32 sums in another order, over three rollouts that are drawn from the weights of the steps before. Losses are
# differences of terms near the advantages, which are of order 1.
BOUND = 1e-5


def test_ranks_agree_and_kills_lose_nothing(server):
    *runs, killed = server.rows("reinforcement.main", seconds=400)
    found = {row["name"]: row["rows"] for row in runs}
    assert all(len(rows) == 6 for rows in found.values())
    for name, rows in found.items():
        expected = found[f"{name.split()[0]} 1"]
        for row, one in zip(rows, expected, strict=True):
            assert row == pytest.approx(one, rel=1e-4, abs=BOUND), name
            assert row["mismatch_kl"] < 1e-8
    assert len({row["reward"] for row in found["gspo 1"]}) == 3
    assert any(row["loss"] != 0 for row in found["gspo 1"])
    assert all("loss/critic" in row for row in found["ppo 2"])

    assert all(was_killed for was_killed, _, _ in killed["kills"].values())
    assert killed["kills"]["rollout"][2] == [0]
    assert killed["kills"]["update"][1:] == [[3], [0, 2]]
    assert killed["kills"]["journal"][2] == [0, 2], "a rollout without manifest does not exist"
    assert killed["rows"] == found["gspo 2"]
    assert killed["tensors"] > 20
    assert killed["different"] == []
