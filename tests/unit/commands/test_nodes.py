"""Nodes from the variables of torchrun, Slurm and PBS; refusals name the variable."""

import pytest

from glm46.commands.nodes import Nodes, detect_nodes, first_slurm_host
from glm46.config.errors import UserError

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
    ],
)
def test_invalid_variables_are_refused(variables, message):
    with pytest.raises(UserError) as caught:
        detect_nodes(variables, "here")
    assert message in str(caught.value)
