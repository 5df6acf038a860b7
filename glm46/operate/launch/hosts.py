"""The nodes of a hostfile while they train: their output by node, signals to all, and the end of all when one ends."""

import os
import queue
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from glm46.config.faults import counted
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import (
    EXIT_STOPPED,
    REPEAT_SECONDS,
    SIGNALS,
    SignalListener,
    code_before_training,
    exit_now,
)
from glm46.operate.launch.host_group import allow_files_for_clients
from glm46.operate.launch.hostfile import Host
from glm46.operate.launch.node_client import ANSWER_SECONDS, HELD_LINES, SSH_FAILED, NodeClient
from glm46.operate.launch.process_end import EXIT_BROKEN_PIPE
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK, SAVE_SECONDS

_FOLLOW_SECONDS = 30.0
"""For the other nodes to end by themselves after one has failed, and then again after SIGTERM."""
_RESTART_SECONDS = 5.0
"""The same, and for an answer of a node, if another start follows: nothing is left to be saved, and launchers end the
ranks of their nodes before."""
_ASK_SECONDS = 2.0
"""Time between two questions while all train, if another start may follow."""
_SILENT_SECONDS = 8.0
"""For an answer while all train, after which a node is lost, whatever the length of a step. A launcher sleeps while its
ranks train and a thread of it answers, which takes milliseconds on busy cores too. The time leaves room for a machine
that swaps, and for the retransmissions of a TCP connection after a cut of some seconds."""
_KILL_SECONDS = 10.0
"""For nodes to end after they were told to kill their ranks."""
_LATE_SECONDS = 20.0
"""At a restart, for a node to answer after half of the nodes have: a dead one may not refuse a connection."""
_CLOSE_SECONDS = 30.0
"""For launchers to end when their connection is closed."""
_POLL_SECONDS = 0.2


