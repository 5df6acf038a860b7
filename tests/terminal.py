"""Stand-ins for the machine: standard output that is a terminal, and a disk that is full."""

import ctypes
import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.processes import wait_until


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Standard output is a terminal inside of this context; the function returns what it has shown so far."""
    screen, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    shown, output = bytearray(), os.fdopen(slave, "w")

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while content := os.read(screen, 65536):
                shown.extend(content)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def text() -> str:
        before = shown.count(0)
        output.write("\0")  # has come out when all before it has
        output.flush()
        wait_until(lambda: shown.count(0) > before)
        return shown.decode(errors="replace").replace("\0", "").replace("\r\n", "\n")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "200")  # rich asks file descriptor 1 for the width, which is not this terminal
        patch.setattr("sys.stdout", output)
        yield text
    output.close()
    reader.join(5)
    os.close(screen)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB, and a function that gives it another size, where this process may mount one."""
    mount, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    mount.mkdir()
    if libc.mount(b"none", bytes(mount), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    remount = 32  # MS_REMOUNT
    yield mount, lambda size: libc.mount(b"none", bytes(mount), b"tmpfs", remount, f"size={size}".encode())
    libc.umount2(bytes(mount), 2)
