"""The first program in a sandbox with a network of its own: gives a listening socket of that network to the trainer,
and becomes the program. A script that imports the standard library alone."""

import os
import resource
import socket
import sys

_MOST_PROCESSES = 1024


def main() -> None:
    """Arguments: a port or 0, a descriptor to send its socket to, and the words of the program."""
    port, channel, *words = sys.argv[1:]
    most = min(_MOST_PROCESSES, resource.getrlimit(resource.RLIMIT_NPROC)[1])
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if int(port):
        with socket.create_server(("127.0.0.1", int(port))) as listener, socket.socket(fileno=int(channel)) as trainer:
            socket.send_fds(trainer, [b"1"], [listener.fileno()])
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}; its sandbox shows system folders, Python and rl.environment.allow")


if __name__ == "__main__":
    main()
