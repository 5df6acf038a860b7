"""Hostfiles: a host on each line, in the form that DeepSpeed and Open MPI read."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError

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
    """Processes to start; None if the line does not say."""

    @property
    def login(self) -> str:
        """The destination for ssh."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_hostfile(path: Path, option: str = "--hostfile") -> list[Host]:
    """The hosts of lines such as ``root@node001 slots=8``, in order; ``#`` begins a comment, empty lines are skipped.

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
    hosts, faults = [], []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_parse(number, *words))
        except ValueError as error:
            faults.append(f"{option} {path}, line {number}: {error}; write NAME slots=N, or NAME alone")
    if len(faults) > _FAULTS_SHOWN:
        more = f"{option} {path}: {len(faults) - _FAULTS_SHOWN} more lines have other forms; state a file of hosts"
        faults[_FAULTS_SHOWN:] = [more]
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
        found = re.fullmatch(r"slots=(\d+)", option)
        if found is None or int(found[1]) < 1:
            raise ValueError(f"{option[:40]!r}: expected slots=N, with N of at least 1")
        slots = int(found[1])
    return Host(number, name, user or None, slots)
