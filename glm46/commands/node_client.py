"""One node of a hostfile: its client (ssh or srun), and the lines and bytes that it exchanges with the node's launcher.

    launch --hostfile HOSTS, here               launch --from-hostfile, on each host
    connect to all hosts at once        ------>  check config, machine and folders
    compare the answers                <------  one line: versions, processes, faults
    go, then signals, one byte each    ------>  train; a signal is handled as if it were sent to the launcher
    print each line after its node     <------  output
    after a failure: a question        ------>  answered at once; a node that does not answer is lost
    newest checkpoint, hung ranks      <------  one line at the end
    first exit code that is not 0      <------  exit code

ssh passes no signals on, and leaves what it started when it is killed. So the launcher of a node reads its standard
input: it closes with the connection, and then the launcher stops as after SIGTERM.
"""

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.commands.torchrun import LauncherSignals
from glm46.config.errors import UserError
from glm46.distributed.hostfile import Host
from glm46.reliability.stop import EXIT_SIGNAL, exit_now

SSH_FAILED = 255
"""Exit code of ssh without a connection. Source: ssh(1)."""
ANSWER_SECONDS = 300.0
"""For connection and checks; many nodes that import from one network disk take minutes."""
HELD_LINES = 10_000
GO = 0
ASK = 128
"""A byte that no signal has: the launcher answers it at once."""

_ANSWER = "glm46-node: "
"""Begins a line for the driver; a login may print other lines before the first one."""


def _ssh(host: Host, command: str) -> list[str]:
    # A connection that has been silent for 15 s is lost.
    options = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3")
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.login, command]


def _srun(host: Host, command: str) -> list[str]:
    # Overlap: after a node is lost, its step still holds the cores of the other nodes.
    step = ("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host.name}")
    return ["srun", *step, "--cpu-bind=none", "sh", "-c", command]


CONNECTIONS = {"ssh": _ssh, "srun": _srun}
"""The command that runs another one on a host, by the name of its client."""


class NodeClient:
    """One host and its client, whose lines and end a thread puts into a queue.

    Attributes:
        answer: what the launcher has said about itself, from its answer before training to its last line.
        code: exit code of the client; None while it runs.
        is_lost: whether the node did not answer in time after another node had failed.

    Raises:
        UserError: the client is not installed.
    """

    def __init__(self, host: Host, command: str, connection: str, events: queue.Queue):
        self.host, self.name = host, host.name
        self.held: deque[str] = deque(maxlen=HELD_LINES)
        self.answer: dict[str, Any] = {}
        self.code: int | None = None
        self.is_lost = False
        self._test = f"ssh -o BatchMode=yes {host.login} true"
        if connection != "ssh":
            self._test = shlex.join(CONNECTIONS[connection](host, "true"))
        try:
            # A session of its own: Ctrl-C reaches this process alone, which passes it on.
            self._client = subprocess.Popen(
                CONNECTIONS[connection](host, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            remedy = "install the OpenSSH client" if connection == "ssh" else "start it in an allocation of Slurm"
            raise UserError(f"--hostfile: {connection} is not on PATH; {remedy}") from error
        threading.Thread(target=self._read, args=(events,), name=self.name, daemon=True).start()

    def _read(self, events: queue.Queue) -> None:
        for line in self._client.stdout:
            events.put((self, line.decode(errors="replace").rstrip("\r\n")))
        events.put((self, self._client.wait()))

    def take(self, event: str | int) -> bool:
        """Keep the exit code or what the launcher says about itself; returns False for lines of other output."""
        if isinstance(event, int):
            self.code = event
        else:
            _, mark, text = event.partition(_ANSWER)  # a rank may have left a line without an end before it
            if not mark:
                return False
            self.answer |= json.loads(text)
        return True

    @property
    def has_answered(self) -> bool:
        """Whether the checks of this node have ended, or never will."""
        return "faults" in self.answer or self.code is not None

    def faults(self, first: "NodeClient") -> list[str]:
        """Faults of this node, among them differences from the answer of the first node."""
        mine, theirs = self.answer, first.answer
        if mine and (mine["faults"] or self.code is None):
            different = [
                name for name in _DIFFERENCES if name in theirs and mine.get(name, theirs[name]) != theirs[name]
            ]
            texts = [_DIFFERENCES[name].format(mine[name], theirs[name], first.name) for name in different]
            return [*mine["faults"], *texts]
        said = "; ".join(line.strip() for line in list(self.held)[-3:] if line.strip())
        if self.code == SSH_FAILED:
            return [f"cannot be reached: {said}; `{self._test}` must succeed"]
        if self.code is not None:
            return [
                f"the launcher cannot run there, exit code {self.code}: {said}; the folder {Path.cwd()}, this "
                f"checkout and {sys.executable} must be at the same places on all nodes"
            ]
        return [f"no answer within {ANSWER_SECONDS:.0f} s; see what `{self._test}` does"]

    def send(self, number: int) -> None:
        """Write one byte to the launcher, if it still runs."""
        with suppress(OSError):
            os.write(self._client.stdin.fileno(), bytes([number]))

    def disconnect(self) -> None:
        """Kill the client, and what it uses to connect."""
        if self._client.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._client.pid, signal.SIGKILL)


_DIFFERENCES = {
    "versions": "has {0}, and {2} has {1}; install the same versions on all nodes",
    "config": "its config file differs from that of {2}; put the file on storage that all nodes see",
    "processes": "would start {0} processes, and {2} {1}; state slots=N for all hosts, or use equal machines",
}
"""Fault for each part of an answer that must be equal on all nodes."""


class Driver:
    """The process that started this launcher on its node, as the launcher sees it: its standard input and output."""

    def __init__(self, signals: LauncherSignals):
        self._signals, self._go = signals, threading.Event()
        threading.Thread(target=self._listen, name="driver", daemon=True).start()

    def answer(self, **parts: Any) -> None:
        """Send the answer and wait until all nodes have sent theirs; without faults only, else the caller ends."""
        self.report(**parts)
        if not parts["faults"]:
            self._go.wait()

    def report(self, **parts: Any) -> None:
        """Send one line about this node."""
        print(_ANSWER + json.dumps(parts), flush=True)

    def _listen(self) -> None:
        # Not sys.stdin: a thread in its buffer is an error at the end of the interpreter.
        while numbers := os.read(0, 64):
            for number in numbers:
                if number == GO:
                    self._go.set()
                elif number == ASK:
                    self.report(is_alive=True)
                elif number == signal.SIGKILL:
                    exit_now(EXIT_SIGNAL + number, "killed: the other nodes have ended")
                else:
                    os.kill(os.getpid(), number)
        if self._signals.number is None:  # a second signal would end the ranks while they save
            os.kill(os.getpid(), signal.SIGTERM)
