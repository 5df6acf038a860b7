"""`HOSTFILE=... ./run_train.sh` with two nodes of one rank on this machine, and a stand-in for ssh."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from glm46.config.loader import dump_config
from glm46.operate.launch.environment import unfit_packages
from tests.fake_ssh import UNREACHABLE, write_ssh
from tests.processes import MARK, free_port, is_rank, left_behind, wait_until
from tests.ranks.test_launch import RESUMED, ROOT, end, losses, wait_for_step


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
            "HOSTFILE": "hosts", "CONFIG_FILE": "run.toml", "MASTER_PORT": str(free_port(behind=40)),
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
    try:
        wait_until(lambda: not left_behind(mark), "a process outlived the command")  # its end takes a moment
    finally:
        kill_all(left_behind(mark))


NODES = ("localhost slots=1", "me@127.0.0.2 slots=1  # the same machine again")


def test_a_signal_saves_on_all_nodes_and_the_same_command_goes_on(make_config, start):
    config = make_config(training={"steps": 100_000}, checkpoint={"interval": 100_000})
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


def kill_all(processes: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def log(config) -> str:
    return (Path(config.job.dump_folder) / "log.txt").read_text()


def wait_for_resumes(config, count: int, process) -> None:
    """Until the run has gone on from a checkpoint so many times."""

    def has_resumed() -> bool:
        assert process.poll() is None, process.output.read_text()
        return len(re.findall(RESUMED, log(config))) >= count

    wait_until(has_resumed, process.output.read_text)


def test_a_killed_command_leaves_no_process_on_any_node(make_config, start):
    config = make_config(training={"steps": 1_000_000}, checkpoint={"interval": 1_000_000})
    process = start(config, *NODES)
    wait_for_step(config, 3, process)
    process.kill()
    process.wait()
    wait_until(lambda: not left_behind(process.mark), "a process outlived the command")


def test_a_killed_rank_starts_all_nodes_again(make_config, start):
    """From the newest checkpoint, with the losses of a run that nothing disturbs."""
    shared = {"checkpoint": {"interval": 2, "keep_latest_k": 0}, "lr_scheduler": {"total_tokens": 100_000}}
    config = make_config(training={"steps": 100_000}, **shared)
    process = start(config, *NODES, options=("--max-restarts", "5"))
    wait_for_step(config, 5, process)
    before = dict(losses(config))
    os.kill([pid for pid in left_behind(process.mark) if is_rank(pid)][-1], signal.SIGKILL)
    wait_for_resumes(config, 1, process)
    wait_for_step(config, max(before) + 2, process)
    os.kill(process.pid, signal.SIGTERM)
    output = end(process)
    assert process.returncode == 75, output
    assert output.count("was ended by SIGKILL") == 1 and output.count("all nodes are stopped") == 1, output
    assert "restart 1 of 5, from the checkpoint of step" in output, output
    after = dict(losses(config))
    assert sorted(after) == list(range(1, max(after) + 1))
    assert all(before[step] == after[step] for step in before)


def test_faults_are_found_before_a_node_trains(make_config, start):
    config = make_config(checkpoint={"load_step": 3})
    process = start(config, *NODES, f"{UNREACHABLE} slots=1", "127.0.0.3 slots=1", training__global_batch_size=8)
    output = end(process)
    first, fault = output.splitlines()
    assert process.returncode == 2 and first.startswith("starting     "), output
    assert fault.startswith(f"error: {UNREACHABLE}: cannot be reached: ") and "No route to host" in fault

    process = start(config, *NODES, training__global_batch_size=8)
    output = end(process)
    assert process.returncode == 2, output
    assert output.count("error: checkpoint.load_step = 3: no such checkpoint") == 1, output
    assert "localhost: error: checkpoint.load_step = 3" in output
    assert "error: localhost: ended with exit code 2; all nodes are stopped" in output

    process = start(config, *NODES, training__seq_len=1)  # a fault of the config: once, and before any connection
    assert end(process).count("training.seq_len = 1") == 1 and process.returncode == 2
    assert not Path(config.job.dump_folder).exists()
