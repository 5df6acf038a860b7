"""Which hosts train after some were lost, and how many replicas fit on the hosts that are left."""

from argparse import Namespace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.engine.observe.start_times import StartTimes
from glm46.operate.launch import launch_hosts
from glm46.operate.launch.hostfile import Host
from glm46.operate.launch.launch_hosts import Places, fewer_replicas

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


@pytest.mark.parametrize(("answer", "code"), [({"is_stopped": True}, 75), ({"is_stopped": False}, 2)])
def test_storage_that_all_hosts_have_lost_ends_with_the_code_for_job_systems(answer, code, monkeypatch):
    """Another fault of all hosts is a mistake of the user. Spares would not help."""
    sent = []
    nodes = [Mock(host=host, answer=answer) for host in (A, B)]
    for node in nodes:
        node.name = node.host.name  # an argument of that name names the Mock
    of_all = SimpleNamespace(
        connect=lambda *arguments: sent.extend(arguments[-1]), faults=lambda is_restart: {"lost": nodes}, newest_step=40
    )
    monkeypatch.setattr(launch_hosts, "HostNodes", lambda *_, **__: of_all)
    arguments = Namespace(connect="ssh", max_restarts=3, config="run.toml", hostfile="hosts")
    starts = launch_hosts._Starts(arguments, (), None, Places([A, B], [C]), 1)
    with pytest.raises(UserError, match="a, b: lost") as raised:
        starts.start(1, StartTimes("the failure"))
    assert raised.value.exit_code == code
    assert [order["newest_step"] for order in sent] == [40, 40]  # what the hosts wait for


def test_a_start_that_finds_no_storage_forgets_no_checkpoint(tmp_path, monkeypatch):
    """The next one would find no checkpoint in the empty folder, not wait for it, and train from step 0."""
    state = tmp_path / "hosts.state"
    state.write_text("newest_step=120\nlost_hosts='b'\n")
    monkeypatch.setenv("GLM46_STATE", str(state))
    node = Mock(host=A, answer={"is_stopped": True})
    node.name = "a"
    of_all = SimpleNamespace(
        connect=lambda *_: None, faults=lambda is_restart: {"lost": [node]}, close=lambda: None, newest_step=0
    )
    monkeypatch.setattr(launch_hosts, "HostNodes", lambda *_, **__: of_all)
    (tmp_path / "hosts").write_text("a slots=1\n")
    arguments = Namespace(
        connect="ssh", max_restarts=3, config="run.toml", hostfile=tmp_path / "hosts", nproc=1, nodes=0
    )
    monkeypatch.setattr(launch_hosts, "check_config", lambda *_, **__: [])
    with pytest.raises(launch_hosts.StorageLost):
        launch_hosts.launch_hosts(arguments, (), lambda *_: None)
    assert state.read_text() == "newest_step=120\nlost_hosts=''\n"


@pytest.mark.parametrize(
    ("failures", "trains"),
    [
        ([("b", 4), ("b", 4)], "acde"),  # twice, without a checkpoint between
        ([("b", 4), ("b", 6)], "abcd"),
        ([("b", 4), ("c", 4), ("b", 4)], "abcd"),
        ([("b", 4), ("b", 4), ("d", 4)], "acde"),  # the place of b is not yet to blame
        ([("b", 4), ("b", 4), ("d", 4), ("d", 4)], "aceb"),  # the spares go round
    ],
)
def test_a_host_that_fails_first_in_two_fruitless_starts_is_exchanged(failures, trains, monkeypatch, capsys):
    nodes = Mock(**{"lost_hosts.return_value": [], "disconnected_hosts.return_value": []}, hung_ranks=set())
    monkeypatch.setattr(launch_hosts, "HostNodes", lambda *_, **__: nodes)
    places = Places([A, B, C, D], [E])
    starts = launch_hosts._Starts(Namespace(connect="ssh", max_restarts=9), (), None, places, 1)
    for name, newest in failures:
        nodes.newest_step = newest
        nodes.first_failed_host.return_value = {host.name: host for host in (A, B, C, D, E)}[name]
        starts._sort_out(places.training)
    assert {host.name for host in places.training} == set(trains)
    assert ("b changes its place with a spare host" in capsys.readouterr().err) is (trains != "abcd")
