"""The short form of checkpoint_kills.py, which says how to start the long one."""


def test_kill_9_of_one_rank_or_all_loses_no_published_step_and_hangs_nobody(server):
    rounds = 8
    said = server.text("checkpoint_kills.main", "--rounds", str(rounds), "--seed", "5")
    assert f"{rounds} kills" in said and "nothing lost" in said
