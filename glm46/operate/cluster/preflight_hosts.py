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
from glm46.operate.launch.hostfile import Host, read_hostfile, refuse_hosts
from glm46.operate.launch.nodes import VARIABLES
from glm46.operate.launch.ssh_hosts import (
    PASSED_VARIABLES,
    in_this_folder,
    module_words,
    places,
    reach_command,
    run_on_hosts,
)

_PROBE_SECONDS = 20.0
"""Time for ssh to run `true` on all hosts at once."""
_PREFLIGHT_SECONDS = {False: 240.0, True: 1800.0}
"""Time for a whole preflight; the key is True for a full one. Its checks end earlier; this is for lost hosts."""


def reach(hosts: Sequence[Host]) -> tuple[list[Host], list[HostReport]]:
    """Return the hosts that ssh reaches, and a report for each of the others.

    Raises:
        UserError: ssh is not installed.
    """
    answers = run_on_hosts(hosts, ["true"] * len(hosts), _PROBE_SECONDS, at_once=len(hosts))
    reached = []
    lost = []
    for host, answer in zip(hosts, answers, strict=True):
        if answer.code == 0:
            reached.append(host)
            continue
        remedy = f"`{reach_command(host)}` must succeed; or take the host out of the hostfile"
        lost.append(HostReport(host.name, [Result("ssh", FAIL, answer.reason(), f"{_PROBE_SECONDS:.0f} s", remedy)]))
    return reached, lost


def run_nodes(hosts: Sequence[Host], options: Sequence[str], *, is_full: bool) -> tuple[str | None, str]:
    """Run ``preflight`` with these options on all hosts, as the nodes of one preflight.

    Returns:
        The line of JSON that the first host prints, or None without such a line; and its output.
    """
    variables = variables_that_begin(*PASSED_VARIABLES)
    commands = [
        in_this_folder(module_words({**variables, **place}, ["preflight", *options]))
        for place in places(hosts, variables)
    ]
    first = run_on_hosts(hosts, commands, _PREFLIGHT_SECONDS[is_full], at_once=len(hosts))[0]
    output = first.output + first.errors
    lines = [line for line in output.splitlines() if line.startswith('{"preflight"')]
    return (lines[-1] if lines else None), output


def over_ssh(arguments: argparse.Namespace, overrides: tuple[str, ...]) -> int:
    """Run a preflight on the hosts of a hostfile from this host; return the exit code."""
    began = time.monotonic()
    hosts = read_hostfile(arguments.hostfile)
    refuse_hosts(hosts, arguments.nproc, set_variables(VARIABLES), arguments.hostfile)
    reached, lost = reach(hosts)
    options = ["--json", "-", "--nproc", str(hosts[0].slots or arguments.nproc or "auto")]
    options += ["--full"] if arguments.full else []
    options += ["--config", str(arguments.config), *overrides] if arguments.config is not None else []
    reports = list[HostReport]()
    group = [Result("ranks", SKIP, "no host is reached")]
    if reached:
        line, output = run_nodes(reached, options, is_full=arguments.full)
        if line is None:
            last_lines = "; ".join(output.strip().splitlines()[-3:]) or "nothing"
            remedy = f"{Path.cwd()}, this checkout and {sys.executable} must be at the same places on all hosts"
            lost.append(HostReport(reached[0].name, [Result("preflight", FAIL, last_lines, "its results", remedy)]))
        else:
            reports, group, _ = from_json(line)
            for host, report in zip(reached, reports, strict=True):
                report.host = host.name
    return show_results(arguments, [*reports, *lost], group, time.monotonic() - began)
