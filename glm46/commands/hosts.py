"""The nodes of a hostfile while they train: their output by node, signals to all, and the end of all when one ends."""

import os
import queue
import resource
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from glm46.commands.node_client import ANSWER_SECONDS, ASK, GO, HELD_LINES, SSH_FAILED, NodeClient
from glm46.commands.torchrun import EXIT_FAILED_RANK, SAVE_SECONDS
from glm46.config.faults import counted
from glm46.distributed.hostfile import Host
from glm46.reliability.stop import (
    EXIT_BROKEN_PIPE,
    EXIT_STOPPED,
    REPEAT_SECONDS,
    SIGNALS,
    SignalListener,
    code_before_training,
    exit_now,
)

_FOLLOW_SECONDS = 30.0
"""For the other nodes to end by themselves after one has failed, and then again after SIGTERM."""
_RESTART_SECONDS = 5.0
"""The same, and for an answer of a node, if another start follows: nothing is left to be saved."""
_KILL_SECONDS = 10.0
"""For nodes to end after they were told to kill their ranks."""
LATE_SECONDS = 20.0
"""At a restart, for a node to answer after half of the nodes have: a dead one may not refuse a connection."""
_POLL_SECONDS = 0.2

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


def host_commands(
    hosts: Sequence[Host], variables: Mapping[str, str], arguments: Sequence[str], start: int = 0
) -> list[str]:
    """The command of each host, for its login shell.

    Args:
        variables: environment variables, see `PASSED_VARIABLES`.
        arguments: of the verb ``launch``.
        start: number of this start, counted from 0.
    """
    commands = []
    for rank in range(len(hosts)):
        own = {"MASTER_ADDR": hosts[0].name, **variables, "NNODES": str(len(hosts)), "NODE_RANK": str(rank)}
        settings = [f"{name}={value}" for name, value in own.items()]
        words = ["env", *settings, sys.executable, "-m", "glm46", "launch", *arguments, "--from-hostfile", str(start)]
        commands.append(f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}")
    return commands


