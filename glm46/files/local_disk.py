"""Resolved paths, checks of folders whose files a program maps as memory, and free space of disks."""

import errno
import os
import shutil
from pathlib import Path

_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.s3fs",
    "fuse.sshfs",
    "gfs2",
    "glusterfs",
    "fuse.glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "panfs",
    "smb3",
    "smbfs",
    "wekafs",
}
"""Types of file systems whose files are on other machines, as in /proc/self/mounts."""


def real_path(path: Path | str) -> Path:
    """Return the absolute path without links. `Path.resolve` raises RuntimeError for a loop of links before Python
    3.13; here the loop stays in the path, and the first use of the file reports it."""
    return Path(os.path.realpath(path))


def leads_nowhere(path: Path) -> bool:
    """Return True if nothing is at the end of a path, or its links form a loop."""
    try:
        os.stat(real_path(path))  # a glob can produce more links than stat follows, in folders that link to each other
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ELOOP)
    return False


def space_fault(folder: Path, nbytes: float) -> str | None:
    """Return the reason why a new folder of this size does not fit its disk; None if it fits."""
    parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(parent).free
    if nbytes <= free:
        return None
    return f"{folder}: takes {nbytes:,.0f} bytes, but {parent} has {free:,} free; choose another disk"


def local_disk_fault(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the reason why the files of a folder cannot be used as memory; None if they can. ``mounts``: the table of
    mounted file systems, which tests replace."""
    if not folder.is_dir():
        return "no such folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "the folder cannot be written"
    kind = network_file_system(folder, mounts)
    return f"on a network file system ({kind})" if kind else None


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the network file system that holds a folder; empty if another kind holds it."""
    rows = [line.split() for line in mounts.read_text().splitlines()]
    points = {
        Path(row[1].encode().decode("unicode_escape")): row[2] for row in rows
    }  # the last of several mounts is visible
    kind = next((points[place] for place in (real_path(folder), *real_path(folder).parents) if place in points), "")
    return kind if kind in _NETWORK else ""
