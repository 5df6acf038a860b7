"""Programs of episodes on ranks, and after a kill in the middle of their conversations."""

from itertools import pairwise

import pytest


def test_a_kill_in_a_conversation_trains_each_sample_once_and_ranks_agree(server):
    one, two, dead, resumed, branches, stages = server.rows("episodes.main")
    assert -9 in dead["codes"] and dead["steps"] == [1, 2] and dead["rollouts"] == 2, "the third had begun"
    assert resumed["rollouts"] == 4 and resumed["group"] == two["group"]
    assert [number for groups in resumed["group"] for number in groups] == [n for n in range(16) for _ in range(2)]
    for key in ("tokens", "targets", "ends", "reward", "contents"):
        assert resumed[key] == two[key], key
    assert sum(some.count(-1) for some in two["targets"]) > sum(map(sum, two["prompt_lengths"])), "there are replies"
    assert len(two["contents"]) > 20
    assert one["tokens"][0] == two["tokens"][0]
    assert sum(one["reward"], []) == pytest.approx(sum(two["reward"], []), abs=1e-6)
    (ends,) = branches["ends"]
    assert stages["tokens"] == branches["tokens"] and stages["ends"] == [ends]
    long = [end - begin for begin, end in pairwise([0, *ends]) if end - begin > 48]
    assert len(long) > 8, "more rows than the episodes of a step"
    assert stages["norms"] == pytest.approx(branches["norms"], rel=1e-5)
