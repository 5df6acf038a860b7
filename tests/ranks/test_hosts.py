"""`HOSTFILE=... ./run_train.sh` with two nodes of one rank on this machine, and a stand-in for ssh."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from glm46.commands.environment import unfit_packages
from glm46.config.loader import dump_config
from tests.fake_ssh import UNREACHABLE, write_ssh
from tests.ranks.interrupts import MARK, left_behind
from tests.ranks.test_launch import ROOT, end, free_port, losses, wait_for_step


@pytest.fixture
def start(tmp_path):
    """A function that starts run_train.sh with the hosts of some lines; all that it starts has a mark."""
    mark, path = uuid.uuid4().hex, os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if unfit_packages():
        pytest.skip("this interpreter lacks a dependency, and a test must not make the script install one")
    shell = write_ssh(tmp_path / "bin")

    def run(config, *lines: str, options: tuple[str, ...] = (), **keys) -> subprocess.Popen:
        (tmp_path / "hosts").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "run.toml").write_text(dump_config(config))
        variables = {
            "PATH": f"{shell}{os.pathsep}{path}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark,
            "HOSTFILE": "hosts", "CONFIG_FILE": "run.toml", "MASTER_PORT": free_port(),
        }  # fmt: skip
        overrides = [token for key, value in keys.items() for token in (f"--{key.replace('__', '.')}", str(value))]
        with (tmp_path / "output").open("w") as file:
            process = subprocess.Popen(
                [ROOT / "run_train.sh", *options, *overrides], env=os.environ | variables, cwd=tmp_path,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        process.output, process.mark = tmp_path / "output", mark
        return process

    yield run
    left = left_behind(mark)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


NODES = ("localhost slots=1", "me@127.0.0.2 slots=1  # the same machine again")


def test_a_signal_saves_on_all_nodes_and_the_same_command_goes_on(make_config, start):
    config = make_config(training={"steps": 400}, checkpoint={"interval": 1000})
    process = start(config, *NODES)
    wait_for_step(config, 3, process)
    os.kill(process.pid, signal.SIGUSR1)
    output = end(process)
    assert process.returncode == 75 and "Traceback" not in output, output
    assert re.search(r"^localhost: .*continues from here", output, re.MULTILINE), output
    stopped = losses(config)[-1][0]
    process = start(config, *NODES, training__steps=stopped + 2)
    output = end(process)
    assert process.returncode == 0 and f"resumed after step {stopped}" in output, output
    assert [step for step, _ in losses(config)] == list(range(1, stopped + 3))
    assert re.search(r"^localhost: Next: train longer  HOSTFILE=hosts CONFIG_FILE=run.toml ", output, re.MULTILINE)


def test_a_killed_rank_restarts_the_ranks_of_all_nodes_while_a_restart_is_left(make_config, start):
    saves = {"interval": 2, "async_mode": "disabled"}
    config = make_config(training={"steps": 1_000_000}, checkpoint=saves)
    process = start(config, *NODES, options=("--max-restarts", "1"))
    wait_for_step(config, 5, process)
    os.kill(ranks(process.mark)[-1], signal.SIGKILL)
    log, until = Path(config.job.dump_folder) / "log.txt", time.monotonic() + 60
    while "resumed after step" not in log.read_text():
        assert process.poll() is None and time.monotonic() < until, process.output.read_text()
        time.sleep(0.05)
    wait_for_step(config, losses(config)[-1][0] + 2, process)
    os.kill(ranks(process.mark)[0], signal.SIGKILL)
    output = end(process)
    assert process.returncode == 1, output
    assert re.search(
        r"^error: (localhost|127.0.0.2): ended with exit code 1; all nodes are stopped$", output, re.MULTILINE
    )
    for _, _, name in (node.partition(" ")[0].rpartition("@") for node in NODES):
        assert f"\n{name}: restart 1 of 1, from the checkpoint of step" in output, output
        assert f"\n{name}: error: no restart is left of 1" in output, output


def ranks(mark: str) -> list[int]:
    """Process ids of the ranks of all nodes, in the order of their start."""
    return [
        process
        for process in sorted(left_behind(mark))
        if b"\0train\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]


def test_a_killed_command_leaves_no_process_on_any_node(make_config, start):
    config = make_config(training={"steps": 1_000_000}, checkpoint={"interval": 1_000_000})
    process = start(config, *NODES)
    wait_for_step(config, 3, process)
    process.kill()
    process.wait()
    until = time.monotonic() + 20
    while left_behind(process.mark):
        assert time.monotonic() < until, "a process outlived the command"
        time.sleep(0.1)


def test_faults_are_found_on_all_nodes_before_one_starts(make_config, start):
    config = make_config(checkpoint={"load_step": 3})
    process = start(config, *NODES, f"{UNREACHABLE} slots=1", "127.0.0.3 slots=1", training__global_batch_size=8)
    output = end(process)
    lines = output.splitlines()
    assert process.returncode == 2 and len(lines) == 2, output
    assert lines[0].startswith("error: localhost: checkpoint.load_step = 3: no such checkpoint")
    assert lines[1].startswith(f"error: {UNREACHABLE}: cannot be reached: ") and "No route to host" in lines[1]

    process = start(config, *NODES, training__seq_len=1)  # a fault of the config: once, and before any connection
    assert end(process).count("training.seq_len = 1") == 1 and process.returncode == 2
    assert not Path(config.job.dump_folder).exists()
