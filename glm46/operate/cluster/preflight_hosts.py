"""``preflight --hostfile``: the hosts that ssh reaches are the nodes of one preflight; the others are results."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from glm46.compute.distributed.environment import set_variables, variables_that_begin
from glm46.operate.cluster.compare import from_json
from glm46.operate.cluster.preflight import show_results
from glm46.operate.cluster.results import FAIL, SKIP, HostReport, Result
from glm46.operate.launch.host_group import PASSED_VARIABLES, HostGroup, allow_files_for_clients, module_command, places
from glm46.operate.launch.hostfile import Host, read_hostfile
from glm46.operate.launch.nodes import VARIABLES, refuse_hosts

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
    commands = [module_command({**own, **place}, ["preflight", *options]) for place in places(hosts, own)]
    first = HostGroup().run(hosts, commands, _PREFLIGHT_SECONDS[is_full], at_once=len(hosts))[0]
    output = first.output + first.errors
    lines = [line for line in output.splitlines() if line.startswith('{"preflight"')]
    return (lines[-1] if lines else None), output


def over_ssh(arguments: argparse.Namespace, overrides: tuple[str, ...]) -> int:
    """Preflight of the hosts of a hostfile, from here; returns the exit code."""
    began, hosts = time.monotonic(), read_hostfile(arguments.hostfile)
    refuse_hosts(hosts, arguments.nproc, set_variables(VARIABLES), arguments.hostfile)
    reached, lost = reach(hosts)
    options = ["--json", "-", "--nproc", str(hosts[0].slots or arguments.nproc or "auto")]
    options += ["--full"] if arguments.full else []
    options += ["--prometheus", arguments.prometheus] if arguments.prometheus else []
    options += ["--config", str(arguments.config), *overrides] if arguments.config is not None else []
    reports, group = list[HostReport](), [Result("ranks", SKIP, "no host is reached")]
    if reached:
        line, output = run_nodes(reached, options, is_full=arguments.full)
        if line is None:
            said = "; ".join(output.strip().splitlines()[-3:]) or "nothing"
            remedy = f"{Path.cwd()}, this checkout and {sys.executable} must be at the same places on all hosts"
            lost.append(HostReport(reached[0].name, [Result("preflight", FAIL, said, "its results", remedy)]))
        else:
            reports, group, _ = from_json(line)
            for host, report in zip(reached, reports, strict=True):
                report.host = host.name
    return show_results(arguments, [*reports, *lost], group, time.monotonic() - began)
