"""The nodes of a run and the rank of this one, from NNODES and NODE_RANK, or the variables of Kubeflow, SkyPilot, Slurm
or PBS; and the faults of a hostfile, whose nodes get these variables from the command that starts them."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.operate.launch.hostfile import Host

VARIABLES = (
    "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE",
    "KUBERNETES_SERVICE_HOST", "WORLD_SIZE", "RANK",
    "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID",
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
    processes: int | None = None
    """Of each node, if Kubeflow or SkyPilot states them."""


def detect_nodes(variables: Mapping[str, str], hostname: str) -> Nodes:
    """The nodes of this run. NNODES goes before the variables of job systems; with none of them, one node.

    Args:
        variables: those of `VARIABLES` that are set, with their values.

    Raises:
        UserError: variables are missing, are not numbers, or contradict each other.
    """
    if "NNODES" in variables:
        found = _from_names(variables, "")
    else:
        systems = {
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
        nodes = {name: detect() for name, detect in systems.items() if name in variables}
        places = {(one.count, one.rank) for one in nodes.values()}
        if len(places) > 1:
            shown = ", ".join(f"{name} says node {one.rank} of {one.count}" for name, one in nodes.items())
            raise UserError(f"environment: {shown}: set NNODES, NODE_RANK and MASTER_ADDR, which go before all of them")
        found = next(iter(nodes.values()), Nodes())
    if found.count < 1 or not 0 <= found.rank < found.count:
        raise UserError(
            f"environment: node {found.rank} of {found.count}: NODE_RANK counts from 0 to NNODES - 1; set them so"
        )
    if found.count == 1:
        return Nodes(processes=found.processes)
    found = replace(
        found, host=variables.get("MASTER_ADDR", found.host), port=_number(variables, "MASTER_PORT", str(found.port))
    )
    if not found.host:
        raise UserError(f"environment: {found.count} nodes without MASTER_ADDR; set it to the name of the first node")
    if not 1 <= found.port <= LAST_PORT:
        raise UserError(f"environment: MASTER_PORT = {found.port}: must be between 1 and {LAST_PORT}; set it so")
    return found


def _from_names(variables: Mapping[str, str], prefix: str) -> Nodes:
    """Torchrun's names; Kubeflow's trainer sets them with a prefix."""
    count = _number(variables, f"{prefix}NNODES")
    # Elastic jobs of Kubeflow set no rank: each pod would be the first.
    rank = _number(variables, f"{prefix}NODE_RANK", None if prefix and count > 1 else "0")
    host, port = variables.get(f"{prefix}MASTER_ADDR", ""), _number(variables, f"{prefix}MASTER_PORT", str(_PORT))
    # Other values than numbers, such as auto, leave the choice to `launch`.
    stated = variables.get(f"{prefix}NPROC_PER_NODE", "") if prefix else ""
    processes = int(stated) or None if stated.isdecimal() else None
    return Nodes(count, rank, host, port, variables.get("SLURM_JOB_ID", "glm46"), processes)


def _pods(variables: Mapping[str, str]) -> Nodes:
    """The pods of a PyTorchJob of Kubeflow before 1.7, which counts them with torchrun's names for ranks."""
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
    count, rank = _number(variables, "SLURM_JOB_NUM_NODES", "1"), _number(variables, "SLURM_NODEID")
    return Nodes(count, rank, host, _PORT, variables.get("SLURM_JOB_ID", "glm46"))


def first_slurm_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu007`` of ``gpu[007-012,20],login1``."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[(\d+)[^\]]*\]([A-Za-z0-9._-]*))?(?:,.*)?", nodelist.strip())
    if not found:
        raise UserError(
            f"environment: SLURM_JOB_NODELIST = {nodelist!r}: cannot be parsed; set MASTER_ADDR, NNODES and NODE_RANK"
        )
    return "".join(part or "" for part in found.groups())


def pbs_hosts(file: str, remedy: str) -> list[str]:
    """The hosts of a job of PBS, which lists a host once for each of its processes."""
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


def refuse_hosts(hosts: Sequence[Host], processes: int | None, variables: Mapping[str, str], path: Path) -> None:
    """Raise the faults of a hostfile that is right line by line.

    Args:
        processes: of each node, from the command line; None if it leaves them to the hostfile.
        variables: environment variables that name nodes, see `VARIABLES`.
    """
    faults, lines = list[str](), dict[str, list[int]]()
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
    if is_loopback(first) and not all(is_loopback(host.name) for host in hosts):
        faults.append(
            f"the first host, {first}, is another machine for each node; write its name in the network, or set "
            "MASTER_ADDR to it"
        )
    if "NNODES" in variables or variables.get("SLURM_NODEID", "0") != "0":
        faults.append("this command starts all nodes and is run once; unset NNODES, or start it outside srun")
    if faults:
        raise UserError(*(f"--hostfile {path}: {fault}" for fault in faults))


def is_loopback(name: str) -> bool:
    """True if a name or address means the machine itself, on each machine another one."""
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