class HostNodes:
    """The clients of all nodes, for one start after another. Signals that come while no node trains end all at once.

    Args:
        connection: one of `CONNECTIONS`.
        restarts: whether another start may follow a failure, so that the other nodes are ended soon.

    Attributes:
        newest_step: of the newest checkpoint that a node has reported; 0 without one.
        hung_ranks: those that the hang report of the last start names.
        failed_at: `time.time` of the first failure in the last start, as a node that still answers has reported it.
        is_final: whether another start is impossible, because a node has got a signal of its own.
        signal_number: of the last signal that was passed on; None before the first.
    """

    def __init__(self, connection: str = "ssh", *, restarts: bool = False):
        allow_files_for_clients()
        self._connection, self._restarts = connection, restarts
        self._clients: dict[Host, NodeClient] = {}
        self._nodes: list[NodeClient] = []
        self._events: queue.Queue[tuple[NodeClient, str | int]] = queue.Queue(HELD_LINES)
        self._is_running = False
        self.newest_step, self.hung_ranks, self.is_final = 0, set[int](), False
        self.failed_at: float | None = None
        self.signal_number: int | None = None
        self._signalled_at = 0.0
        self._listener = SignalListener(self._on_signal, (*SIGNALS, signal.SIGQUIT))

    def connect(self, hosts: Sequence[Host], spares: Sequence[Host], command: str, orders: Sequence[dict]) -> None:
        """Begin a start on hosts, whose launchers run already if they have taken part in a start or were spare.

        Args:
            spares: hosts whose launchers are to wait.
            command: starts the launcher of a host.
            orders: for each host that trains.

        Raises:
            UserError: the client is not installed.
        """
        self._deadline = float("inf")
        self._remaining_measures = ["kill"] if self._restarts else [signal.SIGTERM, signal.SIGKILL]
        self._is_running = self._is_cut_off = False
        self._nodes = []
        wanted = [*hosts, *spares]
        for host, client in [*self._clients.items()]:
            if host not in wanted or not client.is_connected:
                client.disconnect()
                del self._clients[host]
        self._is_new = not all(host in self._clients for host in hosts)
        for host in wanted:
            if host not in self._clients:
                self._clients[host] = NodeClient(host, command, self._connection, self._events)
        self._nodes = [self._clients[host] for host in hosts]
        for node, order in zip(self._nodes, orders, strict=True):
            node.order(**order)

    def close(self) -> None:
        """End the launchers that still run, by the end of their connections, and stop listening for signals."""
        end = time.monotonic() + _CLOSE_SECONDS
        for client in self._clients.values():
            client.close()
        for client in self._clients.values():
            client.disconnect(max(end - time.monotonic(), 0.0))
        self._listener.restore()

    def faults(self, *, is_restart: bool = False) -> dict[str, list[NodeClient]]:
        """Faults that keep nodes from starting, once all have answered, with the nodes that have each.

        Args:
            is_restart: whether nodes that answer much later than the others count as lost.
        """
        late_seconds = (_LATE_SECONDS if self._is_new else _RESTART_SECONDS) if is_restart else float("inf")
        end = time.monotonic() + ANSWER_SECONDS
        is_half_known = False
        while time.monotonic() < end and not all(node.has_answered for node in self._nodes):
            with suppress(queue.Empty):
                node, event = self._events.get(timeout=_POLL_SECONDS)
                if not node.take(event):
                    node.held.append(str(event))
            if not is_half_known and 2 * sum(node.has_answered for node in self._nodes) >= len(self._nodes):
                is_half_known, end = True, min(end, time.monotonic() + late_seconds)
        found: dict[str, list[NodeClient]] = {}
        first = next((node for node in self._nodes if node.answer), self._nodes[0])
        for node in self._nodes:
            for fault in node.faults(first):
                found.setdefault(fault, []).append(node)
        return found

    def run(self, times: StartTimes) -> int:
        """Let all nodes train, and wait for their end.

        Args:
            times: of this start.

        Returns:
            0, or the exit code of the node that failed first; EXIT_STOPPED only if no node ended otherwise.
        """
        self._is_running, self.is_final, self.hung_ranks, self.failed_at = True, False, set(), None
        self._asked_at = self._looked_at = time.monotonic()
        self._send(go=times.to_text())
        for node in self._nodes:
            while node.held:
                self._print(node, node.held.popleft())
        codes = list[int]()
        while len(codes) < len(self._nodes):
            with suppress(queue.Empty):
                node, event = self._events.get(timeout=_POLL_SECONDS)
                had_ended = node.code is not None
                if not node.take(event):
                    self._print(node, str(event)) if node in self._nodes else node.held.append(str(event))
                elif node.code is not None and not had_ended and node in self._nodes:
                    codes.append(self._end_of(node, node.code, is_first=not codes))
            self._ask()
            if time.monotonic() > self._deadline:
                self._take_measure()
        self._is_running = False
        for node in self._nodes:
            self.newest_step = max(self.newest_step, node.answer.get("newest_step", 0))
            self.failed_at = min(filter(None, (self.failed_at, node.answer.get("failed_at"))), default=None)
            self.is_final |= node.answer.get("is_final", False)
            self.hung_ranks |= set(node.answer.get("hung_ranks", ()))
        if self._is_cut_off:
            return EXIT_BROKEN_PIPE
        failed = [code for code in codes if code not in (0, EXIT_STOPPED)]
        return failed[0] if failed else max(codes)

    def processes(self) -> int:
        """Processes of each node, as the nodes have answered."""
        return self._nodes[0].answer["processes"]

    def lost_hosts(self) -> list[Host]:
        """The hosts that did not answer in the last start."""
        return [node.host for node in self._nodes if node.is_lost]

    def disconnected_hosts(self) -> list[Host]:
        """The other hosts whose connection was lost in the last start."""
        return [node.host for node in self._nodes if not node.is_lost and _is_disconnect(cast(int, node.code))]

    def first_failed_host(self) -> Host | None:
        """The host whose rank was the first to fail in the last start, by the clocks of the hosts."""
        failed = [node for node in self._nodes if node.code == EXIT_FAILED_RANK and node.answer.get("failed_at")]
        return min(failed, key=lambda node: node.answer["failed_at"]).host if failed else None

    def _end_of(self, node: NodeClient, code: int, *, is_first: bool) -> int:
        if is_first and self.signal_number is None:
            is_good = code in (0, EXIT_STOPPED)
            follow = _RESTART_SECONDS if self._restarts else _FOLLOW_SECONDS
            self._deadline = time.monotonic() + (SAVE_SECONDS if is_good else follow)
            if not is_good:
                self.failed_at = time.time()
                for other in self._nodes:
                    if other.code is None:
                        other.ask()
                how = "the connection was lost" if _is_disconnect(code) else f"ended with exit code {code}"
                if node.is_lost:
                    how = f"no answer for {_SILENT_SECONDS:.0f} s"
                    self._send(kill=True)  # the other ranks wait for its ranks, and would not end by themselves
                print(f"error: {node.name}: {how}; all nodes are stopped", file=sys.stderr, flush=True)
        return EXIT_FAILED_RANK if _is_disconnect(code) else code

    def _ask(self) -> None:
        """Ask all nodes again and again whether they are alive, and disconnect those that have owed an answer for too
        long. If most nodes are silent, their connections have failed here, and without a failure nothing follows."""
        now = time.monotonic()  # called for each line
        paused, self._looked_at = now - self._looked_at - _POLL_SECONDS, now
        if not self._restarts or self.signal_number is not None:
            return
        if paused > _POLL_SECONDS:  # this process stood still, and its threads may not have read the answers yet
            for node in self._nodes:
                node.asked_at = node.asked_at and node.asked_at + paused
        if self._events.empty():  # no answer waits to be read
            limit = now - (_SILENT_SECONDS if self.failed_at is None else _RESTART_SECONDS)
            silent = [node for node in self._nodes if node.code is None and node.asked_at and node.asked_at < limit]
            if self.failed_at or 2 * len(silent) <= len(self._nodes):
                for node in silent:
                    self._lose(node)
        if self.failed_at is None and now > self._asked_at + _ASK_SECONDS:
            self._asked_at = now
            for node in self._nodes:
                if node.code is None:
                    node.ask()

    def _lose(self, node: NodeClient) -> None:
        node.is_lost, node.asked_at = True, None
        node.disconnect()

    def _take_measure(self) -> None:
        """End nodes that have not followed: SIGTERM, then SIGKILL, then the end of the connection. A node that has not
        answered since the failure is disconnected at once."""
        measure = self._remaining_measures.pop(0) if self._remaining_measures else None
        for node in self._nodes:
            if node.code is None and (measure is None or self._restarts and node.asked_at):
                self._lose(node)
        if measure is None:
            self._deadline = float("inf")
            return
        self._send(**({"kill": True} if measure == "kill" else {"signal": measure}))
        self._deadline = time.monotonic() + (_FOLLOW_SECONDS if measure == signal.SIGTERM else _KILL_SECONDS)

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
        self._send(signal=number)

    def _send(self, **message: Any) -> None:
        for node in self._nodes:
            if node.code is None:  # a launcher without ranks would end at a signal
                node.send(**message)

    def _print(self, node: NodeClient, line: str) -> None:
        try:
            print(f"{node.name}: {line}", flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._is_cut_off = True
            self._send(signal=signal.SIGTERM)


def _is_disconnect(code: int) -> bool:
    return code == SSH_FAILED or code < 0


def describe_nodes(nodes: Sequence[NodeClient]) -> str:
    """The names of the first four nodes, and the number of the others."""
    shown = ", ".join(node.name for node in nodes[:4])
    return shown if len(nodes) <= 4 else f"{shown} and {counted(len(nodes) - 4, 'other node')}"
