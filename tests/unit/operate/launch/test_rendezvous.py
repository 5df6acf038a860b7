"""Nodes wait for the first one and report it; a port that cannot be used is refused with its variable."""

import socket
import threading

import pytest

from glm46.config.errors import UserError
from glm46.operate.launch import rendezvous
from glm46.operate.launch.nodes import Nodes
from tests.processes import HANG_SECONDS, free_port


def test_a_port_in_use_is_refused_on_the_first_node_only():
    port = free_port()
    with socket.create_server(("localhost", port)):
        with pytest.raises(UserError, match=f"MASTER_PORT = {port}: .*in use.*another port"):
            rendezvous.require_free_port(Nodes(2, 0, "localhost", port), 0)
        with pytest.raises(UserError, match=f"port {port} of this node"):  # of the second start
            rendezvous.require_free_port(Nodes(2, 0, "localhost", port - 1), 1)
        rendezvous.require_free_port(Nodes(2, 1, "localhost", port), 0)
        rendezvous.require_free_port(Nodes(1, 0, "localhost", port), 0)
    rendezvous.require_free_port(Nodes(2, 0, "localhost", port), 0)


@pytest.mark.parametrize(("port", "restarts", "exporter", "words"), [
    (65500, 100, None, r"MASTER_PORT = 65500 with --max-restarts 100: .*at most 65435"),
    (29500, 0, 29500, r"metrics.prometheus_port = 29500: .*29500 to 29500"),
    (29500, 100, 29600, r"metrics.prometheus_port = 29600: .*29500 to 29600 .*outside"), (29500, 100, 29601, None),
    (29500, 100, 9400, None),
])  # fmt: skip
def test_ports_of_ranks_are_no_port_of_the_exporter(port, restarts, exporter, words):
    """The exporter of the first rank would find the port taken."""
    if words is None:
        rendezvous.refuse_ports(Nodes(2, 1, "a", port), restarts, exporter)
        return
    with pytest.raises(UserError, match=words):
        rendezvous.refuse_ports(Nodes(2, 1, "a", port), restarts, exporter)


def test_a_node_waits_until_the_first_listens_and_reports_it(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.01)
    port, said, told = free_port(), [], threading.Event()

    def report(line):
        said.append(line)
        if len(said) == 3:
            told.set()

    waiting = threading.Thread(
        target=rendezvous.wait_for_first, args=(Nodes(2, 1, "localhost", port), 0, report), daemon=True
    )
    waiting.start()
    assert told.wait(HANG_SECONDS)
    with socket.create_server(("localhost", port)):
        waiting.join(HANG_SECONDS)
        assert not waiting.is_alive()
    assert all(f"node 1 waits for the first node at localhost:{port}" in line for line in said)
    assert "refused" in said[0]


def test_a_node_that_waits_too_long_names_address_and_fault(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PREPARE_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"MASTER_ADDR = 'no-such-node\.invalid': .*start it"):
        rendezvous.wait_for_first(Nodes(2, 1, "no-such-node.invalid", 29500), 0, print)


def test_the_first_node_reports_missing_nodes_until_they_join(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.01)
    said, told, met = [], threading.Event(), threading.Event()

    def report(line):
        said.append(line)
        told.set()

    with rendezvous.reporting_missing_nodes(Nodes(3, 0, "a"), met.is_set, report):
        assert told.wait(HANG_SECONDS)
        met.set()
    assert "all 3 nodes are at a" in said[0]
