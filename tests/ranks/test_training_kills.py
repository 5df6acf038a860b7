"""The short form of training_kills.py, which says how to start the long one."""

import pytest


@pytest.mark.parametrize("by", ["kill", "signal"])
def test_a_run_that_is_ended_again_and_again_computes_what_an_undisturbed_one_does(server, by):
    options = ("--kills", "2", "--steps", "18", "--seed", "2", "--by", by)
    said = server.text("training_kills.main", *options, seconds=400)
    assert "2 ends in" in said and "all equal to an undisturbed one" in said
