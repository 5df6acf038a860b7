"""A task with three networks needs no change to the engine: a policy, a frozen reference and a critic."""

import pytest

# FP32 sums in another order, over six steps of AdamW. The norm of the head alone is 2e-5 from that of its shards: torch
# adds its squares one after the other.
BOUND = 1e-4


def test_a_policy_a_reference_and_a_critic_train_on_any_layout_and_resume_bit_for_bit(server):
    rows = {row.pop("name"): row for row in server.rows("three_networks.main")}
    one, killed, tensors = rows["one rank"], rows["killed"], rows["tensors"]
    assert [row["step"] for row in one["rows"]] == [1, 2, 3, 4, 5, 6]
    # Both networks learn: the critic's error falls, and the policy moves.
    assert one["rows"][-1]["loss/critic"] < 0.9 * one["rows"][0]["loss/critic"]
    assert len({row["loss"] for row in one["rows"]}) == 6
    others = rows.keys() - {"one rank", "killed", "tensors"}
    assert len(others) == 5
    for name in others:
        for row, expected in zip(rows[name]["rows"], one["rows"], strict=True):
            assert row == pytest.approx(expected, rel=BOUND, abs=BOUND), name
    assert killed["codes"] == [-9, -9] and killed["saved"] == [3]
    assert killed["rows"] == rows["fsdp"]["rows"] and tensors["different"] == []
    kinds = {"model.lm_head.weight", "critic.model.value_head.weight", "critic.optimizer.value_head.weight.exp_avg"}
    assert kinds <= set(tensors["all"]) and not any(name.startswith("reference") for name in tensors["all"])
