"""The nodes of a hostfile: a launcher on each over ssh, its output by node, and the end of all when one ends.

    launch --hostfile HOSTS, here               launch --from-hostfile, on each host
    read the hostfile, check the config
    ssh to all hosts at once           ------>  check config, machine and folders
    compare the answers                <------  one line: versions, processes, faults
    go, then signals, one byte each    ------>  train; a signal is handled as if it were sent to the launcher
    print each line after its node     <------  output
    first exit code that is not 0      <------  exit code

ssh passes no signals on, and leaves what it started when it is killed. So the launcher of a node reads its standard
input: it closes with the connection, and then the launcher stops as after SIGTERM.
"""

import json
import os
import queue
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.commands.torchrun import EXIT_FAILED_RANK, SAVE_SECONDS, LauncherSignals
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.distributed.hostfile import Host
from glm46.reliability.stop import (
    EXIT_BROKEN_PIPE,
    EXIT_SIGNAL,
    EXIT_STOPPED,
    REPEAT_SECONDS,
    SIGNALS,
    SignalListener,
    code_before_training,
    exit_now,
)

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=30")
_SSH_FAILED = 255
"""Exit code of ssh without a connection. Source: ssh(1)."""
_ANSWER = "glm46-node: "
"""Begins the line of a node's answer; a login may print other lines before it."""
_GO = 0

_ANSWER_SECONDS = 300.0
"""For connection and checks; many nodes that import from one network disk take minutes."""
_FOLLOW_SECONDS = 30.0
"""For the other nodes to end by themselves after one has failed, and then again after SIGTERM."""
_KILL_SECONDS = 10.0
"""For nodes to end after they were told to kill their ranks."""
_POLL_SECONDS = 0.5
_HELD_LINES = 10_000

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
"""Beginnings of the environment variables that a node gets from here; it has all others from its own login."""


