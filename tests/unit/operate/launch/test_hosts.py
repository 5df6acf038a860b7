"""The ssh clients of a hostfile's nodes, with a small program in place of the launcher; real ones: tests/ranks."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm46.config.errors import UserError
from glm46.engine.observe.start_times import StartTimes
from glm46.operate.launch import hosts, node_client
from glm46.operate.launch.host_group import module_command, places
from glm46.operate.launch.hostfile import Host
from glm46.operate.launch.hosts import HostNodes, describe_nodes
from tests.fake_ssh import UNREACHABLE, write_ssh
from tests.processes import HANG_SECONDS, wait_until
from tests.ranks.interrupts import MARK, left_behind

ROOT = Path(__file__).parents[4]
TIMES = StartTimes("the command")
GOOD = {"versions": "glm46 1, torch 2", "config": "a", "processes": 1, "faults": []}
# With the real ends of the connection: `Driver`, and the signals of a launcher that has no ranks.
NODE = """
import signal, subprocess, sys, time
from types import SimpleNamespace
from glm46.operate.launch.node_client import Driver
from glm46.operate.launch.torchrun import LauncherSignals
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
driver = Driver(SimpleNamespace(number=None) if {deaf} else LauncherSignals())
codes = {codes}
while codes and (order := driver.next_order()):
    if driver.answer(**{answer}) is not None:
        print("works", *order.values(), flush=True)
        time.sleep({seconds})
        ranks = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range({ranks} if codes[0] else 0)]
        for rank in ranks:
            rank.wait()
        print("is done")
        driver.report(code=codes.pop(0), **{end})
driver.next_order()
"""


def node(
    *codes: int, seconds: float = 0.0, ranks: int = 0, deaf: bool = False, end: dict | None = None, **answer
) -> str:
    """The command of a node that answers, works for a time, and reports an exit code; again for each further code.

    Args:
        ranks: processes that work without end after the time, in a start whose code is not 0.
    """
    parts = {"codes": list(codes or [0]), "seconds": seconds, "ranks": ranks, "deaf": deaf, "end": end or {}}
    text = NODE.format(answer={**GOOD, **answer}, **parts)
    return f"PYTHONPATH={ROOT} exec {sys.executable} -c {shlex.quote(text)}"


def shown(nodes: HostNodes) -> list[str]:
    return [f"{describe_nodes(names)}: {fault}" for fault, names in nodes.faults().items()]


def answers(nodes: HostNodes, count: int) -> None:
    """Wait until so many nodes have answered."""
    while sum(one.has_answered for one in nodes._nodes) < count:
        one, event = nodes._events.get(timeout=HANG_SECONDS)
        one.take(event) or one.held.append(event)


def when_told_to_train(nodes: HostNodes, act: Callable[[], object]) -> None:
    """Call a function once the nodes have their order; before, a signal would end this process."""
    send = nodes._send

    def send_then_act(**message) -> None:
        send(**message)
        if "go" in message:
            act()

    nodes._send = send_then_act


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A function that starts nodes with these commands; a test fails if a process of one is left behind."""
    mark = tmp_path.name
    monkeypatch.setenv("PATH", f"{write_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")

    @contextmanager
    def start(*commands: str, names=("a", "b", "c"), restarts=False, training=99):
        hosts = [Host(i + 1, name) for i, name in enumerate(names[: len(commands)])]
        programs = "".join(
            f"*@{host.name}|{host.name}) {command};;" for host, command in zip(hosts, commands, strict=True)
        )
        nodes = HostNodes(restarts=restarts)
        nodes.hosts, nodes.command = hosts, f'export {MARK}={mark}; case "$FAKE_SSH_HOST" in {programs} esac'
        try:
            trains = hosts[:training]
            nodes.connect(trains, hosts[training:], nodes.command, [{"number": 0}] * len(trains))
            yield nodes
        finally:
            nodes.close()
            wait_until(lambda: not left_behind(mark), "a process was left behind")

    return start


