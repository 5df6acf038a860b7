"""Nodes from the variables of torchrun, Kubeflow, SkyPilot, Slurm and PBS; refusals name the variable.

Nodes wait for the first one and report it; a port that cannot be used is refused with its variable.
"""

import socket
import threading

import pytest

from glm46.config.errors import UserError
from glm46.operate.launch import rendezvous
from glm46.operate.launch.nodes import Nodes, detect_nodes, first_slurm_host, refuse_node
from tests.processes import HANG_SECONDS, free_port

KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}
PODS = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}  # fmt: skip
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
SLURM = {"SLURM_JOB_NODELIST": "gpu[007-012,20],login1", "SLURM_JOB_NUM_NODES": "7", "SLURM_NODEID": "3"}


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, Nodes()),
        ({"NNODES": "1"}, Nodes()),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, Nodes(2, 1, "a")),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "7"}, Nodes(2, 0, "a", 7)),
        (SLURM | {"SLURM_JOB_ID": "42"}, Nodes(7, 3, "gpu007", job="42")),
        (SLURM | {"MASTER_ADDR": "10.0.0.1"}, Nodes(7, 3, "10.0.0.1")),
        (SLURM | {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, Nodes(2, 1, "a")),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}, Nodes()),
        (KUBEFLOW, Nodes(4, 2, "job-node-0-0.job", 29400)),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "8"}, Nodes(4, 2, "job-node-0-0.job", 29400, processes=8)),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, Nodes(4, 2, "job-node-0-0.job", 29400)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, Nodes(processes=4)),
        (PODS, Nodes(4, 2, "job-master-0", 23456)),
        (PODS | KUBEFLOW | {"WORLD_SIZE": "32"}, Nodes(4, 2, "job-master-0", 23456)),  # later versions count ranks
        (
            {name: value for name, value in PODS.items() if name != "KUBERNETES_SERVICE_HOST"},
            Nodes(),
        ),  # ranks of torchrun
        (KUBEFLOW | {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, Nodes(2, 1, "a")),
        (SKYPILOT, Nodes(2, 1, "10.0.0.4")),
        (
            SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-7", "MASTER_PORT": "7"},
            Nodes(2, 1, "10.0.0.4", 7, "sky-7", 8),
        ),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, Nodes(2, 1, "10.0.0.4")),
        # A job system inside another one, of the same opinion.
        (SKYPILOT | SLURM | {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1"}, Nodes(2, 1, "10.0.0.4")),
        ({"SLURM_JOB_NODELIST": "gpu[1-4]"}, Nodes()),  # the batch script itself, outside srun
    ],
)
def test_variables_name_the_nodes(variables, nodes):
    assert detect_nodes(variables, "here") == nodes


@pytest.mark.parametrize(
    ("text", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-3]", "n1"), ("n[01,07-09]", "n01"), ("a-b.c[3-4]-ib,x", "a-b.c3-ib")],
)
def test_first_host_of_a_slurm_list(text, host):
    assert first_slurm_host(text) == host


def test_pbs_lists_a_host_once_for_each_process(tmp_path):
    file = tmp_path / "nodes"
    file.write_bytes(b"n1.site\r\nn1.site\nn2.site\nn2.site\n")
    assert detect_nodes({"PBS_NODEFILE": str(file), "PBS_JOBID": "9"}, "n2") == Nodes(2, 1, "n1.site", job="9")
    with pytest.raises(UserError, match="'n3', is not in PBS_NODEFILE"):
        detect_nodes({"PBS_NODEFILE": str(file)}, "n3")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES = 'two': expected a number"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "node 2 of 2"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "without MASTER_ADDR"),
        (SLURM | {"SLURM_JOB_NODELIST": "$(reboot)"}, "'$(reboot)': cannot be parsed; set MASTER_ADDR, NNODES"),
        (SLURM | {"MASTER_PORT": "x"}, "MASTER_PORT = 'x'"),
        (SLURM | {"MASTER_PORT": "99999"}, "MASTER_PORT = 99999: must be between 1 and 65535"),
        (SLURM | {"MASTER_PORT": "0"}, "MASTER_PORT = 0"),
        ({"PBS_NODEFILE": "nowhere/at/all"}, "No such file"),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, "PET_NNODES = '1:4'"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK = None"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "without MASTER_ADDR; set it"),
        (
            SKYPILOT | {"SKYPILOT_NUM_NODES": "3"},
            "SKYPILOT_NUM_NODES = 3, and SKYPILOT_NODE_IPS has 2 addresses; set NNODES",
        ),
        ({"SKYPILOT_NODE_IPS": "10.0.0.4"}, "SKYPILOT_NODE_RANK = None"),
        (KUBEFLOW | SLURM, "PET_NNODES says node 2 of 4, SLURM_NODEID says node 3 of 7: set NNODES, NODE_RANK"),
        (SKYPILOT | KUBEFLOW, "SKYPILOT_NODE_IPS says node 1 of 2: set NNODES"),
    ],
)
def test_invalid_variables_are_refused(variables, message):
    with pytest.raises(UserError) as caught:
        detect_nodes(variables, "here")
    assert message in str(caught.value)


def test_a_node_with_enough_gpus_and_a_known_first_host_is_accepted():
    assert refuse_node(Nodes(2, 0, "localhost"), 8, 8) is None and refuse_node(Nodes(2, 0, "localhost"), 8, 0) is None


def test_a_node_refuses_missing_gpus_and_an_unknown_first_host():
    with pytest.raises(UserError) as caught:
        refuse_node(Nodes(2, 1, "no-such-node.invalid"), 8, 4)
    slots, name = caught.value.faults
    assert slots == "slots=8, and 4 GPUs can be used there; write slots=4"
    assert "'no-such-node.invalid', is not known there" in name and "set MASTER_ADDR" in name


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
