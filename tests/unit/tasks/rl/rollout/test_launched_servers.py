"""Servers that a run starts: by the words of the command, again when they have ended, and never longer than the run."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from glm46.tasks.rl.rollout import launched_servers
from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
from glm46.tasks.rl.rollout.served_policy import EngineError
from tests.processes import is_alive, wait_until

PROGRAM = (
    "import os, sys, time; print(os.getpid(), *sys.argv[1:], os.environ.get('WORLD_SIZE'), flush=True); time.sleep(600)"
)
COMMAND = (sys.executable, "-c", PROGRAM, "--model={folder}", "{port}")


def words(log, count=4):
    wait_until(lambda: log.exists() and len(log.read_text().split()) >= count)
    return log.read_text().split()


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
    wait_until(lambda: not is_alive(int(second[0])))


def test_command_that_fails_is_one_message_with_its_output(tmp_path):
    command = (sys.executable, "-c", "raise SystemExit('no such option: --moddel')")
    servers = LaunchedServers(command, ["http://127.0.0.1:81"], tmp_path, print)
    servers.ensure(tmp_path)
    servers._running[81].wait()
    with pytest.raises(EngineError, match="rollout.launch") as error:
        servers.require_running()
    assert "--moddel" in str(error.value) and "exit code 1" in str(error.value)


@pytest.mark.slow
def test_server_ends_with_a_run_that_is_killed(tmp_path):
    run = f"""
import time
from pathlib import Path
from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
LaunchedServers({COMMAND!r}, ["http://127.0.0.1:81"], Path({str(tmp_path)!r}), print).ensure(Path("a"))
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", run]) as process:
        server = words(tmp_path / "server-81.log")[0]
        process.kill()
    wait_until(lambda: not is_alive(int(server)))


def test_the_end_does_not_wait_for_a_process_that_a_driver_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(launched_servers, "_STOP_SECONDS", 0.1)
    servers = LaunchedServers(COMMAND, ["http://127.0.0.1:81"], tmp_path, print)
    ended = subprocess.Popen(["true"])
    ended.wait()

    def wait(seconds: float | None) -> None:
        assert seconds is not None, "it would wait for ever"
        raise subprocess.TimeoutExpired("server", seconds)

    servers._running[81] = SimpleNamespace(pid=ended.pid, wait=wait)
    servers.stop()
