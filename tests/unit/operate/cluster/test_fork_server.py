"""The process that forks the programs of tests."""

import socket
import subprocess
from pathlib import Path

from tests.processes import PROGRAM_SECONDS


def test_clients_that_go_before_their_request_end_no_server(warm_python):
    for sent in (b"", b"-", b"-[1, 2"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(Path(warm_python).with_name("socket")))
            client.sendall(sent)
    done = subprocess.run([warm_python, "-c", "print(1)"], capture_output=True, timeout=PROGRAM_SECONDS, check=True)
    assert done.stdout == b"1\n"
