"""``preflight --hostfile``: the hosts that ssh reaches are the nodes of one preflight; the others are results."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm46.compute.distributed.environment import variables_that_begin
from glm46.compute.distributed.hostfile import Host
from glm46.operate.cluster.results import FAIL, HostReport, Result
from glm46.operate.launch.host_group import HostGroup, allow_files_for_clients
from glm46.operate.launch.hosts import PASSED_VARIABLES

_PROBE_SECONDS = 20.0
"""For ssh to run `true` on all hosts at once."""
_PREFLIGHT_SECONDS = {False: 240.0, True: 1800.0}
"""For a whole preflight: quick, full. Its own checks end earlier; this is for hosts that are cut off."""


def reach(hosts: Sequence[Host]) -> tuple[list[Host], list[HostReport]]:
    """The hosts that ssh reaches, and a report for each of the others.

    Raises:
        UserError: ssh is not installed.
    """
    allow_files_for_clients()
    group = HostGroup()
    answers = group.run(hosts, ["true"] * len(hosts), _PROBE_SECONDS, at_once=len(hosts))
    reached, lost = [], []
    for host, answer in zip(hosts, answers, strict=True):
        if answer.code == 0:
            reached.append(host)
            continue
        remedy = f"`{group.test(host)}` must succeed; or take the host out of the hostfile"
        lost.append(HostReport(host.name, [Result("ssh", FAIL, answer.reason(), f"{_PROBE_SECONDS:.0f} s", remedy)]))
    return reached, lost


def run_nodes(hosts: Sequence[Host], options: Sequence[str], *, is_full: bool) -> tuple[str | None, str]:
    """Run ``preflight`` with these options on all hosts, as the nodes of one.

    Returns:
        The line of JSON that the first host prints, None if it prints none; and its output.
    """
    own = variables_that_begin(*PASSED_VARIABLES)
    commands = [_command(hosts, rank, own, options) for rank in range(len(hosts))]
    first = HostGroup().run(hosts, commands, _PREFLIGHT_SECONDS[is_full], at_once=len(hosts))[0]
    output = first.output + first.errors
    lines = [line for line in output.splitlines() if line.startswith('{"preflight"')]
    return (lines[-1] if lines else None), output


def _command(hosts: Sequence[Host], rank: int, variables: Mapping[str, str], options: Sequence[str]) -> str:
    own = {"MASTER_ADDR": hosts[0].name, **variables, "NNODES": str(len(hosts)), "NODE_RANK": str(rank)}
    settings = [f"{name}={value}" for name, value in own.items()]
    words = ["env", *settings, sys.executable, "-m", "glm46", "preflight", *options]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