@pytest.mark.slow
def test_every_fault_is_named_once_before_any_node_starts(cluster, capsys):
    old = {"versions": "glm46 1, torch 1"}
    names = ["a", UNREACHABLE, "c", "d", "e", "f", "g", "h"]
    commands = [node(faults=["no space"]), node(), "cd /nowhere && exec true", *[node(**old, faults=["no space"])] * 5]
    with cluster(*commands, names=names) as nodes:
        faults = shown(nodes)
    assert len(faults) == 4
    assert faults[0] == "a, d, e, f and 2 other nodes: no space"
    assert faults[1].startswith(
        f"{UNREACHABLE}: cannot be reached: ssh: connect to host {UNREACHABLE} port 22: No route"
    )
    assert f"`ssh -o BatchMode=yes {UNREACHABLE} true` must succeed" in faults[1]
    assert faults[2].startswith("c: the launcher cannot run there, exit code ") and "/nowhere" in faults[2]
    assert str(Path.cwd()) in faults[2] and sys.executable in faults[2]
    assert faults[3].startswith(
        "d, e, f, g and 1 other node: has glm46 1, torch 1, and a has glm46 1, torch 2; install"
    )
    assert "works" not in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "words"), [
    ({"config": "b"}, "b: its config file differs from that of a"),
    ({"processes": 4}, "b: would start 4 processes, and a 1; state slots=N"),
])  # fmt: skip
def test_nodes_that_differ_are_refused(answer, words, cluster):
    with cluster(node(), node(**answer)) as nodes:
        (fault,) = shown(nodes)
    assert fault.startswith(words)


def test_a_node_that_does_not_answer_is_named(cluster, monkeypatch):
    monkeypatch.setattr(node_client, "ANSWER_SECONDS", 10.0)
    with cluster(node(), "echo hello; cat >/dev/null") as nodes:  # ends with its input
        answers(nodes, 1)
        monkeypatch.setattr(hosts, "ANSWER_SECONDS", 0.0)
        assert shown(nodes) == ["b: no answer within 10 s; see what `ssh -o BatchMode=yes b true` does"]


@pytest.mark.slow
def test_output_has_the_name_of_its_node_and_good_ends_are_waited_for(cluster, capfd):
    with cluster(node(), node(seconds=0.5)) as nodes:
        assert nodes.faults() == {}
        assert nodes.run(TIMES) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"{name}: {said}" for name in "ab" for said in ("Welcome!", "works 0", "is done"))


def test_an_answer_inside_a_line_of_a_rank_hides_no_text(cluster, capfd):
    command = node().replace("driver.report(", 'print("step 7: los", end=""); driver.report(')
    with cluster(command) as nodes:
        assert nodes.faults() == {}
        assert nodes.run(TIMES) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "a: step 7: los"


@pytest.mark.slow
def test_the_first_failure_is_the_exit_code_and_ends_all(cluster, monkeypatch, capfd):
    """One node ends at SIGTERM, the other one ignores it and is killed."""
    monkeypatch.setattr(hosts, "_FOLLOW_SECONDS", 4.0)
    with cluster(node(seconds=1000), node(7), node(seconds=1000, deaf=True)) as nodes:
        assert nodes.faults() == {}
        assert nodes.run(TIMES) == 7
    said = capfd.readouterr()
    assert said.err == "error: b: ended with exit code 7; all nodes are stopped\n"
    assert "a: stopped by SIGTERM" in said.out and "c: killed: the other nodes have ended" in said.out


@pytest.mark.slow
def test_a_stopped_node_does_not_hide_a_failure(cluster):
    with cluster(node(75), node(1, seconds=1.0)) as nodes:
        assert (nodes.faults(), nodes.run(TIMES)) == ({}, 1)
    with cluster(node(75), node(0, seconds=0.5)) as nodes:
        assert (nodes.faults(), nodes.run(TIMES)) == ({}, 75)


