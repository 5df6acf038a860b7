"""Commands on the hosts of a run: the only code that knows ssh and srun."""

import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.operate.launch.hostfile import Host

CONNECTIONS = ("ssh", "srun")
"""Names of the clients."""
PASSED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLM46_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "PYTHONPATH", "PYTORCH_", "TORCH_",
)  # fmt: skip
"""Beginnings of the environment variables that a node gets from here; it has all others from its own login."""
_AT_ONCE = 64


class HostAnswer(NamedTuple):
    """The end of a command on a host."""

    code: int | None
    """Exit code of the client; None if the time was over."""
    output: str
    """Standard output; of a command without an answer in time, what came until then."""
    errors: str

    def reason(self) -> str:
        """The reason for the lack of an answer: the last line of output, or the exit code."""
        said = (self.errors or self.output).strip().splitlines()[-1:]
        return said[0] if said else "no answer in time" if self.code is None else f"exit code {self.code}"


class HostGroup:
    """Runs commands on hosts.

    Args:
        connection: "ssh", or "srun" in an allocation of Slurm.
    """

    def __init__(self, connection: str = "ssh"):
        self.connection = connection

    def words(self, host: Host, command: str) -> list[str]:
        """The command line of the client that runs a command of the shell on a host."""
        if self.connection == "srun":
            # Overlap: after a node is lost, its step still holds the cores of the other nodes.
            step = ("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host.name}")
            return ["srun", *step, "--cpu-bind=none", "sh", "-c", command]
        # A connection that has been silent for 15 s is lost.
        options = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3")
        return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.login, command]

    def test(self, host: Host) -> str:
        """A command to type that shows whether the host can be reached."""
        if self.connection == "ssh":
            return f"ssh -o BatchMode=yes {host.login} true"
        return shlex.join(self.words(host, "true"))

    def start(self, host: Host, command: str, **pipes: Any) -> subprocess.Popen:
        """Start a command on a host, in a session of its own: Ctrl-C reaches this process alone.

        Args:
            pipes: ``stdin``, ``stdout`` and ``stderr`` of `subprocess.Popen`.

        Raises:
            UserError: the client is not installed.
        """
        try:
            return subprocess.Popen(self.words(host, command), start_new_session=True, **pipes)
        except FileNotFoundError as error:
            remedy = "install the OpenSSH client" if self.connection == "ssh" else "start it in an allocation of Slurm"
            raise UserError(f"--hostfile: {self.connection} is not on PATH; {remedy}") from error

    def run(
        self, hosts: Sequence[Host], commands: Sequence[str], seconds: float, *, at_once: int = _AT_ONCE
    ) -> list[HostAnswer]:
        """Run a command on each host, ``at_once`` at a time; a client that runs longer than ``seconds`` is killed.

        Raises:
            UserError: the client is not installed.
        """
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda *asked: _wait(self.start(*asked, **pipes), seconds), hosts, commands))


def module_command(variables: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The command ``python -m glm46 ARGUMENTS`` for the login shell of a host, in this folder and by this Python."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    words = ["env", *settings, sys.executable, "-m", "glm46", *arguments]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"


def places(hosts: Sequence[Host], variables: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables by which each host knows its place among those that train.

    Args:
        variables: as for `module_command`; they may name another address of the first host.
    """
    first = variables.get("MASTER_ADDR", hosts[0].name)
    return [{"MASTER_ADDR": first, "NNODES": str(len(hosts)), "NODE_RANK": str(rank)} for rank in range(len(hosts))]


def allow_files_for_clients() -> None:
    """Raise this process's limit of open files as far as it may: each client has two pipes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _wait(client: subprocess.Popen, seconds: float) -> HostAnswer:
    code = None
    try:
        output, errors = client.communicate(timeout=seconds)
        code = client.returncode
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        output, errors = client.communicate()
    return HostAnswer(code, output.decode(errors="replace"), errors.decode(errors="replace"))
