"""Programs of episodes on ranks, and after a kill in the middle of their conversations."""

import pytest


def test_a_kill_in_a_conversation_trains_each_sample_once_and_ranks_agree(server):
    one, two, dead, resumed = server.rows("episodes.main")
    assert -9 in dead["codes"] and dead["steps"] == [1, 2] and dead["rollouts"] == 2, "the third had begun"
    assert resumed["rollouts"] == 4 and resumed["groups"] == two["groups"]
    assert [number for groups in resumed["groups"] for number in groups] == [n for n in range(16) for _ in range(2)]
    for key in ("tokens", "lengths", "rewards", "contents"):
        assert resumed[key] == two[key], key
    assert any(any(some) for some in two["is_reply"]) and len(two["contents"]) > 20
    assert one["tokens"][0] == two["tokens"][0]
    assert sum(one["rewards"], []) == pytest.approx(sum(two["rewards"], []), abs=1e-6)
