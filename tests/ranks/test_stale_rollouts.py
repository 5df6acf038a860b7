"""A run whose samples are generated ahead of training loses no finished group by a kill, and generates none twice."""

import numpy as np

from tests.ranks.stale_rollouts import GROUP, PROMPTS, STALENESS, STEPS


def test_kills_lose_no_finished_group(server):
    (found,) = server.rows("stale_rollouts.main")
    assert [-9 in codes for codes in found["codes"]] == [True, True, False]
    for moment in ("update", "rollout"):
        assert len(found["kept"][moment]) >= STALENESS * PROMPTS
        for number, (_, samples) in found["kept"][moment].items():
            of_run = found["used"][number]
            assert [tokens for tokens, _ in of_run] == [tokens for tokens, _ in samples], (moment, number)
            # The journal has FP32.
            for (_, ours), (_, theirs) in zip(of_run, samples, strict=True):
                np.testing.assert_array_equal(np.float32(ours), np.float32(theirs), err_msg=f"{moment} {number}")
    # At the temperature of the samples, of the server at each start.
    assert len(found["said"]) == 3 and max(found["said"]) < 1e-4
    # What was generated before the first kill still waits at the second one, and was not generated again.
    times = [{number: at for number, (at, _) in found["kept"][moment].items()} for moment in ("update", "rollout")]
    assert times[0] == times[1]
    assert all(len(samples) == GROUP for samples in found["used"].values())
    numbers = sorted([*map(int, found["used"]), *found["waiting"]])
    assert numbers == list(range(len(numbers))), "each prompt is used once"
    assert len(found["used"]) == PROMPTS * STEPS // 2
    assert min(found["ages"]) >= 0 and 0 < max(found["ages"]) <= 2 * STALENESS
    assert found["steps"][-1] == STEPS


def test_a_kill_in_a_rollout_loses_no_finished_group_and_changes_nothing(server):
    (found,) = server.rows("stale_rollouts.in_turn")
    whole, killed, resumed = (found[name] for name in ("whole 0", "killed 0", "killed 1"))
    assert sorted(whole["written"]) == list(range(3 * PROMPTS))
    assert whole["rollouts"] == [0, 2, 4] and not whole["finished"]
    assert -9 in killed["codes"] and len(killed["finished"]) == 2 and killed["rollouts"] == [0]
    assert set(killed["finished"]) < set(range(PROMPTS, 2 * PROMPTS))
    # Another server, deadline and end of the run generate the other two groups and those of later rollouts.
    assert sorted([*killed["finished"], *resumed["written"]]) == list(range(PROMPTS, 4 * PROMPTS))
    assert resumed["rollouts"] == [0, 2, 4, 6] and not resumed["finished"]
    assert len(whole["weights"]) > 20 and resumed["weights"] == whole["weights"]
