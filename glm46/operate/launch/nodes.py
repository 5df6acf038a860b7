"""The nodes of a run and the rank of this one, from NNODES and NODE_RANK, or the variables of Kubeflow, SkyPilot, Slurm
or PBS."""

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted

VARIABLES = (
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NPROC_PER_NODE",
    "KUBERNETES_SERVICE_HOST",
    "WORLD_SIZE",
    "RANK",
    "SKYPILOT_NUM_NODES",
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NODE_IPS",
    "SKYPILOT_NUM_GPUS_PER_NODE",
    "SKYPILOT_TASK_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NODEID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID",
    "PBS_NODEFILE",
    "PBS_JOBID",
)
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
    processes: int | None = None
    """Number of processes of each node; None if neither Kubeflow nor SkyPilot sets it."""


def detect_nodes(variables: Mapping[str, str], hostname: str) -> Nodes:
    """Find the nodes of this run. NNODES precedes the variables of job systems; without any, there is one node.

    Args:
        variables: the names in `VARIABLES` that are set, with their values.

    Raises:
        UserError: variables are missing, are not numbers, or contradict each other.
    """
    if "NNODES" in variables:
        nodes = _from_names(variables, "")
    else:
        systems: dict[str, Callable[[], Nodes]] = {
            "PET_NNODES": lambda: _from_names(variables, "PET_"),
            "WORLD_SIZE": lambda: _pods(variables),
            "SKYPILOT_NODE_IPS": lambda: _skypilot_nodes(variables),
            "SLURM_NODEID": lambda: _slurm_nodes(variables),
            "PBS_NODEFILE": lambda: _pbs_nodes(variables, hostname),
        }
        if "SLURM_JOB_NODELIST" not in variables:
            del systems["SLURM_NODEID"]
        if "PET_NNODES" in variables or not {"KUBERNETES_SERVICE_HOST", "RANK", "MASTER_ADDR"} <= set(variables):
            del systems["WORLD_SIZE"]
        candidates = {name: detect() for name, detect in systems.items() if name in variables}
        places = {(candidate.count, candidate.rank) for candidate in candidates.values()}
        if len(places) > 1:
            shown = ", ".join(
                f"{name} says node {candidate.rank} of {candidate.count}" for name, candidate in candidates.items()
            )
            raise UserError(f"environment: {shown}: set NNODES, NODE_RANK and MASTER_ADDR, which go before all of them")
        nodes = next(iter(candidates.values()), Nodes())
    if nodes.count < 1 or not 0 <= nodes.rank < nodes.count:
        raise UserError(
            f"environment: node {nodes.rank} of {nodes.count}: NODE_RANK counts from 0 to NNODES - 1; set them so"
        )
    if nodes.count == 1:
        return Nodes(processes=nodes.processes)
    host = variables.get("MASTER_ADDR", nodes.host)
    port = _number(variables, "MASTER_PORT", str(nodes.port))
    nodes = replace(nodes, host=host, port=port)
    if not nodes.host:
        raise UserError(f"environment: {nodes.count} nodes without MASTER_ADDR; set it to the name of the first node")
    if not 1 <= nodes.port <= LAST_PORT:
        raise UserError(f"environment: MASTER_PORT = {nodes.port}: must be between 1 and {LAST_PORT}; set it so")
    return nodes


def _from_names(variables: Mapping[str, str], prefix: str) -> Nodes:
    """Read the variables of torchrun; Kubeflow's trainer sets them with a prefix."""
    count = _number(variables, f"{prefix}NNODES")
    # Elastic jobs of Kubeflow set no rank: each pod would be the first.
    rank = _number(variables, f"{prefix}NODE_RANK", None if prefix and count > 1 else "0")
    host = variables.get(f"{prefix}MASTER_ADDR", "")
    port = _number(variables, f"{prefix}MASTER_PORT", str(_PORT))
    # Other values than numbers, such as auto, leave the choice to `launch`.
    nproc = variables.get(f"{prefix}NPROC_PER_NODE", "") if prefix else ""
    processes = int(nproc) or None if nproc.isdecimal() else None
    return Nodes(count, rank, host, port, variables.get("SLURM_JOB_ID", "glm46"), processes)


