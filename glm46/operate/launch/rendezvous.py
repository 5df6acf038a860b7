"""Rendezvous of the launchers of several nodes, at a port of the first node."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Event

from glm46.config.errors import UserError
from glm46.files.threads import meanwhile
from glm46.operate.launch.nodes import LAST_PORT, Nodes

LOCAL_BACKEND = "glm46-local"
"""Name of `LocalRendezvous` for torchrun."""
_PREPARE_SECONDS = 3600
"""Longest wait of the other nodes for the first one, which may have data to prepare."""
_REJOIN_SECONDS = 600
"""Longest wait of a restarted node for the restart of the others."""
_REPORT_SECONDS = 5.0
"""Time between two lines about missing nodes."""
_ANSWER_SECONDS = 2.0
_RETRY_SECONDS = 0.2


def rendezvous_options(nodes: Nodes, processes: int, start: int) -> list[str]:
    """Return the options of torchrun for the n-th start: processes of this node, and the address of the first node.

    One node uses `LocalRendezvous`. Several nodes use torchrun's static rendezvous: after the start no launcher needs
    the store, which is in the launcher of the first node. With torchrun's other rendezvous the launchers read the store
    all the time: they end their ranks if the first launcher exits slightly earlier, and if the network to it is cut,
    they wait as long as nodes may take to join.
    """
    options = [f"--nnodes={nodes.count}", f"--nproc-per-node={processes}", "--max-restarts=0"]
    if nodes.count == 1:
        return [*options, f"--rdzv-backend={LOCAL_BACKEND}", "--local-addr=localhost"]
    return [
        *options,
        "--rdzv-backend=static",
        f"--node-rank={nodes.rank}",
        f"--rdzv-endpoint={nodes.host}:{_port(nodes, start)}",
        f"--rdzv-id={nodes.job}",
        f"--rdzv-conf=timeout={_seconds(start)}",
    ]


def refuse_ports(nodes: Nodes, restarts: int, exporter: int | None) -> None:
    """Refuse the ports of several nodes, one for each start, if some do not exist or the exporter would take one.

    Args:
        exporter: ``metrics.prometheus_port``.

    Raises:
        UserError: on all nodes.
    """
    last = nodes.port + restarts
    if last > LAST_PORT:
        raise UserError(
            f"environment: MASTER_PORT = {nodes.port} with --max-restarts {restarts}: each start takes the next port, "
            f"and the last is {LAST_PORT}; set MASTER_PORT to at most {LAST_PORT - restarts}"
        )
    if exporter is not None and nodes.port <= exporter <= last:
        raise UserError(
            f"metrics.prometheus_port = {exporter}: ranks meet at the ports {nodes.port} to {last} (MASTER_PORT, and "
            "the next one after each of --max-restarts); state a port outside of them"
        )


def require_free_port(nodes: Nodes, start: int) -> None:
    """Refuse the port of the n-th start if another process of the first node listens on it.

    Raises:
        UserError: on the first node; the others check nothing.
    """
    if nodes.count == 1 or nodes.rank != 0:
        return
    port = _port(nodes, start)
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"environment: MASTER_PORT = {nodes.port}: port {port} of this node cannot be used: {error.strerror}; "
            "end the process that listens there, or set MASTER_PORT to another port on all nodes"
        ) from error


def wait_for_first(nodes: Nodes, start: int, report: Callable[[str], None]) -> None:
    """Wait until the first node listens on the port of the n-th start, and report it every few seconds.

    Raises:
        UserError: it did not listen within the time that the preparation of data may take.
    """
    if nodes.rank == 0:
        return
    address = f"{nodes.host}:{_port(nodes, start)}"
    began = time.monotonic()
    reported = 0.0
    while True:
        try:
            socket.create_connection((nodes.host, _port(nodes, start)), timeout=_ANSWER_SECONDS).close()
            return
        except OSError as error:
            fault = error.strerror or str(error)
            waited = time.monotonic() - began
        if waited > _seconds(start):
            raise UserError(
                f"environment: MASTER_ADDR = {nodes.host!r}: no answer from {address} for {waited:.0f} s ({fault}); "
                "set MASTER_ADDR and MASTER_PORT to address and port of the first node, and start it"
            )
        if waited - reported >= _REPORT_SECONDS or not reported:
            reported = max(waited, _RETRY_SECONDS)
            report(f"node {nodes.rank} waits for the first node at {address}, {waited:.0f} s so far: {fault}")
        time.sleep(_RETRY_SECONDS)


@contextmanager
def reporting_missing_nodes(nodes: Nodes, has_met: Callable[[], bool], report: Callable[[str], None]) -> Iterator[None]:
    """Report every few seconds that nodes are missing, until `has_met` returns True."""

    def report_missing(end: Event) -> None:
        began = time.monotonic()
        while not end.wait(_REPORT_SECONDS) and not has_met():
            waited = time.monotonic() - began
            report(f"node {nodes.rank} waits until all {nodes.count} nodes are at {nodes.host}, {waited:.0f} s so far")

    with meanwhile(report_missing) if nodes.count > 1 else nullcontext():
        yield


def _port(nodes: Nodes, start: int) -> int:
    # One port per start: a node that restarts before the first node would join its old rendezvous.
    return nodes.port + start


def _seconds(start: int) -> int:
    return _REJOIN_SECONDS if start else _PREPARE_SECONDS
