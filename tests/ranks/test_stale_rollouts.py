"""A run whose samples are drawn ahead of training loses no finished group when it is killed, and draws none twice."""

import numpy as np

from tests.ranks.stale_rollouts import GROUP, PROMPTS, STALENESS, STEPS


def test_kills_lose_no_finished_group(server):
    (found,) = server.rows("stale_rollouts.main", seconds=240)
    assert [-9 in codes for codes in found["codes"]] == [True, True, False]
    for moment in ("update", "rollout"):
        assert len(found["kept"][moment]) >= STALENESS * PROMPTS
        for number, (_, samples) in found["kept"][moment].items():
            of_run = found["used"][number]
            assert [tokens for tokens, _ in of_run] == [tokens for tokens, _ in samples], (moment, number)
            # The journal has FP32.
            for (_, ours), (_, theirs) in zip(of_run, samples, strict=True):
                np.testing.assert_array_equal(np.float32(ours), np.float32(theirs), err_msg=f"{moment} {number}")
    # At the temperature of the draws, of the server at each start.
    assert len(found["said"]) == 3 and max(found["said"]) < 1e-4
    # What was drawn before the first kill still waits at the second one, and was not drawn again.
    times = [{number: at for number, (at, _) in found["kept"][moment].items()} for moment in ("update", "rollout")]
    assert times[0] == times[1]
    assert all(len(samples) == GROUP for samples in found["used"].values())
    numbers = sorted([*map(int, found["used"]), *found["waiting"]])
    assert numbers == list(range(len(numbers))), "each prompt is used once"
    assert len(found["used"]) == PROMPTS * STEPS // 2
    assert min(found["ages"]) >= 0 and 0 < max(found["ages"]) <= 2 * STALENESS
    assert found["steps"][-1] == STEPS
