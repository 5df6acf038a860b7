"""The nodes of a run and the rank of this one, from NNODES and NODE_RANK, or the variables of Slurm or PBS; and the
faults of a hostfile, whose nodes get these variables from the command that starts them."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.distributed.hostfile import Host

VARIABLES = (
    "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_NUM_NODES", "SLURM_NODEID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID",
    "PBS_NODEFILE", "PBS_JOBID",
)  # fmt: skip
"""Environment variables that `detect_nodes` reads."""

_PORT = 29500
"""Port of the first node without MASTER_PORT. Source: torchrun's default."""

LAST_PORT = 2**16 - 1


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, seen from one of them."""

    count: int = 1
    rank: int = 0
    """Rank of this node; node 0 prepares the data and hosts the rendezvous."""
    host: str = "localhost"
    """Name or address of node 0."""
    port: int = _PORT
    job: str = "glm46"
    """Id of the rendezvous; separates runs that use one address."""


def detect_nodes(variables: Mapping[str, str], hostname: str) -> Nodes:
    """The nodes of this run. NNODES goes before Slurm's variables, Slurm's before PBS's; with none of them, one node.

    Args:
        variables: those of `VARIABLES` that are set, with their values.

    Raises:
        UserError: variables are missing, are not numbers, or contradict each other.
    """
    if "NNODES" in variables:
        found = _number(variables, "NNODES"), _number(variables, "NODE_RANK", "0"), variables.get("MASTER_ADDR")
        job = variables.get("SLURM_JOB_ID", "glm46")
    elif "SLURM_JOB_NODELIST" in variables and "SLURM_NODEID" in variables:
        first = first_slurm_host(variables["SLURM_JOB_NODELIST"])
        found = _number(variables, "SLURM_JOB_NUM_NODES", "1"), _number(variables, "SLURM_NODEID"), first
        job = variables.get("SLURM_JOB_ID", "glm46")
    elif "PBS_NODEFILE" in variables:
        found = _pbs_nodes(Path(variables["PBS_NODEFILE"]), hostname)
        job = variables.get("PBS_JOBID", "glm46")
    else:
        return Nodes()
    count, rank, host = found
    if count == 1:
        return Nodes()
    if count < 1 or not 0 <= rank < count:
        raise UserError(f"environment: node {rank} of {count}: NODE_RANK counts from 0 to NNODES - 1; set them so")
    host = variables.get("MASTER_ADDR", host)
    if not host:
        raise UserError(f"environment: NNODES = {count} without MASTER_ADDR; set it to the name of the first node")
    port = _number(variables, "MASTER_PORT", str(_PORT))
    if not 1 <= port <= LAST_PORT:
        raise UserError(f"environment: MASTER_PORT = {port}: must be between 1 and {LAST_PORT}; set it so")
    return Nodes(count, rank, host, port, job)


def first_slurm_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu007`` of ``gpu[007-012,20],login1``."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[(\d+)[^\]]*\]([A-Za-z0-9._-]*))?(?:,.*)?", nodelist.strip())
    if not found:
        raise UserError(
            f"environment: SLURM_JOB_NODELIST = {nodelist!r}: cannot be parsed; set MASTER_ADDR, NNODES and NODE_RANK"
        )
    return "".join(part or "" for part in found.groups())


def _pbs_nodes(file: Path, hostname: str) -> tuple[int, int, str]:
    try:
        lines = file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise UserError(f"environment: PBS_NODEFILE = {str(file)!r}: {error.strerror}; set NNODES instead") from error
    hosts = list(dict.fromkeys(lines))  # PBS lists a host once for each of its processes
    short = [host.partition(".")[0] for host in hosts]
    if hostname.partition(".")[0] not in short:
        raise UserError(
            f"environment: this machine, {hostname!r}, is not in PBS_NODEFILE = {str(file)!r}; set NNODES, NODE_RANK "
            "and MASTER_ADDR"
        )
    return len(hosts), short.index(hostname.partition(".")[0]), hosts[0]


def refuse_hosts(hosts: Sequence[Host], processes: int | None, variables: Mapping[str, str], path: Path) -> None:
    """Raise the faults of a hostfile that is right line by line.

    Args:
        processes: of each node, from the command line; None if it leaves them to the hostfile.
        variables: environment variables that name nodes, see `VARIABLES`.
    """
    faults, lines = [], {}
    for host in hosts:
        lines.setdefault(host.name.lower(), []).append(host.line)
    for name, places in lines.items():
        if len(places) > 1:
            faults.append(
                f"{name} stands on lines {', '.join(map(str, places))}; write each host once, with slots=N for its "
                "processes"
            )
    slots = {host.slots for host in hosts}
    if processes is not None and slots != {None}:
        slots.add(processes)
    if len(slots) > 1:
        shown = ", ".join("none" if number is None else str(number) for number in sorted(slots, key=lambda n: n or 0))
        faults.append(
            f"slots, NGPU and --nproc have the values {shown}; all nodes run the same number of processes: state one "
            "number, or none"
        )
    first = variables.get("MASTER_ADDR", hosts[0].name)
    if _is_loopback(first) and not all(_is_loopback(host.name) for host in hosts):
        faults.append(
            f"the first host, {first}, is another machine for each node; write its name in the network, or set "
            "MASTER_ADDR to it"
        )
    if "NNODES" in variables or variables.get("SLURM_NODEID", "0") != "0":
        faults.append("this command starts all nodes and is run once; unset NNODES, or start it outside srun")
    if faults:
        raise UserError(*(f"--hostfile {path}: {fault}" for fault in faults))


def _is_loopback(name: str) -> bool:
    return name in ("localhost", "::1") or name.startswith("127.")


def refuse_node(nodes: Nodes, processes: int | None, gpus: int) -> None:
    """Raise the faults of this host that only a run of a hostfile has.

    Args:
        processes: that the hostfile asks for.
    """
    faults = []
    if processes is not None and 0 < gpus < processes:
        faults.append(f"slots={processes}, and {counted(gpus, 'GPU')} can be used there; write slots={gpus}")
    try:
        socket.getaddrinfo(nodes.host, nodes.port)
    except OSError as error:
        faults.append(
            f"the first host of the hostfile, {nodes.host!r}, is not known there: {error.strerror}; write it with a "
            "name or address that all nodes know, or set MASTER_ADDR to one"
        )
    if faults:
        raise UserError(*faults)


def _number(variables: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = variables.get(name, default)
    if text is None or not text.strip().isdecimal():
        raise UserError(f"environment: {name} = {text!r}: expected a number; set or unset it")
    return int(text)
