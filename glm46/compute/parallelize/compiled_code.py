"""Repair of Inductor's cache after a process that compiled was killed."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from glm46 import compat
from glm46.files.local_disk import real_path

_BINARIES = (".so", ".o")
_GENERATED_SUFFIXES = (*_BINARIES, ".a", ".gch", ".cpp", ".h")
_ELF_HEADER_BYTES = 64

_repaired_folders: set[Path] = set()
"""Folders that this process has repaired. A process that compiles several networks looks at them once."""


def repair_compiled_code() -> None:
    """Remove damaged files from Inductor's cache, so that torch compiles them again.

    From then on, this process's own builds appear in the cache only when they are complete. Files of other users stay.
    A file that a live process has open stays: it is not damaged but incomplete.
    """
    compat.publish_compiled_files_whole()
    for folder in compat.compiled_code_folders() - _repaired_folders:
        if folder.is_dir():
            with _locked(folder):
                remove_damaged(folder)
        _repaired_folders.add(folder)


def remove_damaged(folder: Path) -> list[Path]:
    """Remove this user's empty and truncated files of compiled code below a folder. Returns their paths."""
    removed = []
    for file in sorted(folder.rglob("*")):
        if file.suffix not in _GENERATED_SUFFIXES or not _is_ours(file) or not is_damaged(file):
            continue
        if _is_being_written(file):
            continue  # its writer holds torch's lock, for which every other process waits
        # Its writer may have completed it since the first look.
        if is_damaged(file):
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed


def is_damaged(file: Path) -> bool:
    """True for an empty file, and for an object file or library that ends before its ELF section header table."""
    try:
        size = file.stat().st_size
        if size == 0:
            return True
        if file.suffix not in _BINARIES or os.uname().sysname != "Linux":
            return False
        with file.open("rb") as stream:
            header = stream.read(_ELF_HEADER_BYTES)
    except FileNotFoundError:
        return False
    if len(header) < _ELF_HEADER_BYTES or header[:4] != b"\x7fELF":
        return True
    # e_shoff, e_shentsize and e_shnum of Elf64_Ehdr. Linkers write the table last, at the end of the file.
    table_start: int = struct.unpack_from("=Q", header, 0x28)[0]
    entry_bytes: int
    entries: int
    entry_bytes, entries = struct.unpack_from("=HH", header, 0x3A)
    return table_start == 0 or table_start + entry_bytes * entries > size


def _is_ours(file: Path) -> bool:
    """True for a regular file of this user."""
    with suppress(FileNotFoundError):
        return file.lstat().st_uid == os.getuid() and not file.is_symlink() and file.is_file()
    return False


def _is_being_written(file: Path) -> bool:
    """True if a process of this user has the file open. Without /proc the answer is always False."""
    target = str(real_path(file))
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # the process ended, or is another user's
            for descriptor in descriptors.iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) == target:
                        return True
    return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time repair a folder. The system drops the lock of a process that dies.

    Continues without the lock if another user owns the folder or the lock file, or if the file system has no locks.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stream = stack.enter_context((folder / "glm46_repair.lock").open("w"))
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
