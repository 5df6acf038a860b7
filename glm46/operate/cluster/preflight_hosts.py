"""``preflight --hostfile``: the hosts that ssh reaches are the nodes of one preflight; the others are results."""

import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from glm46.compute.distributed.environment import variables_that_begin
from glm46.compute.distributed.hostfile import Host
from glm46.config.errors import UserError
from glm46.operate.cluster.results import FAIL, HostReport, Result
from glm46.operate.launch.hosts import PASSED_VARIABLES

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_PROBE_SECONDS = 20.0
"""For ssh to run `true` on all hosts at once."""
_PREFLIGHT_SECONDS = {False: 240.0, True: 1800.0}
"""For a whole preflight: quick, full. Its own checks end earlier; this is for hosts that are cut off."""


def reach(hosts: Sequence[Host]) -> tuple[list[Host], list[HostReport]]:
    """The hosts that ssh reaches, and a report for each of the others.

    Raises:
        UserError: ssh is not installed.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pipe for each host
    clients = [_start(host, "true") for host in hosts]
    ended = _wait(clients, _PROBE_SECONDS)
    reached, lost = [], []
    for host, (code, output) in zip(hosts, ended, strict=True):
        if code == 0:
            reached.append(host)
            continue
        said = output.strip().splitlines()[-1:] or ["no answer"]
        remedy = f"`ssh -o BatchMode=yes {host.login} true` must succeed; or take the host out of the hostfile"
        lost.append(HostReport(host.name, [Result("ssh", FAIL, said[0], f"{_PROBE_SECONDS:.0f} s", remedy)]))
    return reached, lost


def run_nodes(hosts: Sequence[Host], options: Sequence[str], *, is_full: bool) -> tuple[str | None, str]:
    """Run ``preflight`` with these options on all hosts, as the nodes of one.

    Returns:
        The line of JSON that the first host prints, None if it prints none; and its output.
    """
    own = variables_that_begin(*PASSED_VARIABLES)
    commands = [_command(hosts, rank, own, options) for rank in range(len(hosts))]
    clients = [_start(host, command) for host, command in zip(hosts, commands, strict=True)]
    output = _wait(clients, _PREFLIGHT_SECONDS[is_full])[0][1]
    lines = [line for line in output.splitlines() if line.startswith('{"preflight"')]
    return (lines[-1] if lines else None), output


def _command(hosts: Sequence[Host], rank: int, variables: Mapping[str, str], options: Sequence[str]) -> str:
    own = {"MASTER_ADDR": hosts[0].name, **variables, "NNODES": str(len(hosts)), "NODE_RANK": str(rank)}
    settings = [f"{name}={value}" for name, value in own.items()]
    words = ["env", *settings, sys.executable, "-m", "glm46", "preflight", *options]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"


def _start(host: Host, command: str) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            [*_SSH, "--", host.login, command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UserError("--hostfile: ssh is not on PATH; install the OpenSSH client") from error


def _wait(clients: Sequence[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Exit code and output of each client; those that run after this time are killed."""
    end, found = time.monotonic() + seconds, []
    for client in clients:
        try:
            output, _ = client.communicate(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            output, _ = client.communicate()
        found.append((client.returncode, output.decode(errors="replace")))
    return found
