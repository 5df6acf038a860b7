"""Servers that a run starts: by the words of the command, again when they have ended, and never longer than the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
from glm46.tasks.rl.rollout.server_state import EngineError

PROGRAM = (
    "import os, sys, time; print(os.getpid(), *sys.argv[1:], os.environ.get('WORLD_SIZE'), flush=True); time.sleep(60)"
)
COMMAND = (sys.executable, "-c", PROGRAM, "--model={folder}", "{port}")


def words(log, count=4):
    end = time.monotonic() + 10
    while len(log.read_text().split()) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return log.read_text().split()


def gone(process):
    """Whether a process ends within 10 s. A zombie has ended: process 1, whose child it is, may wait for it late."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_one_server_for_each_address_and_again_after_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of the run's own ranks
    lines = []
    servers = LaunchedServers(COMMAND, ["http://127.0.0.1:81", "http://127.0.0.1:82"], tmp_path / "logs", lines.append)
    servers.ensure(tmp_path / "a")
    first, second = (words(tmp_path / f"logs/server-{port}.log") for port in (81, 82))
    assert first[1:] == [f"--model={tmp_path / 'a'}", "81", "None"] and second[2] == "82" and len(lines) == 2
    servers.require_running()
    os.kill(int(first[0]), signal.SIGKILL)
    servers._running[81].wait()
    servers.ensure(tmp_path / "b")
    assert words(tmp_path / "logs/server-81.log")[1] == f"--model={tmp_path / 'b'}" and len(lines) == 3
    servers.stop()
    assert gone(second[0])


def test_command_that_fails_is_one_message_with_its_output(tmp_path):
    command = (sys.executable, "-c", "raise SystemExit('no such option: --moddel')")
    servers = LaunchedServers(command, ["http://127.0.0.1:81"], tmp_path, print)
    servers.ensure(tmp_path)
    servers._running[81].wait()
    with pytest.raises(EngineError, match="rollout.launch") as error:
        servers.require_running()
    assert "--moddel" in str(error.value) and "exit code 1" in str(error.value)


def test_server_ends_with_a_run_that_is_killed(tmp_path):
    run = f"""
import time
from pathlib import Path
from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
LaunchedServers({COMMAND!r}, ["http://127.0.0.1:81"], Path({str(tmp_path)!r}), print).ensure(Path("a"))
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", run]) as process:
        while not (tmp_path / "server-81.log").exists():
            time.sleep(0.01)
        server = words(tmp_path / "server-81.log")[0]
        process.kill()
    assert gone(server)
