"""`HOSTFILE=... ./run_train.sh` with two nodes of one rank on this machine, and a stand-in for ssh."""

import os
import re
import shutil
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
from tests.processes import free_port, is_rank, wait_until
from tests.ranks.interrupts import MARK, left_behind
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


def test_lost_nodes_are_replaced_by_a_spare_and_then_by_fewer_replicas(make_config, start, server, tmp_path):
    """Of two nodes first the second is cut off, within a step that may last minutes: nothing of it answers. Then the
    first is lost: its rank is killed and its launcher answers no more. All losses equal, bit for bit, those of runs
    without a fault: on both meshes."""
    shared = {
        "training": {"steps": 1_000_000, "local_batch_size": 2, "global_batch_size": 4},
        "checkpoint": {"interval": 2, "async_mode": "disabled", "keep_latest_k": 0},
        "lr_scheduler": {"total_tokens": 100_000},
    }
    replicas = {"parallelism": {"data_parallel_replicate_degree": 2}, "fault_tolerance": {"min_replicas": 1}}
    config = make_config(**shared, **replicas, comm={"hang_seconds": 100.0})
    hosts = [f"127.0.0.{number} slots=1" for number in (1, 2, 3)]
    process = start(config, *hosts, options=("--nodes", "2", "--max-restarts", "5"))
    wait_for_step(config, 5, process)
    lose("127.0.0.2", process.mark, signal.SIGSTOP)
    wait_for_resumes(config, 1, process)
    wait_for_step(config, losses(config)[-1][0] + 3, process)
    on_two = dict(losses(config))
    lose("127.0.0.1", process.mark)
    wait_for_resumes(config, 2, process)
    resumed = int(re.findall(RESUMED, log(config))[-1])
    wait_for_step(config, resumed + 3, process)
    os.kill(process.pid, signal.SIGTERM)
    output = end(process)
    kill_all(left_behind(process.mark))
    assert process.returncode == 75, output
    assert "without 127.0.0.2 from now on, 1 spare host in place" in output, output
    assert "goes on with 1 replica of the model, on 127.0.0.3" in output, output
    state = (tmp_path / "hosts.state").read_text()
    assert "lost_hosts='127.0.0.2 127.0.0.1'" in state and f"newest_step={losses(config)[-1][0]}\n" in state

    found, last = dict(losses(config)), losses(config)[-1][0]
    assert sorted(found) == list(range(1, last + 1))
    quiet = {**shared, "training": {**shared["training"], "steps": max(on_two)}}
    undisturbed = make_config(job={"dump_folder": str(tmp_path / "quiet")}, **quiet, **replicas)
    launch_here(server, undisturbed, "2")
    assert dict(losses(undisturbed)) == on_two | {step: found[step] for step in on_two if step <= resumed}

    # A run of one replica from that checkpoint.
    folder = next(Path(config.job.dump_folder, "checkpoint").glob(f"step-*{resumed}"))
    shutil.copytree(folder, tmp_path / "one" / "checkpoint" / folder.name)
    shared["training"] = {**shared["training"], "steps": last}
    one = make_config(job={"dump_folder": str(tmp_path / "one")}, **shared)
    launch_here(server, one, "1")
    assert dict(losses(one)) == {step: loss for step, loss in found.items() if step > resumed}


def launch_here(server, config, processes: str) -> None:
    """Train on this machine, in ranks of one thread, as the nodes' are: some sums depend on the number of threads."""
    file = Path(config.job.dump_folder).with_suffix(".toml")
    file.write_text(dump_config(config))
    launched = server.start("forked_launch.launch", "--config", str(file), "--nproc", processes)
    assert end(launched) and launched.returncode == 0, launched.output.read_text()


def lose(host: str, mark: str, number: int = signal.SIGKILL) -> None:
    """End a node as a power cut does, as far as one machine can: its ranks get a signal, and its launcher neither ends
    nor answers."""
    there = [pid for pid in left_behind(mark) if f"FAKE_SSH_HOST={host}".encode() in variables_of(pid)]
    ranks = [pid for pid in there if is_rank(pid)]
    kill_all(set(there) - set(ranks), signal.SIGSTOP)
    kill_all(ranks, number)


def kill_all(processes: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def variables_of(process: int) -> list[bytes]:
    """Of a process; none if it has ended meanwhile."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


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


def test_faults_are_found_on_all_nodes_before_one_starts(make_config, start):
    config = make_config(checkpoint={"load_step": 3})
    process = start(config, *NODES, f"{UNREACHABLE} slots=1", "127.0.0.3 slots=1", training__global_batch_size=8)
    output = end(process)
    first, *lines = output.splitlines()
    assert process.returncode == 2 and len(lines) == 2 and first.startswith("starting     "), output
    assert lines[0].startswith("error: localhost: checkpoint.load_step = 3: no such checkpoint")
    assert lines[1].startswith(f"error: {UNREACHABLE}: cannot be reached: ") and "No route to host" in lines[1]

    process = start(config, *NODES, training__seq_len=1)  # a fault of the config: once, and before any connection
    assert end(process).count("training.seq_len = 1") == 1 and process.returncode == 2
    assert not Path(config.job.dump_folder).exists()
