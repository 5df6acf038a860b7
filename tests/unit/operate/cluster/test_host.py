"""Checks of one host: limits, names, ports, kernel log, network, on trees and values of the tests' own."""

import errno
import os
import resource
import socket
import threading
import time

import pytest

from glm46.config.errors import UserError
from glm46.operate.cluster import host, network
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, Subject, run_checks, run_program
from glm46.operate.estimate.machine import Gpu, Machine
from tests.processes import free_port

GIB = 2**30


def subject(root="/", **values) -> Subject:
    return Subject(**{"machine": Machine(2, 16 * GIB, 8 * GIB), "processes": 2, "root": root, **values})


def verdicts(results):
    return [(result.check, result.verdict) for result in results]


def test_limits_are_higher_on_a_host_with_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20_000, 20_000))
    gpus = Machine(2, 16 * GIB, 8 * GIB, (Gpu("NVIDIA H100", 80 * GIB),))

    def limits(**values) -> dict[str, str]:
        return dict(verdicts(host.process_limits(subject(tmp_path, **values))))

    assert limits() == {"open files": PASS, "user processes": PASS, "locked memory": SKIP}
    assert limits(machine=gpus)["open files"] == FAIL
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    assert limits()["locked memory"] == FAIL
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    assert limits()["user processes"] == FAIL


def test_memory_and_shared_memory_are_counted_by_rank(small_disk, tmp_path):
    mount, _ = small_disk
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "shm").symlink_to(mount)
    [found] = host.shared_memory(subject(tmp_path))
    assert found.verdict == FAIL and "128 MiB" in found.limit and "--shm-size" in found.remedy
    [found] = host.free_memory(subject(processes=9))
    assert found.verdict == FAIL and found.value.startswith("8.0 GiB")


def test_names_that_nobody_knows_or_that_mean_another_host(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    addresses = {"node1": ["127.0.1.1"], "node0": []}
    monkeypatch.setattr(host, "addresses_of", addresses.__getitem__)
    alone, several = subject(), subject(nodes=2, address="node0")
    assert verdicts(host.names(alone)) == [("own name", PASS)]
    found = list(host.names(several))
    assert [result.verdict for result in found] == [PASS, FAIL, FAIL]
    assert "127.0.1.1" in found[1].remedy and found[2].value == "node0: unknown"


def test_a_port_that_another_program_has_is_named():
    port = free_port()
    with socket.create_server(("", port)):
        ports = {"MASTER_PORT": port, "metrics.prometheus_port": port}
        found = list(host.ports(subject(ports=ports)))
        assert [result.verdict for result in found] == [FAIL, WARN] and str(port) in found[0].value
        assert list(host.ports(subject(ports=ports, node=1))) == []
    assert verdicts(host.ports(subject(ports={"MASTER_PORT": port}))) == [("ports", PASS)]
    with socket.create_server(("", port)):  # a restart may find it free
        several = {"MASTER_PORT": port, "MASTER_PORT + 1": port}
        assert [result.verdict for result in host.ports(subject(ports=several))] == [FAIL, WARN]


def test_a_port_of_a_restart_and_one_that_only_root_opens(monkeypatch):
    def refuse(number):
        def create(_):
            raise OSError(number, os.strerror(number))

        return create

    monkeypatch.setattr(socket, "create_server", refuse(errno.EADDRINUSE))
    [found] = host.ports(subject(ports={"MASTER_PORT + 3": 7003}))
    assert found.verdict == WARN and found.value == "7003: Address already in use"
    assert "set another MASTER_PORT on all hosts" in found.remedy and "ss -ltnp 'sport = :7003'" in found.remedy
    monkeypatch.setattr(socket, "create_server", refuse(errno.EACCES))
    [found] = host.ports(subject(ports={"metrics.prometheus_port": 80}))
    assert found.verdict == FAIL
    assert found.remedy == "only root opens it: set metrics.prometheus_port to 1024 or more on all hosts"


@pytest.mark.parametrize(("line", "verdict", "shown"), [
    ("NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.", FAIL, "Xid 79 x 1 on PCI:0000:19:00"),
    ("NVRM: Xid (PCI:0000:19:00): 94, pid=7, Contained: CE User Channel", WARN, "Xid 94"),
    ("Out of memory: Killed process 7 (python)", WARN, "out of memory x 1"),
    ("blk_update_request: critical medium error, dev nvme0n1, sector 9", WARN, "disk x 1"),
    ("mce: [Hardware Error]: Machine check events logged", WARN, "memory x 1"),
    ("EXT4-fs (vda): mounted filesystem", PASS, "no fault"),
    ("NVRM: Xid (PCI:0000:19:00): 42, pid=7, of no list", None, ""),
])  # fmt: skip
def test_faults_in_the_log_of_the_kernel(line, verdict, shown):
    found = list(host.kernel_faults(f"[    1.0] booted\n[   99.1] {line}\n"))
    assert [result.verdict for result in found] == ([verdict] if verdict else [])
    assert all(shown in result.value for result in found)


@pytest.mark.parametrize(("number", "action"), [(48, "RESET"), (54, "ISOLATE"), (79, "REBOOT"), (94, "MONITOR")])
def test_the_remedy_of_an_xid_error_is_an_action(number, action):
    [found] = host.kernel_faults(f"NVRM: Xid (PCI:0000:19:00): {number}, pid=1\n")
    assert found.remedy.split()[0] == action


@pytest.fixture
def ports(tmp_path):
    """Two InfiniBand ports that are up; a function that changes a file of the second."""
    for adapter in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "sys/class/infiniband" / adapter / "ports/1"
        (port / "counters").mkdir(parents=True)
        files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)",
                 "counters/link_downed": "3"}  # fmt: skip
        for name, text in files.items():
            (port / name).write_text(f"{text}\n")
    return tmp_path, lambda name, text: (port / name).write_text(text)


