"""In place of ssh: the command runs on this machine, in a session of its own with an environment of its own, and its
input and outputs go through this process, as those of a command on another machine go through ssh."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

UNREACHABLE = "127.0.0.9"


def write_ssh(folder: Path) -> Path:
    """Make the executable ``ssh`` in a folder, which a test puts first on PATH; returns the folder."""
    folder.mkdir(parents=True)
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} "$@"\n')
    program.chmod(0o755)
    return folder


def main() -> None:
    host, command = sys.argv[sys.argv.index("--") + 1 :]
    if "BatchMode=yes" not in sys.argv or host.endswith(UNREACHABLE):
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    print("Welcome!")  # as a login may say
    sys.stdout.flush()
    there = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "FAKE_SSH_HOST": host}, start_new_session=True,
    )  # fmt: skip

    def send() -> None:
        with suppress(BrokenPipeError):  # ssh is silent about input that a command which has ended did not read
            while data := os.read(0, 4096):
                os.write(there.stdin.fileno(), data)
        with suppress(BrokenPipeError):
            there.stdin.close()

    threading.Thread(target=send, daemon=True).start()
    while data := os.read(there.stdout.fileno(), 4096):
        os.write(1, data)
    code = there.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
