"""One node of a hostfile: its client (ssh or srun), and the lines that it exchanges with the node's launcher.

    launch --hostfile HOSTS, here               launch --from-hostfile, on each host
    connect to all hosts, spares too    ------>  make the server of ranks
    order: place, overrides            ------>  check config, machine and folders
    compare the answers                <------  versions, processes, faults
    go, then signals                   ------>  train; a signal is handled as if it were sent to the launcher
    print each line after its node     <------  output
    a question, again and again        ------>  answered at once; a node that does not is lost
    then: kill the ranks               ------>  they are killed; the launcher goes on
    exit code, newest checkpoint       <------  the end of this start
    next order                         ------>  the next start, on these nodes or others

All of this is lines of JSON. ssh passes no signals on, and leaves what it started when it is killed. So the launcher of
a node reads its standard input: it closes with the connection, and then the launcher stops as after SIGTERM.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.engine.reliability.stop import EXIT_SIGNAL, exit_now
from glm46.operate.launch.host_group import HostGroup
from glm46.operate.launch.hostfile import Host
from glm46.operate.launch.process_end import started_ranks
from glm46.operate.launch.torchrun import LauncherSignals

SSH_FAILED = 255
"""Exit code of ssh without a connection. Source: ssh(1)."""
_OUT_OF_MEMORY = 253
ANSWER_SECONDS = 300.0
"""For connection and checks; many nodes that import from one network disk take minutes."""
HELD_LINES = 10_000
_ANSWER = "glm46-node: "
"""Begins a line for the driver; a login may print other lines before the first one."""


class NodeClient:
    """One host and its client, whose lines and end a thread puts into a queue.

    Attributes:
        answer: what the launcher has said about itself in this start, from its answer before training to its end.
        code: exit code of this start, or of the client if it has ended; None before.
        is_connected: whether the client runs.
        is_lost: whether the node did not answer in time.
        asked_at: `time.monotonic` of the last question, if it has not been answered.

    Raises:
        UserError: the client is not installed.
    """

    def __init__(self, host: Host, command: str, connection: str, events: queue.Queue):
        self.host, self.name = host, host.name
        self.held: deque[str] = deque(maxlen=HELD_LINES)
        self.answer: dict[str, Any] = {}
        self.code: int | None = None
        self.is_connected, self.is_lost = True, False
        self.asked_at: float | None = None
        self._is_ended = False  # by this process: a signal, or the request to kill the ranks, was sent
        group = HostGroup(connection)
        self._test = group.test(host)
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._client: Any = group.start(host, command, **pipes)
        threading.Thread(target=self._read, args=(events,), name=self.name, daemon=True).start()

    def _read(self, events: queue.Queue) -> None:
        for line in self._client.stdout:
            before, mark, answer = line.decode(errors="replace").rstrip("\r\n").partition(_ANSWER)
            if before or not mark:  # with both, a rank has left a line without an end
                events.put((self, before))
            if mark:
                events.put((self, mark + answer))
        events.put((self, self._client.wait()))

    def take(self, event: str | int) -> bool:
        """Keep the exit code or what the launcher says about itself; returns False for lines of other output."""
        if isinstance(event, int):
            # srun ends with 128 + n if a signal has killed the launcher, and with 253 if memory ran out; ssh with 255.
            # Source: srun(1), "Return value".
            is_killed = event > 128 or event == _OUT_OF_MEMORY
            if is_killed and self.has_answered and not self._is_ended:
                event = SSH_FAILED
            self.code, self.is_connected = event if self.code is None else self.code, False
        elif not event.startswith(_ANSWER):
            return False
        else:
            said = json.loads(event.removeprefix(_ANSWER))
            if said.pop("is_alive", False):
                self.asked_at = None
            self.answer |= said
            self.code = self.answer.get("code")
        return True

    def order(self, **order: Any) -> None:
        """Begin a start on this node."""
        self.answer, self.code, self.asked_at, self._is_ended = {}, None, None, False
        self.send(start=order)

    @property
    def has_answered(self) -> bool:
        """True if the checks of this node have ended, or never will."""
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

    def send(self, **message: Any) -> None:
        """Write one line to the launcher, if it still runs."""
        self._is_ended = self._is_ended or "kill" in message or "signal" in message
        with suppress(OSError):
            os.write(self._client.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def ask(self) -> None:
        """Ask the launcher whether it is alive, if it owes no answer."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            self.send(ask=True)

    def close(self) -> None:
        """Let the launcher end."""
        with suppress(OSError):
            self._client.stdin.close()

    def disconnect(self, seconds: float = 0.0) -> None:
        """Kill the client, and what it uses to connect, if it does not end by itself within a time."""
        with suppress(subprocess.TimeoutExpired):
            self._client.wait(seconds)
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
        self._signals, self._is_training, self._writing = signals, False, threading.Lock()
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, name="driver", daemon=True).start()

    def next_order(self) -> dict[str, Any] | None:
        """Wait for the next start; None at the end of the connection."""
        while (message := self._messages.get()) is not None:
            if "start" in message:
                return message["start"]
        self._messages.put(None)
        return None

    def answer(self, **parts: Any) -> str | None:
        """Send the answer, and without faults wait until all nodes have sent theirs.

        Returns:
            The times of this start, see `StartTimes`; None if this node is not to train now.
        """
        self.report(**parts)
        if parts["faults"]:
            return None
        message = self._messages.get()
        if message is not None and "go" in message:
            self._is_training = True
            return message["go"]
        self._messages.put(message)
        return None

    def report(self, **parts: Any) -> None:
        """Send one line about this node; with ``code`` it is the last one of a start."""
        self._is_training = self._is_training and "code" not in parts
        with self._writing:  # unbuffered, print writes the end of the line apart, and answers come from a thread
            sys.stdout.write(f"{_ANSWER}{json.dumps(parts)}\n")
            sys.stdout.flush()

    def _listen(self) -> None:
        # Not sys.stdin: a thread in its buffer is an error at the end of the interpreter.
        received = b""
        while data := os.read(0, 1 << 16):
            *lines, received = (received + data).split(b"\n")
            for message in map(json.loads, lines):
                self._take(message)
        self._messages.put(None)
        if self._is_training and self._signals.number is None:  # a second signal would end the ranks while they save
            os.kill(os.getpid(), signal.SIGTERM)

    def _take(self, message: dict[str, Any]) -> None:
        ranks = started_ranks() if "kill" in message else []
        if "ask" in message:
            self.report(is_alive=True)
        elif "kill" in message and not ranks or message.get("signal") == signal.SIGKILL:
            exit_now(EXIT_SIGNAL + signal.SIGKILL, "killed: the other nodes have ended")
        elif "kill" in message:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        elif "signal" in message:
            os.kill(os.getpid(), message["signal"])
        else:
            self._messages.put(message)
