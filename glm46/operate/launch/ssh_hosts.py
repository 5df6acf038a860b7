"""Commands on hosts through ssh or srun: `run_on_hosts` collects their output, `HostProcesses` prints it as it comes.
``launch --hostfile``, preflight, cluster setup and inference servers use it.

ssh passes no signals on, and when it is killed, the command that it started continues. So a `stoppable` command reads
names of signals from its standard input. If the client, the process that started it, or its machine dies, the input
closes and the command is stopped.
"""

import os
import queue
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.files.threads import map_in_threads, start_daemon
from glm46.operate.launch.hostfile import Host

CLIENTS = ("ssh", "srun")
"""Programs that run a command on a host."""
NOT_CONNECTED = 255
"""Exit code of ssh without a connection. Source: ssh(1)."""
PASSED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLM46_",
    "GLOO_",
    "MASTER_",
    "NCCL_",
    "OMP_",
    "PYTHONPATH",
    "PYTORCH_",
    "TORCH_",
)
"""Prefixes of the environment variables that a host gets from this process; it has all others from its own login."""
_CLIENTS_AT_ONCE = 64
"""Clients of `run_on_hosts` that run at the same time, unless its caller needs more: each takes a thread and pipes."""
_MAX_WAITING_LINES = 10_000
"""Lines of output that wait to be printed. With more, the commands wait until some have been printed."""
_CLIENT_SECONDS = 10.0
"""Time for the client to end after its command was killed."""


class HostAnswer(NamedTuple):
    """The end of a command on a host."""

    code: int | None
    """Exit code of the client; None if it did not end in time."""
    output: str
    """Standard output; if the command did not end in time, its output until then."""
    errors: str

    def reason(self) -> str:
        """Return one line about a failure: the last line of errors, or of output; without output, how it ended."""
        lines = (self.errors or self.output).strip().splitlines()
        if lines:
            return lines[-1]
        return "no answer in time" if self.code is None else f"exit code {self.code}"


def client_words(host: Host, command: str, client: str = "ssh") -> list[str]:
    """Return the command line of the client that runs a command of the shell on a host.

    Args:
        client: "ssh", or "srun" in an allocation of Slurm.
    """
    if client == "srun":
        step_options = ("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host.name}")
        return ["srun", *step_options, "--cpu-bind=none", "sh", "-c", command]
    # A connection that has been silent for 15 s is lost.
    options = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    # A connection that several clients share would keep the output of a killed client open.
    options += ["ControlMaster=no", "ControlPath=none"]
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.login, command]


def reach_command(host: Host, client: str = "ssh") -> str:
    """Return a command to type that shows whether the host can be reached."""
    if client == "ssh":
        return f"ssh -o BatchMode=yes {host.login} true"
    return shlex.join(client_words(host, "true", client))


def in_this_folder(command: str) -> str:
    """Return a command for the login shell of a host that begins in the current folder of this process."""
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {command}"