@pytest.mark.slow
def test_a_lost_connection_ends_all_nodes_on_both_sides(cluster, monkeypatch, capfd):
    monkeypatch.setattr(hosts, "_FOLLOW_SECONDS", 0.5)
    with cluster(node(seconds=1000), node(seconds=1000)) as nodes:
        assert nodes.faults() == {}
        when_told_to_train(nodes, nodes._nodes[1].disconnect)
        assert nodes.run(TIMES) == 1
    assert "error: b: the connection was lost; all nodes are stopped" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("code", [128 + signal.SIGKILL, 253])
def test_a_launcher_that_is_killed_on_its_node_is_a_lost_connection(code, cluster, monkeypatch, capfd):
    """srun ends with the first code after a signal, with the second one if memory ran out; ssh ends with 255."""
    monkeypatch.setattr(hosts, "_FOLLOW_SECONDS", 0.5)
    killed = node().replace("driver.report(", f"import os; os._exit({code}); driver.report(")
    with cluster(killed, node(seconds=1000)) as nodes:
        assert nodes.faults() == {}
        assert nodes.run(TIMES) == 1
        assert [host.name for host in nodes.disconnected_hosts()] == ["a"]
    assert "error: a: the connection was lost; all nodes are stopped" in capfd.readouterr().err