class HostNodes:
    """The clients of all nodes, for one start after another. Signals that come while no node trains end all at once.

    Args:
        connection: one of `CONNECTIONS`.
        restarts: whether another start may follow a failure, so that the other nodes are ended soon.

    Attributes:
        newest_step: of the newest checkpoint that a node has reported; 0 without one.
        hung_ranks: those that the hang report of the last start names.
        signal_number: of the last signal that was passed on; None before the first.
    """

    def __init__(self, connection: str = "ssh", *, restarts: bool = False):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two pipes for each node
        self._connection, self._restarts = connection, restarts
        self._nodes: list[NodeClient] = []
        self._is_running = False
        self.newest_step, self.hung_ranks = 0, set()
        self.signal_number: int | None = None
        self._signalled_at = 0.0
        self._listener = SignalListener(self._on_signal, (*SIGNALS, signal.SIGQUIT))

    def connect(self, hosts: Sequence[Host], commands: Sequence[str]) -> None:
        """Begin a start: run a command on each host.

        Raises:
            UserError: the client is not installed.
        """
        self._disconnect()
        self._events: queue.Queue[tuple[NodeClient, str | int]] = queue.Queue(HELD_LINES)
        self._deadline = float("inf")
        self._remaining_measures = [signal.SIGKILL] if self._restarts else [signal.SIGTERM, signal.SIGKILL]
        self._is_running = self._is_cut_off = False
        self._nodes = []
        self._nodes += [NodeClient(*each, self._connection, self._events) for each in zip(hosts, commands, strict=True)]

    def close(self) -> None:
        """End the nodes that still run, by the end of their connections, and stop listening for signals."""
        self._disconnect()
        self._listener.restore()

    def _disconnect(self) -> None:
        for node in self._nodes:
            node.disconnect()

    def faults(self, *, late_seconds: float = float("inf")) -> dict[str, list[NodeClient]]:
        """What keeps nodes from starting, once all have answered, with the nodes that have the fault.

        Args:
            late_seconds: time for the other nodes to answer after half of them have.
        """
        end = time.monotonic() + ANSWER_SECONDS
        is_half_known = False
        while time.monotonic() < end and not all(node.has_answered for node in self._nodes):
            with suppress(queue.Empty):
                node, event = self._events.get(timeout=_POLL_SECONDS)
                if not node.take(event):
                    node.held.append(event)
            if not is_half_known and 2 * sum(node.has_answered for node in self._nodes) >= len(self._nodes):
                is_half_known, end = True, min(end, time.monotonic() + late_seconds)
        found: dict[str, list[NodeClient]] = {}
        first = next((node for node in self._nodes if node.answer), self._nodes[0])
        for node in self._nodes:
            for fault in node.faults(first):
                found.setdefault(fault, []).append(node)
        return found

    def run(self) -> int:
        """Let all nodes train, and wait for their end.

        Returns:
            0, or the exit code of the node that failed first; EXIT_STOPPED only if no node ended otherwise.
        """
        self._is_running, self.hung_ranks = True, set()
        self._send(GO)
        for node in self._nodes:
            for line in node.held:
                self._print(node, line)
        codes = []
        while len(codes) < len(self._nodes):
            with suppress(queue.Empty):
                node, event = self._events.get(timeout=_POLL_SECONDS)
                if not node.take(event):
                    self._print(node, event)
                elif node.code is not None:
                    codes.append(self._end_of(node, node.code, is_first=not codes))
            if time.monotonic() > self._deadline:
                self._take_measure()
        self._is_running = False
        for node in self._nodes:
            self.newest_step = max(self.newest_step, node.answer.get("newest_step", 0))
            self.hung_ranks |= set(node.answer.get("hung_ranks", ()))
        if self._is_cut_off:
            return EXIT_BROKEN_PIPE
        failed = [code for code in codes if code not in (0, EXIT_STOPPED)]
        return failed[0] if failed else max(codes)

    def processes(self) -> int:
        """Processes of each node, as the nodes have answered."""
        return self._nodes[0].answer["processes"]

    def lost_hosts(self) -> list[Host]:
        """The hosts that did not answer in the last start after another node had failed."""
        return [node.host for node in self._nodes if node.is_lost]

    def disconnected_hosts(self) -> list[Host]:
        """The other hosts whose connection was lost in the last start."""
        return [node.host for node in self._nodes if not node.is_lost and _is_disconnect(node.code)]

    def _end_of(self, node: NodeClient, code: int, *, is_first: bool) -> int:
        if is_first and self.signal_number is None:
            is_good = code in (0, EXIT_STOPPED)
            follow = _RESTART_SECONDS if self._restarts else _FOLLOW_SECONDS
            self._deadline = time.monotonic() + (SAVE_SECONDS if is_good else follow)
            if not is_good:
                self._send(ASK)
                how = "the connection was lost" if _is_disconnect(code) else f"ended with exit code {code}"
                print(f"error: {node.name}: {how}; all nodes are stopped", file=sys.stderr, flush=True)
        return EXIT_FAILED_RANK if _is_disconnect(code) else code

    def _take_measure(self) -> None:
        """End nodes that have not followed: SIGTERM, then SIGKILL, then the end of the connection. A node that has not
        answered since the failure is disconnected at once."""
        number = self._remaining_measures.pop(0) if self._remaining_measures else None
        for node in self._nodes:
            is_silent = self._restarts and not node.answer.get("is_alive")
            if node.code is None and (number is None or is_silent):
                node.is_lost = True
                node.disconnect()
        if number is None:
            self._deadline = float("inf")
            return
        self._send(number)
        self._deadline = time.monotonic() + (_FOLLOW_SECONDS if number == signal.SIGTERM else _KILL_SECONDS)

    def _on_signal(self, number: int) -> None:
        if not self._is_running:
            name = signal.Signals(number).name
            exit_now(code_before_training(number), f"stopped by {name} while no node trains; nothing is lost")
        now, is_repeated = time.monotonic(), self.signal_number is not None
        if is_repeated and now - self._signalled_at <= REPEAT_SECONDS:
            return
        # The launchers tell a first signal from a second, and kill ranks that do not end in time.
        self._deadline = now + _FOLLOW_SECONDS + (0 if is_repeated else SAVE_SECONDS)
        self.signal_number, self._signalled_at, self._remaining_measures = number, now, [signal.SIGKILL]
        self._send(number)

    def _send(self, number: int) -> None:
        for node in self._nodes:
            node.send(number)

    def _print(self, node: NodeClient, line: str) -> None:
        try:
            print(f"{node.name}: {line}", flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._is_cut_off = True
            self._send(signal.SIGTERM)


def _is_disconnect(code: int) -> bool:
    return code == SSH_FAILED or code < 0


def describe_nodes(nodes: Sequence[NodeClient]) -> str:
    """The names of the first four nodes, and the number of the others."""
    shown = ", ".join(node.name for node in nodes[:4])
    return shown if len(nodes) <= 4 else f"{shown} and {counted(len(nodes) - 4, 'other node')}"
