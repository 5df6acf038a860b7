"""Hostfiles: a host on each line, in the form that DeepSpeed and Open MPI read."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError
from glm46.operate.launch.nodes import is_loopback

_FAULTS_SHOWN = 3
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    line: int
    name: str
    """Name or address, an IPv6 address without brackets."""
    user: str | None = None
    slots: int | None = None
    """Number of processes to start; None if the line has no ``slots``."""

    @property
    def login(self) -> str:
        """The destination for ssh."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_hostfile(path: Path, option: str = "--hostfile") -> list[Host]:
    """Read the hosts of lines such as ``root@node001 slots=8``, in order.

    ``#`` begins a comment; empty lines are skipped.

    Raises:
        UserError: the file is absent or names no host, or lines have another form.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read: {error.strerror}; state a file of hosts") from error
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        lines = ["\0"]
    if any("\0" in line for line in lines):
        raise UserError(f"{option} {path}: is not a text file; state a file of hosts")
    hosts = []
    faults = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_parse(number, *words))
        except ValueError as error:
            faults.append(f"{option} {path}, line {number}: {error}; write NAME slots=N, or NAME alone")
    if len(faults) > _FAULTS_SHOWN:
        summary = f"{option} {path}: {len(faults) - _FAULTS_SHOWN} more lines have other forms; state a file of hosts"
        faults[_FAULTS_SHOWN:] = [summary]
    if faults or not hosts:
        raise UserError(*faults or [f"{option} {path}: names no host; write one on each line, as NAME slots=N"])
    return hosts


def _parse(number: int, address: str, *options: str) -> Host:
    user, _, name = address.rpartition("@")
    if re.fullmatch(r"\[.*\]|.*:.*:.*", name):
        name = str(ipaddress.IPv6Address(name.strip("[]")))
    # A name that begins with a hyphen would be an option of ssh.
    elif not _NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is not a host name")
    if user and not _NAME.fullmatch(user):
        raise ValueError(f"{user[:40]!r} is not a user name")
    slots = None
    for option in options:
        match = re.fullmatch(r"slots=(\d+)", option)
        if match is None or int(match[1]) < 1:
            raise ValueError(f"{option[:40]!r}: expected slots=N, with N of at least 1")
        slots = int(match[1])
    return Host(number, name, user or None, slots)


def refuse_hosts(hosts: Sequence[Host], processes: int | None, variables: Mapping[str, str], path: Path) -> None:
    """Raise the faults of a hostfile whose single lines have none.

    Args:
        processes: number for each node from the command line; None if the hostfile has it.
        variables: environment variables that name nodes, see `VARIABLES`.
    """
    faults = list[str]()
    lines = dict[str, list[int]]()
    for host in hosts:
        lines.setdefault(host.name.lower(), []).append(host.line)
    for name, numbers in lines.items():
        if len(numbers) > 1:
            faults.append(
                f"{name} stands on lines {', '.join(map(str, numbers))}; write each host once, with slots=N for its "
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