def test_messages_of_two_threads_never_share_a_line():
    """Unbuffered, as srun passes PYTHONUNBUFFERED on: answers come from one thread and reports from another."""
    program = """
import threading
from types import SimpleNamespace
from glm46.operate.launch.node_client import Driver
driver = Driver(SimpleNamespace(number=None))
work = lambda: [driver.report(is_alive=True) for _ in range(2000)]
threads = [threading.Thread(target=work) for _ in range(2)]
for step in ("start", "join"):
    for thread in threads:
        getattr(thread, step)()
"""
    done = subprocess.run(
        [sys.executable, "-uc", program], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ['glm46-node: {"is_alive": true}'] * 4000, done.stderr


@pytest.mark.slow
def test_after_a_failure_a_silent_node_is_lost_and_the_others_are_ended_soon(cluster, monkeypatch, capfd):
    """One node has answered before training and never again, as after a cut of its network."""
    monkeypatch.setattr(hosts, "_RESTART_SECONDS", 4.0)
    line = "glm46-node: " + json.dumps({**GOOD, "newest_step": 8})
    silent = f"echo {shlex.quote(line)}; exec cat >/dev/null"  # ends with its input
    failed = node(76, seconds=0.3, end={"newest_step": 12, "hung_ranks": [1], "failed_at": 5.0})
    with cluster(failed, silent, node(seconds=1000, deaf=True), restarts=True) as nodes:
        assert nodes.faults() == {}
        assert nodes.run(TIMES) == 76
        assert [host.name for host in nodes.lost_hosts()] == ["b"] and nodes.disconnected_hosts() == []
        assert (nodes.newest_step, nodes.hung_ranks, nodes.failed_at) == (12, {1}, 5.0)
    assert "c: killed: the other nodes have ended" in capfd.readouterr().out


@pytest.mark.slow
def test_a_node_that_was_silent_before_a_failure_is_lost_at_once(cluster, monkeypatch):
    """As after a cut of its network: other ranks miss its ranks later than the driver misses its launcher."""
    monkeypatch.setattr(hosts, "_RESTART_SECONDS", 100.0)
    monkeypatch.setattr(hosts, "_SILENT_SECONDS", 1000.0)
    monkeypatch.setattr(hosts, "_ASK_SECONDS", 0.2)
    silent = f"echo {shlex.quote('glm46-node: ' + json.dumps(GOOD))}; exec cat >/dev/null"  # ends with its input
    with cluster(node(76, seconds=2.0), silent, restarts=True) as nodes:
        assert nodes.faults() == {}
        found, client = [], nodes._nodes[1]
        ask, disconnect = client.ask, client.disconnect

        def ask_long_ago() -> None:
            ask()
            client.asked_at = time.monotonic() - 200.0

        client.ask = ask_long_ago
        client.disconnect = lambda *left: (found.append((nodes.failed_at, time.time())), disconnect(*left))
        assert nodes.run(TIMES) == 76
        assert [host.name for host in nodes.lost_hosts()] == ["b"]
        # Not before the failure, without which it does not matter; and not an answer's time after it.
        failed_at, lost_at = found[0]
        assert failed_at is not None and lost_at - failed_at < 60.0


@pytest.mark.slow
def test_a_silent_node_is_lost_without_the_failure_of_another_one(cluster, monkeypatch, capfd):
    """As after a cut of its network within a long step. The ranks of the others are killed soon."""
    monkeypatch.setattr(hosts, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "_SILENT_SECONDS", 5.0)
    silent = f"echo {shlex.quote('glm46-node: ' + json.dumps(GOOD))}; exec cat >/dev/null"  # ends with its input
    programs = node(1, ranks=1), silent, node(1, ranks=1)
    with cluster(*programs, restarts=True) as nodes:
        assert nodes.faults() == {}
        began = time.monotonic()
        assert nodes.run(TIMES) == 1
        assert 5.0 < time.monotonic() - began < HANG_SECONDS
        assert [host.name for host in nodes.lost_hosts()] == ["b"] and nodes.disconnected_hosts() == []
        assert all(client.is_connected for client in nodes._clients.values() if client.name != "b")
    assert capfd.readouterr().err == "error: b: no answer for 5 s; all nodes are stopped\n"


def test_a_launcher_that_is_suspended_for_seconds_is_not_lost(cluster, monkeypatch):
    """Its answer comes late, and none is owed then."""
    monkeypatch.setattr(hosts, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "_SILENT_SECONDS", HANG_SECONDS)
    with cluster(node(seconds=1000), node(seconds=1000), restarts=True) as nodes:
        assert nodes.faults() == {}
        client, found = nodes._nodes[1], []

        def pause() -> None:
            os.killpg(client._client.pid, signal.SIGSTOP)
            asked = wait_until(lambda: client.asked_at)
            os.killpg(client._client.pid, signal.SIGCONT)
            found.append(wait_until(lambda: client.asked_at != asked))
            os.kill(os.getpid(), signal.SIGTERM)

        when_told_to_train(nodes, threading.Thread(target=pause).start)
        assert (nodes.run(TIMES), nodes.lost_hosts(), found) == (75, [], [True])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("silent", "paused", "lost"),
    [(1, 0.0, ["a"]), (2, 0.0, ["a", "b"]), (3, 0.0, []), (1, 60.0, [])],
    ids=["one", "half", "most", "after a pause of the driver"],
)
def test_silent_nodes_are_lost_unless_the_fault_is_here(cluster, silent, paused, lost):
    with cluster(*[node()] * 4, names="abcd", restarts=True) as nodes:
        assert nodes.faults() == {}
        now = time.monotonic()
        nodes._asked_at, nodes._looked_at = now, now - paused
        for client in nodes._nodes[:silent]:
            client.asked_at = now - paused - hosts._SILENT_SECONDS + (1.0 if paused else -1.0)
        nodes._ask()
        assert [host.name for host in nodes.lost_hosts()] == lost


@pytest.mark.slow
def test_the_first_failed_host_is_known_by_time_and_not_by_the_order_of_reports(cluster, monkeypatch):
    monkeypatch.setattr(hosts, "_RESTART_SECONDS", 100.0)
    times = {"a": 7.0, "b": 5.0, "c": None}
    programs = [node(1, seconds=i * 0.3, end={"failed_at": at}) for i, at in enumerate(times.values())]
    with cluster(*programs, restarts=True) as nodes:
        assert (nodes.faults(), nodes.run(TIMES)) == ({}, 1)
        assert nodes.first_failed_host().name == "b"