@pytest.mark.parametrize(("name", "text", "check", "shown"), [
    ("state", "1: DOWN", "InfiniBand", "mlx5_1/1 DOWN, LinkUp"),
    ("phys_state", "2: Polling", "InfiniBand", "mlx5_1/1 ACTIVE, Polling"),
    ("rate", "200 Gb/sec (4X HDR)", "InfiniBand rate", "mlx5_1/1 200 Gb/s"),
])  # fmt: skip
def test_a_bad_infiniband_port_is_named(ports, monkeypatch, name, text, check, shown):
    root, change = ports
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert {result.verdict for result in network.infiniband(subject(root))} == {PASS}
    change(name, text)
    assert [(r.check, r.value) for r in network.infiniband(subject(root)) if r.verdict == FAIL] == [(check, shown)]


def test_errors_of_a_port_that_rise_are_named_and_old_ones_are_not(ports, monkeypatch):
    root, change = ports
    monkeypatch.setattr(time, "sleep", lambda _: change("counters/link_downed", "5"))
    found = [result for result in network.infiniband(subject(root)) if result.verdict == FAIL]
    assert [(result.check, result.value) for result in found] == [("InfiniBand errors", "mlx5_1/1 link_downed + 2")]


@pytest.mark.parametrize(("variable", "value", "verdict"), [
    ("NCCL_SOCKET_IFNAME", "eth", PASS), ("NCCL_SOCKET_IFNAME", "=eth", FAIL), ("NCCL_SOCKET_IFNAME", "ib", FAIL),
    ("NCCL_SOCKET_IFNAME", "^lo", PASS), ("GLOO_SOCKET_IFNAME", "eth", FAIL), ("GLOO_SOCKET_IFNAME", "eth0", PASS),
    ("GLOO_SOCKET_IFNAME", "eth1", FAIL),
])  # fmt: skip
def test_an_interface_that_is_missing_or_down(tmp_path, variable, value, verdict):
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("eth1", "down")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text(state)
    assert verdicts(network.interfaces(subject(tmp_path, variables={variable: value}))) == [(variable, verdict)]


def test_variables_of_nccl_that_harm():
    good = {"NCCL_DEBUG": "warn", "NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_TIMEOUT": "22"}
    assert verdicts(network.nccl_variables(subject(variables=good))) == [("NCCL variables", PASS)]
    found = list(network.nccl_variables(subject(variables={"NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO"})))
    assert [(result.value, result.verdict) for result in found] == [("NCCL_ALGO=Tree", FAIL), ("NCCL_DEBUG=INFO", WARN)]


@pytest.mark.slow
def test_what_checks_raise_and_what_does_not_answer_are_results(capfd):
    def broken(_):
        raise UserError("key = 1: wrong", "other = 2: wrong")

    def unreadable(_):
        yield from ()
        raise OSError(5, "Input/output error")

    def unfinished(_):
        raise NotImplementedError("no uneven shards")

    answers = threading.Event()
    checks = {"a": broken, "b": unreadable, "c": lambda _: [answers.wait(600)], "d": host.free_memory, "e": unfinished}
    checks["f"] = lambda _: [{}["key"]]
    began = time.monotonic()
    found = run_checks(subject(), checks, 5.0)
    assert time.monotonic() - began < 60
    answers.set()
    assert [result.check for result in found] == ["a", "a", "b", "c", "host memory", "e", "f"]
    assert [result.check for result in found if result.verdict != FAIL] == ["host memory"]
    assert "Input/output error" in found[2].value and "no answer within" in found[3].value
    assert found[5].value.startswith("NotImplementedError: no uneven shards (test_host.py, line ")
    assert found[6].value.startswith("KeyError: 'key' (test_host.py, line ") and "report it" in found[6].remedy
    assert capfd.readouterr().err == ""  # no traceback


def test_a_program_that_is_not_there_or_hangs():
    assert run_program(["no-such-program-of-glm46"], 1) is None
    with pytest.raises(TimeoutError, match="sleep"):
        run_program(["sleep", "600"], 0.1)
    assert run_program(["false"], 60).returncode == 1