def _pods(variables: Mapping[str, str]) -> Nodes:
    """Read the pods of a PyTorchJob of Kubeflow before 1.7, which counts them with torchrun's variables of ranks."""
    return Nodes(_number(variables, "WORLD_SIZE"), _number(variables, "RANK"), variables["MASTER_ADDR"])


def _skypilot_nodes(variables: Mapping[str, str]) -> Nodes:
    hosts = variables["SKYPILOT_NODE_IPS"].split()
    count = _number(variables, "SKYPILOT_NUM_NODES", str(len(hosts)))
    if count != len(hosts):
        raise UserError(
            f"environment: SKYPILOT_NUM_NODES = {count}, and SKYPILOT_NODE_IPS has {len(hosts)} addresses; set NNODES, "
            "NODE_RANK and MASTER_ADDR"
        )
    gpus = _number(variables, "SKYPILOT_NUM_GPUS_PER_NODE", "0")
    job = variables.get("SKYPILOT_TASK_ID", "glm46")
    return Nodes(count, _number(variables, "SKYPILOT_NODE_RANK"), hosts[0], _PORT, job, gpus or None)


def _slurm_nodes(variables: Mapping[str, str]) -> Nodes:
    host = first_slurm_host(variables["SLURM_JOB_NODELIST"])
    count = _number(variables, "SLURM_JOB_NUM_NODES", "1")
    rank = _number(variables, "SLURM_NODEID")
    return Nodes(count, rank, host, _PORT, variables.get("SLURM_JOB_ID", "glm46"))


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``gpu007`` of ``gpu[007-012,20],login1``."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[(\d+)[^\]]*\]([A-Za-z0-9._-]*))?(?:,.*)?", nodelist.strip())
    if not match:
        raise UserError(
            f"environment: SLURM_JOB_NODELIST = {nodelist!r}: cannot be parsed; set MASTER_ADDR, NNODES and NODE_RANK"
        )
    return "".join(part or "" for part in match.groups())


def pbs_hosts(file: str, remedy: str) -> list[str]:
    """Read the hosts of a job of PBS, which lists a host once for each of its processes."""
    try:
        hosts = list(dict.fromkeys(Path(file).read_text(encoding="utf-8").split()))
    except OSError as error:
        raise UserError(f"environment: PBS_NODEFILE = {file!r}: {error.strerror}; {remedy}") from error
    if not hosts:
        raise UserError(f"environment: PBS_NODEFILE = {file!r}: names no host; {remedy}")
    return hosts


def _pbs_nodes(variables: Mapping[str, str], hostname: str) -> Nodes:
    file = variables["PBS_NODEFILE"]
    hosts = pbs_hosts(file, "set NNODES instead")
    short = [host.partition(".")[0] for host in hosts]
    if hostname.partition(".")[0] not in short:
        raise UserError(
            f"environment: this machine, {hostname!r}, is not in PBS_NODEFILE = {file!r}; set NNODES, NODE_RANK "
            "and MASTER_ADDR"
        )
    rank = short.index(hostname.partition(".")[0])
    return Nodes(len(hosts), rank, hosts[0], _PORT, variables.get("PBS_JOBID", "glm46"))


def is_loopback(name: str) -> bool:
    """Return True if a name or address means the machine itself, and so a different machine on each node."""
    return name in ("localhost", "::1") or name.startswith("127.")


def refuse_node(nodes: Nodes, processes: int | None, gpus: int) -> None:
    """Raise the faults of this host that only a run with a hostfile can have.

    Args:
        processes: number that the hostfile requests.
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
    raise_if(faults)


def _number(variables: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = variables.get(name, default)
    if text is None or not text.strip().isdecimal():
        raise UserError(f"environment: {name} = {text!r}: expected a number; set or unset it")
    return int(text)