@pytest.mark.slow
def test_launchers_live_through_failures_and_a_spare_takes_a_place(cluster, monkeypatch, capfd):
    """The ranks of a node are killed after the failure of another one, and its launcher takes the next order."""
    monkeypatch.setattr(hosts, "_RESTART_SECONDS", 4.0)
    programs = node(1), node(1, 0, ranks=1), node(0)
    with cluster(*programs, restarts=True, training=2) as nodes:
        assert (nodes.faults(), nodes.run(TIMES)) == ({}, 1)
        assert nodes.lost_hosts() == nodes.disconnected_hosts() == []
        _, second, spare = nodes.hosts
        nodes.connect([second, spare], [], nodes.command, [{"number": 1}, {"number": 2}])
        assert nodes.faults(is_restart=True) == {}
        assert nodes.run(TIMES) == 0
    said = {name: [] for name in "abc"}
    for name, _, text in (line.partition(": ") for line in capfd.readouterr().out.splitlines()):
        said[name].append(text)
    assert said == {
        "a": ["Welcome!", "works 0", "is done"],
        "b": ["Welcome!", "works 0", "is done", "works 1", "is done"],
        "c": ["Welcome!", "works 2", "is done"],
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_the_launchers(number, cluster, capfd):
    with cluster(node(seconds=1000), node(seconds=1000)) as nodes:
        assert nodes.faults() == {}
        when_told_to_train(nodes, lambda: os.kill(os.getpid(), number))
        assert nodes.run(TIMES) == (130 if number == signal.SIGINT else 75)
    said = capfd.readouterr().out
    assert all(f"{name}: stopped by {number.name} before training began" in said for name in "ab")


@pytest.mark.slow
def test_nodes_that_do_not_end_after_a_signal_are_killed(cluster, monkeypatch):
    monkeypatch.setattr(hosts, "_FOLLOW_SECONDS", 0.5)
    monkeypatch.setattr(hosts, "SAVE_SECONDS", 0.5)
    with cluster(node(seconds=1000, deaf=True)) as nodes:
        assert nodes.faults() == {}
        when_told_to_train(nodes, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert nodes.run(TIMES) == 128 + signal.SIGKILL


def test_a_closed_output_stops_all_nodes(cluster, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(hosts, "print", closed, raising=False)
    monkeypatch.setattr(hosts, "os", SimpleNamespace(**vars(os) | {"dup2": lambda *_: None}))
    with cluster(node(seconds=1000), node(seconds=1000)) as nodes:
        assert nodes.faults() == {}
        assert nodes.run(TIMES) == 141


def test_a_missing_ssh_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh is not on PATH; install the OpenSSH client"):
        HostNodes().connect([Host(1, "a")], [], "true", [{}])
    with pytest.raises(UserError, match="srun is not on PATH; start it in an allocation of Slurm"):
        HostNodes("srun").connect([Host(1, "a")], [], "true", [{}])


def test_commands_of_hosts_carry_their_places_and_quote_everything(tmp_path, monkeypatch):
    folder = tmp_path / "my runs; $(id)"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = module_command({"NCCL_DEBUG": "x y"}, ["launch", "--config", "it's.toml", "--from-hostfile"])
    place, _, words = command.partition(" && exec ")
    assert shlex.split(place) == ["cd", str(folder)]
    program = [sys.executable, "-m", "glm46", "launch", "--config", "it's.toml", "--from-hostfile"]
    assert shlex.split(words) == ["env", "NCCL_DEBUG=x y", *program]
    hosts = [Host(1, "a"), Host(2, "b", "root", 8)]
    assert places(hosts, {}) == [{"MASTER_ADDR": "a", "NNODES": "2", "NODE_RANK": str(rank)} for rank in range(2)]
    assert places(hosts, {"MASTER_ADDR": "ib0"})[1]["MASTER_ADDR"] == "ib0"
