"""``preflight --hostfile``: the command ``preflight`` on each host of a file through ssh, and one table."""

import argparse
import time

from glm46.compute.distributed.environment import variables_that_are_set, variables_that_begin
from glm46.operate.cluster.results import FAIL, Result, from_json, show_results
from glm46.operate.launch.hostfile import read_hostfile, refuse_hosts
from glm46.operate.launch.launch_hosts import unreachable
from glm46.operate.launch.nodes import VARIABLES
from glm46.operate.launch.ssh_hosts import PASSED_VARIABLES, in_this_folder, module_words, place_variables, run_on_hosts

_SECONDS = {False: 360.0, True: 3600.0}
"""Time for all hosts; the key is True for a full preflight. Its checks end earlier; this is for lost hosts."""


def preflight_hosts(arguments: argparse.Namespace, overrides: tuple[str, ...]) -> int:
    """Run a preflight on the hosts of a hostfile from this host; return the exit code. Hosts that cannot be reached are
    results, and the others are checked without them."""
    began = time.monotonic()
    hosts = read_hostfile(arguments.hostfile)
    refuse_hosts(hosts, arguments.nproc, variables_that_are_set(VARIABLES), arguments.hostfile)
    faults = unreachable(hosts)
    remedy = "correct it, or remove the host from the hostfile"
    results = [Result("ssh", FAIL, fault, "an answer", remedy, host) for host, fault in faults.items()]
    reached = [host for host in hosts if host.name not in faults]
    options = ["preflight", "--json", "-", "--nproc", str(hosts[0].slots or arguments.nproc or "auto")]
    options += ["--full"] if arguments.full else []
    options += ["--config", str(arguments.config), *overrides] if arguments.config is not None else []
    variables = variables_that_begin(*PASSED_VARIABLES)
    places = place_variables(reached, variables) if reached else []
    commands = [in_this_folder(module_words({**variables, **place}, options)) for place in places]
    answers = run_on_hosts(reached, commands, _SECONDS[arguments.full], at_once=len(reached)) if reached else []
    for number, (host, answer) in enumerate(zip(reached, answers, strict=True)):
        lines = (answer.output + answer.errors).strip().splitlines()
        reports = [line for line in lines if line.startswith('{"preflight"')]
        # The first host has the results of all. The others print theirs if their ranks failed: then they may have never
        # met the first host.
        shown = {result.host for result in results}
        if reports:
            results += [result for result in from_json(reports[-1]) if result.host not in shown]
        elif number == 0 or not any(result.host.endswith(f"(node {number})") for result in results):
            value = "; ".join(lines[-3:]) or "no output"
            results.append(Result("preflight", FAIL, value, "results", "look at this host", host.name))
    return show_results(results, time.monotonic() - began, arguments.json)