def host_commands(hosts: Sequence[Host], variables: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """The command of each host, for its login shell.

    Args:
        variables: environment variables, see `PASSED_VARIABLES`.
        arguments: of the verb ``launch``.
    """
    commands = []
    for rank in range(len(hosts)):
        own = {"MASTER_ADDR": hosts[0].name, **variables, "NNODES": str(len(hosts)), "NODE_RANK": str(rank)}
        settings = [f"{name}={value}" for name, value in own.items()]
        words = ["env", *settings, sys.executable, "-m", "glm46", "launch", *arguments, "--from-hostfile"]
        commands.append(f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}")
    return commands


class HostNodes:
    """The ssh clients of all nodes, from their start to their end. Signals that come before `run` end all at once.

    Raises:
        UserError: ssh is not installed.
    """

    def __init__(self, hosts: Sequence[Host], commands: Sequence[str]):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two pipes for each node
        self._events: queue.Queue[tuple[_Node, str | int]] = queue.Queue(_HELD_LINES)
        self._deadline = float("inf")
        self._remaining_measures = [signal.SIGTERM, signal.SIGKILL]
        self._is_running = self._is_cut_off = False
        self._signalled_at: float | None = None
        self._nodes: list[_Node] = []
        self._listener = SignalListener(self._on_signal, (*SIGNALS, signal.SIGQUIT))
        try:
            self._nodes += [_Node(*each, self._events) for each in zip(hosts, commands, strict=True)]
        except FileNotFoundError as error:
            raise UserError("--hostfile: ssh is not on PATH; install the OpenSSH client") from error

    def close(self) -> None:
        """End the nodes that still run, by the end of their connections, and stop listening for signals."""
        for node in self._nodes:
            node.disconnect()
        self._listener.restore()

    def faults(self) -> list[str]:
        """What keeps the nodes from starting, once all have answered. Equal faults of several nodes are one."""
        waiting, end = set(self._nodes), time.monotonic() + _ANSWER_SECONDS
        while waiting and time.monotonic() < end:
            with suppress(queue.Empty):
                node, event = self._events.get(timeout=_POLL_SECONDS)
                if node.take(event):
                    waiting.discard(node)
        found: dict[str, list[str]] = {}
        for node in self._nodes:
            for fault in node.faults(self._nodes[0]):
                found.setdefault(fault, []).append(node.name)
        return [f"{_listed(names)}: {fault}" for fault, names in found.items()]

    def run(self) -> int:
        """Let all nodes train, and wait for their end.

        Returns:
            0, or the exit code of the node that failed first; EXIT_STOPPED only if no node ended otherwise.
        """
        self._is_running = True
        self._send(_GO)
        for node in self._nodes:
            for line in node.held:
                self._print(node, line)
        codes = []
        while len(codes) < len(self._nodes):
            with suppress(queue.Empty):
                node, event = self._events.get(timeout=_POLL_SECONDS)
                if isinstance(event, str):
                    self._print(node, event)
                else:
                    codes.append(self._end_of(node, event, is_first=not codes))
            if time.monotonic() > self._deadline:
                self._take_measure()
        if self._is_cut_off:
            return EXIT_BROKEN_PIPE
        failed = [code for code in codes if code not in (0, EXIT_STOPPED)]
        return failed[0] if failed else max(codes)

    def _end_of(self, node: "_Node", code: int, *, is_first: bool) -> int:
        is_lost = code == _SSH_FAILED or code < 0
        if is_first and self._signalled_at is None:
            is_good = code in (0, EXIT_STOPPED)
            self._deadline = time.monotonic() + (SAVE_SECONDS if is_good else _FOLLOW_SECONDS)
            if not is_good:
                how = "the connection was lost" if is_lost else f"ended with exit code {code}"
                print(f"error: {node.name}: {how}; all nodes are stopped", file=sys.stderr, flush=True)
        return EXIT_FAILED_RANK if is_lost else code

    def _take_measure(self) -> None:
        """End nodes that have not followed: SIGTERM, then SIGKILL, then the end of the connection."""
        if not self._remaining_measures:
            for node in self._nodes:
                node.disconnect()
            self._deadline = float("inf")
            return
        number = self._remaining_measures.pop(0)
        self._send(number)
        self._deadline = time.monotonic() + (_FOLLOW_SECONDS if number == signal.SIGTERM else _KILL_SECONDS)

    def _on_signal(self, number: int) -> None:
        if not self._is_running:
            name = signal.Signals(number).name
            exit_now(code_before_training(number), f"stopped by {name} before training began; nothing is lost")
        now, before = time.monotonic(), self._signalled_at
        if before is not None and now - before <= REPEAT_SECONDS:
            return
        # The launchers tell a first signal from a second, and kill ranks that do not end in time.
        self._deadline = now + _FOLLOW_SECONDS + (SAVE_SECONDS if before is None else 0)
        self._signalled_at, self._remaining_measures = now, [signal.SIGKILL]
        self._send(number)

    def _send(self, number: int) -> None:
        for node in self._nodes:
            node.send(number)

    def _print(self, node: "_Node", line: str) -> None:
        try:
            print(f"{node.name}: {line}", flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._is_cut_off = True
            self._send(signal.SIGTERM)


class _Node:
    """One host and its ssh client, whose lines and end a thread puts into a queue."""

    def __init__(self, host: Host, command: str, events: queue.Queue):
        self.name = host.name
        self.held: deque[str] = deque(maxlen=_HELD_LINES)
        self._login, self._answer, self._code = host.login, {}, None
        # A session of its own: Ctrl-C reaches this process alone, which passes it on.
        self._client = subprocess.Popen(
            [*_SSH, "--", host.login, command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(events,), name=self.name, daemon=True).start()

    def _read(self, events: queue.Queue) -> None:
        for line in self._client.stdout:
            events.put((self, line.decode(errors="replace").rstrip("\r\n")))
        events.put((self, self._client.wait()))

    def take(self, event: str | int) -> bool:
        """Keep a line or the exit code; returns whether the node has answered, or never will."""
        if isinstance(event, int):
            self._code = event
        elif event.startswith(_ANSWER):
            self._answer = json.loads(event.removeprefix(_ANSWER))
        else:
            self.held.append(event)
            return False
        return True

    def faults(self, first: "_Node") -> list[str]:
        """Faults of this node, among them differences from the answer of the first node."""
        mine, theirs = self._answer, first._answer
        if mine and (mine["faults"] or self._code is None):
            different = [
                name for name in _DIFFERENCES if name in theirs and mine.get(name, theirs[name]) != theirs[name]
            ]
            texts = [_DIFFERENCES[name].format(mine[name], theirs[name], first.name) for name in different]
            return [*mine["faults"], *texts]
        said = "; ".join(line.strip() for line in list(self.held)[-3:] if line.strip())
        if self._code == _SSH_FAILED:
            return [f"cannot be reached: {said}; `ssh -o BatchMode=yes {self._login} true` must succeed"]
        if self._code is not None:
            return [
                f"the launcher cannot run there, exit code {self._code}: {said}; the folder {Path.cwd()}, this "
                f"checkout and {sys.executable} must be at the same places on all nodes"
            ]
        return [f"no answer within {_ANSWER_SECONDS:.0f} s; see what `ssh {self._login} true` does"]

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
    "processes": "would start {0}, and {2} {1}; state slots=N for all hosts, or use equal machines",
}
"""Fault for each part of an answer that must be equal on all nodes."""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {counted(len(names) - 4, 'other node')}"


class Driver:
    """The process that started this launcher over ssh, as the launcher sees it: its standard input and output."""

    def __init__(self, signals: LauncherSignals):
        self._signals, self._go = signals, threading.Event()
        threading.Thread(target=self._listen, name="driver", daemon=True).start()

    def answer(self, **parts: Any) -> None:
        """Send the answer and wait until all nodes have sent theirs; without faults only, else the caller ends."""
        print(_ANSWER + json.dumps(parts), flush=True)
        if not parts["faults"]:
            self._go.wait()

    def _listen(self) -> None:
        # Not sys.stdin: a thread in its buffer is an error at the end of the interpreter.
        while numbers := os.read(0, 64):
            for number in numbers:
                if number == _GO:
                    self._go.set()
                elif number == signal.SIGKILL:
                    exit_now(EXIT_SIGNAL + number, "killed: the other nodes have ended")
                else:
                    os.kill(os.getpid(), number)
        if self._signals.number is None:  # a second signal would end the ranks while they save
            os.kill(os.getpid(), signal.SIGTERM)
