"""Which hosts train after some were lost, and how many replicas fit on the hosts that are left."""

import pytest

from glm46.commands.spares import Places, fewer_replicas
from glm46.config.check import check_config
from glm46.distributed.hostfile import Host

A, B, C, D, E = (Host(line, name) for line, name in enumerate("abcde", start=1))


def test_a_spare_takes_the_place_of_a_lost_host_and_the_others_keep_theirs():
    places = Places([A, B, C], [D, E])
    places.remove([B])
    assert (places.training, places.spares) == ([A, D, C], [E])
    places.remove([A, E])  # a spare can be lost too
    assert (places.training, places.spares) == ([D, C], [])


def test_a_suspect_is_exchanged_and_is_the_last_spare():
    places = Places([A, B], [C, D])
    assert places.exchange([B]) == [B]
    assert (places.training, places.spares) == ([A, C], [D, B])
    assert Places([A, B], []).exchange([B]) == []
    places.keep(1)
    assert (places.training, places.spares) == ([A], [C, D, B])


@pytest.mark.parametrize(
    ("least", "batch", "left", "expected"),
    [
        (1, 48, 6, (3, 6)),  # eight processes are four replicas
        (1, 48, 5, (2, 4)),
        (1, 32, 6, (2, 4)),  # three replicas of two shards with 4 rows do not divide 32
        (2, 48, 3, None),
        (0, 48, 6, None),  # not wanted
    ],
)
def test_the_most_replicas_that_fit(least, batch, left, expected, make_config):
    config = make_config(
        parallelism={"data_parallel_replicate_degree": 4},
        training={"local_batch_size": 4, "global_batch_size": batch},
        fault_tolerance={"min_replicas": least},
    )
    found = fewer_replicas(config, 8, left, lambda values, processes: accepts(config, values, processes))
    assert (found and (int(found[0]["parallelism.data_parallel_replicate_degree"]), found[1])) == expected


def accepts(config, values, processes) -> bool:
    layout = config.parallelism.model_copy(
        update={"data_parallel_replicate_degree": int(values["parallelism.data_parallel_replicate_degree"])}
    )
    changed = {"parallelism": layout, "fault_tolerance": config.fault_tolerance.model_copy(update={"min_replicas": 0})}
    return not check_config(config.model_copy(update=changed), world_size=processes)


def test_a_batch_that_follows_from_the_ranks_stays_as_it_was(make_config):
    config = make_config(
        parallelism={"data_parallel_replicate_degree": 2}, fault_tolerance={"min_replicas": 1}
    )  # two rows in each of four ranks
    values, processes = fewer_replicas(config, 4, 3, lambda *_: True)
    assert values["training.global_batch_size"] == "8" and processes == 2


def test_a_least_number_of_replicas_that_is_not_below_their_number_is_refused(make_config):
    config = make_config(parallelism={"data_parallel_replicate_degree": 2}, fault_tolerance={"min_replicas": 2})
    (fault,) = check_config(config, world_size=2)
    assert "fault_tolerance.min_replicas = 2" in fault and "at most 1" in fault