def module_words(variables: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return the command ``env VARIABLES python -m glm46 ARGUMENTS`` with this Python, for a shell."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join(["env", *settings, sys.executable, "-m", "glm46", *arguments])


def place_variables(hosts: Sequence[Host], variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables that tell each host its place among the hosts of a run.

    Args:
        variables: the passed variables; they may name another address of the first host.
    """
    first = variables.get("MASTER_ADDR", hosts[0].name)
    return [{"MASTER_ADDR": first, "NNODES": str(len(hosts)), "NODE_RANK": str(rank)} for rank in range(len(hosts))]


def run_on_hosts(
    hosts: Sequence[Host],
    commands: Sequence[str],
    seconds: float,
    client: str = "ssh",
    *,
    at_once: int = _CLIENTS_AT_ONCE,
) -> list[HostAnswer]:
    """Run a command on each host, ``at_once`` at a time; a client that runs longer than ``seconds`` is killed.

    Raises:
        UserError: the client is not installed.
    """

    def run(host: Host, command: str) -> HostAnswer:
        words = client_words(host, command, client)
        process = _start(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        code: int | None = None
        try:
            output, errors = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            output, errors = process.communicate()
        return HostAnswer(code, output.decode(errors="replace"), errors.decode(errors="replace"))

    _allow_files_for_clients()
    return map_in_threads(lambda pair: run(*pair), zip(hosts, commands, strict=True), at_once)


def stoppable(command: str, stop_seconds: int) -> str:
    """Return a command for the shell of a host that gets signals by name on its standard input.

    Args:
        command: arguments of ``env``, such as ``VARIABLE=value program arguments``.
        stop_seconds: at the end of the input the command gets SIGTERM, and SIGKILL this many seconds later.
    """
    script = f"""exec 3<&0 # keeps the input for the loop below: the shell gives /dev/null to a job in the background
setsid env {command} </dev/null 3<&- &
command=$!
send() {{ # the command has no group until setsid has run: try until the group gets the signal or the command has ended
    until kill "-$1" "-$command" || ! kill -0 "$command"; do sleep 0.1; done
}}
{{
    while read -r name <&3; do send "$name"; done
    exec 3<&-
    send TERM
    for _ in $(seq {stop_seconds}); do sleep 1; done # short: a sleep that runs outlives `kill $watch`
    send KILL
}} >/dev/null 2>&1 &
watch=$!
exec 3<&- 2>/dev/null
wait $command
code=$?
kill $watch 2>/dev/null
kill -KILL "-$command" 2>/dev/null # what it has left behind would hold its output open
exit $code"""
    return in_this_folder(f"sh -c {shlex.quote(script)}")


class HostEnd(NamedTuple):
    """The end of one of several commands."""

    command_index: int
    code: int
    """Exit code of the client; negative if a signal has ended it."""


class _OutputLine(NamedTuple):
    """A line of output of one of several commands."""

    command_index: int
    text: str


class HostProcesses:
    """Stoppable commands that run at the same time; each line of output is printed with the name of its host.

    Args:
        commands: names of hosts, each with the command line of its client.
        stop_seconds: as for `stoppable`.

    Raises:
        UserError: a client is not installed.
    """

    def __init__(self, commands: Sequence[tuple[str, Sequence[str]]], stop_seconds: int):
        _allow_files_for_clients()
        self._names = [name for name, _ in commands]
        self._stop_seconds = stop_seconds
        self._events: queue.Queue[_OutputLine | HostEnd] = queue.Queue(_MAX_WAITING_LINES)
        self._running = dict[int, subprocess.Popen[bytes]]()
        try:
            for index, (name, words) in enumerate(commands):
                self._running[index] = _start(words, stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
                start_daemon(partial(self._read, index), f"output of {name}")
        except BaseException:
            self.disconnect()
            raise

    def _read(self, index: int) -> None:
        client: Any = self._running[index]
        for line in client.stdout:
            self._events.put(_OutputLine(index, line.decode(errors="replace").rstrip("\r\n")))
        self._events.put(HostEnd(index, client.wait()))

    def next_end(self, until: float = float("inf")) -> HostEnd | None:
        """Print lines until a command ends, or until `time.monotonic` has this value; then return None.

        Raises:
            BrokenPipeError: the reader of the output has closed the pipe.
        """
        while True:
            wait_seconds = max(until - time.monotonic(), 0.0)
            try:
                event = self._events.get(timeout=min(wait_seconds, threading.TIMEOUT_MAX))
            except queue.Empty:
                return None
            if isinstance(event, HostEnd):
                self._running.pop(event.command_index, None)
                return event
            print(f"{self._names[event.command_index]}: {event.text}", flush=True)
            # The queue need not become empty: a host that prints without pause must not hold this past `until`.
            if time.monotonic() >= until:
                return None

    def send(self, number: int) -> None:
        """Send a signal to all commands that run."""
        line = f"{signal.Signals(number).name.removeprefix('SIG')}\n".encode()
        for client in list(self._running.values()):
            if client.stdin is not None:
                with suppress(OSError, ValueError):  # it has ended, or its input is closed
                    os.write(client.stdin.fileno(), line)

    def disconnect(self) -> None:
        """Kill the clients that still run. Their commands end by the end of their input."""
        self._close_inputs()
        for client in self._running.values():
            # Not its group: a command on this machine has no ssh, so the loop of `stoppable` is in the client's group.
            # Without the loop the command would continue.
            client.kill()

    def _close_inputs(self) -> None:
        for client in self._running.values():
            if client.stdin is not None:
                with suppress(OSError):
                    client.stdin.close()

    def close(self) -> None:
        """End all commands, print their last lines, and wait for their end."""
        self._close_inputs()
        end = time.monotonic() + self._stop_seconds + _CLIENT_SECONDS
        try:
            while self._running and self.next_end(end) is not None:
                pass
        finally:
            self.disconnect()


def _start(words: Sequence[str], *, stdin: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start a client in a separate session, so that Ctrl-C reaches only this process."""
    try:
        return subprocess.Popen(words, start_new_session=True, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)
    except FileNotFoundError as error:
        remedy = "start it in an allocation of Slurm" if words[0] == "srun" else "install the OpenSSH client"
        raise UserError(f"--hostfile: {words[0]} is not on PATH; {remedy}") from error


def _kill(client: subprocess.Popen[bytes]) -> None:
    """Kill a client, and what it uses to connect."""
    with suppress(ProcessLookupError):
        os.killpg(client.pid, signal.SIGKILL)


def _allow_files_for_clients() -> None:
    """Raise this process's limit of open files to the hard limit: each client has several pipes."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
