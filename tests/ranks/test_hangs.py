"""A hung rank is found in time and named with its operation, every rank's stacks are kept, and the run ends."""

import json
import re
import socket

from glm46.engine.reliability.hang_report import find_culprits
from tests.processes import HANG_SECONDS
from tests.ranks.hangs import VICTIMS


def test_a_hung_rank_is_found_named_and_ended(server):
    (hampered,) = server.rows("hangs.main", "hampered")  # alone: it compares times of ranks
    names, said = ("cut off", *VICTIMS), {}
    for some in zip(names[::2], names[1::2], strict=True):  # these wait most of the time; more at once slow their steps
        started = {case: server.start("hangs.main", case) for case in some}
        said |= {case: (one.wait(), one.output.read_text()) for case, one in started.items()}
    assert [code for code, _ in said.values()] == [0] * len(said), said
    cut_off, *rows = (json.loads(text.splitlines()[-1]) for _, text in said.values())
    host = socket.gethostname()
    # The store's host does not answer while the ranks run: each ends on its own.
    # The one that ends first breaks the connection of the other, which ends by that error with the same code.
    assert cut_off["codes"] == [76, 76] and cut_off["seconds"] < HANG_SECONDS, cut_off
    for rank in range(2):
        assert f"rank {rank} on {host} has had no answer from the store" in cut_off["said"], cut_off
    check_saver(hampered)
    check_straggler(hampered)
    assert [row["hang"] for row in rows] == [*VICTIMS]
    for row in rows:
        victim, other = row["victim"], 1 - row["victim"]
        # The other rank kills one that cannot run.
        is_mute = row["hang"] in ("stopped", "blocked")
        assert row["codes"][other] == 76 and row["codes"][victim] == (-9 if is_mute else 76), row
        assert row["seconds"] < HANG_SECONDS, row  # without an end it waits until the program is killed
        # Found at the limit, which follows the steps of this run; a busy machine delays one look by a minute.
        assert row["found_seconds"] < max(5.0, 5 * row["slowest_step"]) + 60.0, row
        assert row["said"].count("error: no progress for") == 1, row
        doing, waiting = "training step", "training step"
        if row["hang"] == "no text":
            doing, waiting = "reading data", "agreeing on the step"
        if is_mute:
            assert f"rank {victim} on {host} does not answer" in row["said"], row
        else:
            assert f"rank {victim} on {host} is blocking the others: {doing}, step 30, in" in row["said"], row
        assert f"rank {other} on {host} waits: {waiting}, step 30, after gloo:" in row["said"], row
        assert {"hang.txt", f"stacks-rank{other}.txt", f"flight-rank{other}.json"} <= row["files"].keys(), row
        assert ("in next" if row["hang"] == "no text" else "in train_step") in row["stacks"], (
            row
        )  # the victim's own, even where its interpreter is blocked


def check_saver(row: dict) -> None:
    """An error in the writer thread of one rank: reported at the next step, and the next save works."""
    assert row["codes"] == [0, 0], row["said"]
    (told,) = (int(step) for step in re.findall(r"step (\d+): .*rank 1, saving step 20: SystemExit: 3", row["log"]))
    # The other thread learns it in its next exchange, for which steps do not wait, and training when it polls after a
    # step: before the next save.
    assert row["raised_in_step"] <= told < 40, row
    assert (row["saved"][0], row["saved"][-1]) == (40, 110)
    assert row["failed_saves"] == [0] * told + [1] * (110 - told)


def check_straggler(row: dict) -> None:
    """A rank that is slowed in every step from the sixtieth on is named within fifty steps. Before, a busy machine may
    slow one; that no rank is named of itself: tests/unit/engine/reliability/test_stragglers.py."""
    told, named = re.findall(r"step (\d+): rank (\d) is slow", row["log"])[-1]
    assert named == "0" and 60 < int(told) <= 110, row
    assert row["slowest"][-1][0] == 0 and row["slowest"][-1][1] > 1.5, row


def answer(frame: str = "torch/x.py:1 wait", **collectives: int) -> dict:
    return {"stack": [frame], "collectives": {name: [number, "op"] for name, number in collectives.items()}}


def test_the_rank_that_waits_for_no_other_is_the_culprit():
    # 1 has not come to the collective that 0 waits in, and waits itself for 3, in another group.
    waiting = {0: answer(a=7), 1: answer(a=6, b=4), 2: answer(c=1), 3: answer(b=3, c=1)}
    assert find_culprits(waiting, 4) == [3]
    assert find_culprits(waiting, 5) == [4]  # the one without an answer
    # Without a recorder: the rank that is not inside torch.
    assert find_culprits({0: answer(), 1: answer("glm46/storage/data/loader.py:9 read")}, 2) == [1]
