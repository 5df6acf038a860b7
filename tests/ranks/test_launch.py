"""The launcher with two real ranks: it trains, stops on a signal, goes on, and names a rank that fails.

At the end `HOSTFILE=... ./run_train.sh` with two nodes of one rank on this machine, and a stand-in for ssh.
"""

import os
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from glm46.config.loader import dump_config
from glm46.operate.launch.environment import unfit_packages
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.integrity import published_steps
from tests.builders import metric_rows, small_config
from tests.fake_ssh import write_ssh
from tests.harness import Program
from tests.harness import start as start_program
from tests.processes import MARK, children_of, free_port, is_alive, is_rank, left_behind, wait_until
from tests.ranks.forked_launch import EXIT_SECONDS, launch

ROOT = Path(__file__).parents[2]
RESUMED = r"resumed after step (\d+)\D"
"""In the log of a run; with what follows, because a line is read while it is written."""


class Start:
    """How the launcher is started: as a command, or, without its seconds of imports, by fork."""

    def __init__(self, folder: Path):
        self._folder = folder

    def by_fork(self, config, *options: str, environment=(), **keys) -> Program:
        """What `as_command` does, from a process that has all imported."""
        arguments = self._arguments(config, options, keys)
        return start_program(launch, *arguments, environment=dict(environment))

    def as_command(self, config, *options: str, path_first: str = "", **keys) -> subprocess.Popen:
        """`python -m glm46 launch` on two processes, in a process group of its own, as a shell would start it."""
        arguments = self._arguments(config, options, keys)
        output = self._folder / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "glm46", "launch", *arguments],
                env=os.environ | {"PYTHONPATH": f"{path_first}:{ROOT}", "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.output = output
        return process

    def _arguments(self, config, options: tuple[str, ...], keys: dict) -> list[str]:
        config_file, draft = self._folder / "run.toml", self._folder / "draft.toml"
        draft.write_text(dump_config(config))
        os.replace(draft, config_file)  # the launcher of another node may be reading it
        overrides = [token for key, value in keys.items() for token in (f"--{key.replace('__', '.')}", str(value))]
        return ["--config", str(config_file), *(options or ("--nproc", "2")), *overrides]


@pytest.fixture
def start(tmp_path) -> Start:
    return Start(tmp_path)


def end(process: Program | subprocess.Popen) -> str:
    """What it has said, once it is through."""
    process.wait()
    return process.output.read_text()


def losses(config) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metric_rows(config.job.dump_folder, "loss")]


def log_of(config) -> str:
    return (Path(config.job.dump_folder) / "log.txt").read_text()


def wait_for_step(config, step: int, process: Program | subprocess.Popen) -> None:
    def has_step() -> bool:
        assert process.poll() is None, process.output.read_text()
        return any(row["step"] >= step for row in metric_rows(config.job.dump_folder))

    wait_until(has_step, process.output.read_text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_the_same_command_goes_on(make_config, start, number):
    config = make_config(training={"steps": 100_000}, checkpoint={"interval": 100_000})
    process = start.as_command(config) if number == signal.SIGINT else start.by_fork(config)
    wait_for_step(config, 3, process)
    if number == signal.SIGINT:  # Ctrl-C reaches every process of the terminal
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    output = end(process)
    assert process.returncode == (130 if number == signal.SIGINT else 75), output
    assert "Traceback" not in output and "continues from here" in output, output
    stopped = losses(config)[-1][0]
    saved = [int(p.name[5:]) for p in (Path(config.job.dump_folder) / "checkpoint").glob("step-*")]
    assert saved == [stopped]

    process = start.by_fork(config, training__steps=stopped + 2)
    output = end(process)
    assert process.returncode == 0, output
    assert f"resumed after step {stopped}" in output
    assert [step for step, _ in losses(config)] == list(range(1, stopped + 3))


def test_a_failing_rank_ends_the_run_with_its_traceback(make_config, start, tmp_path):
    # An exception at a random moment of training in rank 1 alone.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "def injected_fault(*_):\n"
        "    if os.environ.get('RANK') == '1': raise RuntimeError('injected into rank 1')\n"
        "signal.signal(signal.SIGALRM, injected_fault)\n"
    )
    config = make_config(training={"steps": 1_000_000}, checkpoint={"enable": False}, metrics={"log_freq": 50})
    process = start.as_command(config, path_first=str(tmp_path))
    wait_for_step(config, 50, process)
    while process.poll() is None:  # an exception in the middle of a callback is lost: then again, some steps later
        for rank in ranks_of(process):
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGALRM)
        step = losses(config)[-1][0]
        wait_until(lambda step=step: process.poll() is not None or losses(config)[-1][0] >= step + 100)
    output = end(process)  # the other rank is ended, it does not wait for its timeout
    assert process.returncode not in (0, 2), output
    assert "RuntimeError: injected into rank 1" in output and "in injected_fault" in output
    assert "rank 1" in output.splitlines()[-2] and "begins anew" in output.splitlines()[-1], output[-3000:]


def test_a_killed_rank_is_named_and_the_saved_run_goes_on(make_config, start, tmp_path):
    """By itself while a restart is left, and when the same command is given again. Prometheus sees a restart and no
    steps that nobody made."""
    # The schedule's end is stated, so that the shorter second start does not change the learning rate.
    schedule = {"total_tokens": 100_000}
    port = free_port()
    config = make_config(
        training={"steps": 100_000},
        checkpoint={"interval": 2},
        lr_scheduler=schedule,
        metrics={"prometheus_port": port},
    )
    process = start.as_command(config, "--nproc", "2", "--max-restarts", "1")
    wait_for_step(config, 5, process)
    wait_until(lambda: published_steps(Path(config.job.dump_folder) / "checkpoint"))  # on a busy machine, after step 5
    before = kill_a_rank(config, process)
    resumed = int(wait_until(lambda: re.search(RESUMED, log_of(config)), lambda: log_of(config))[1])
    wait_for_step(config, max(before) + 3, process)
    exported = scrape(port)
    assert exported["training_steps_total"] == exported["training_step"] - resumed
    before |= kill_a_rank(config, process)
    output = end(process)
    assert process.returncode == 1, output
    assert output.count("was ended by SIGKILL") == 2 and "restart 1 of 1, from the checkpoint of step" in output
    assert output.splitlines()[-1].startswith("error: no restart is left of 1; the same command goes on from the check")
    steps = max(before) + 3
    process = start.by_fork(config, training__steps=steps)
    output = end(process)
    assert process.returncode == 0, output
    after = dict(losses(config))
    assert sorted(after) == list(range(1, steps + 1))
    assert all(before[step] == after[step] for step in before)


def scrape(port: int) -> dict[str, float]:
    """Values of the series that have no label except the run's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    series = [line.partition(" ") for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in series if name.count("=") == 1}


def kill_a_rank(config, process: subprocess.Popen) -> dict[int, float]:
    """kill -9 of the last rank; returns the losses up to then."""
    before = dict(losses(config))
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    return before


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The ranks of a launcher that was started as a command."""
    return [rank for rank in children_of(process.pid) if is_rank(rank)]


LAYOUTS = {
    "shards": {}, "copies": {"parallelism__data_parallel_replicate_degree": 2},
    "experts": {"parallelism__expert_parallel_degree": 2}, "context": {"parallelism__context_parallel_degree": 2},
    "matrices": {"parallelism__tensor_parallel_degree": 2}, "layers": {"parallelism__pipeline_parallel_degree": 2},
}  # fmt: skip


COMPARED = dict(
    training={"steps": 5, "local_batch_size": 2, "global_batch_size": 8},
    validation={"enable": True, "freq": 5},
    optimizer={"name": "Muon"},
    model={"num_key_value_heads": 2},
)


@pytest.fixture(scope="module")
def of_one_process(source_folder, tmp_path_factory) -> list[dict]:
    """What one process reports."""
    config = small_config(source_folder, tmp_path_factory.mktemp("one"), **COMPARED)
    assert train(config) == 0
    return rows(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_report_what_one_process_reports(make_config, start, of_one_process, layout):
    two = make_config(**COMPARED)
    process = start.by_fork(two, **LAYOUTS[layout])
    output = end(process)
    assert process.returncode == 0, output
    expected, found = of_one_process, rows(two)
    assert len(expected) == len(found) == 7
    # Sums of FP32 numbers in another order, over five optimizer steps.
    close = {"loss", "grad_norm", "mtp_loss", "balance_loss", "validation_loss", "validation_bits_per_byte", "lr"}
    equal = {"step", "tokens", "batch_tokens", "dead_experts", "skipped_steps"}
    for row, other in zip(expected, found, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() & close:
            assert other[key] == pytest.approx(row[key], rel=1e-4), (row["step"], key)
        for key in row.keys() & equal:
            assert other[key] == row[key], (row["step"], key)
    for number, key in ((0, "validation_loss"), (1, "loss")):  # before any update
        assert found[number][key] == pytest.approx(expected[number][key], rel=1e-6)
    # A draft that flips on a tie changes the ratio by one of some hundred.
    assert found[1]["mtp_acceptance"] == pytest.approx(expected[1]["mtp_acceptance"], abs=0.01)


def rows(config) -> list[dict]:
    """Rows of metrics without what depends on the clock or the machine."""
    timed = ("seconds", "second", "device", "mfu", "gib")
    return [{k: v for k, v in row.items() if not k.endswith(timed)} for row in metric_rows(config.job.dump_folder)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_signal_to_the_launchers_of_two_nodes_has_one_code_on_both(slow, make_config, start):
    """As `srun` passes it on, which then takes the highest code. The ranks of one node exit later than the launcher of
    the other one, which may hold the store."""
    config = make_config(training={"steps": 100_000}, checkpoint={"interval": 100_000})
    names = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port(behind=9))}
    nodes = [
        start.by_fork(
            config, "--nproc", "1", environment=names | {"NODE_RANK": str(rank), EXIT_SECONDS: str(2 * (rank == slow))}
        )
        for rank in range(2)
    ]
    wait_for_step(config, 2, nodes[0])
    for node in nodes:
        os.kill(node.pid, signal.SIGUSR1)
    outputs = [end(node) for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], outputs
    assert "Traceback" not in "".join(outputs)


def test_a_node_ends_when_the_first_node_answers_no_more(make_config, start):
    """As after a cut of the network: neither the ranks nor the launcher of the first node answer, and no connection is
    reset."""
    config = make_config(training={"steps": 100_000}, checkpoint={"enable": False}, comm={"hang_seconds": 5.0})
    names = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port(behind=9))}
    nodes = [start.by_fork(config, "--nproc", "1", environment=names | {"NODE_RANK": str(rank)}) for rank in range(2)]
    wait_for_step(config, 30, nodes[0])
    first = [nodes[0].pid, *children_of(nodes[0].pid)]
    for process in first:
        os.kill(process, signal.SIGSTOP)
    try:
        nodes[1].wait()
        seen = f"exit code {nodes[1].returncode}; of the first node: {first}"
        for file in (nodes[1].output, nodes[0].output, *sorted(Path(config.job.dump_folder, "hang").glob("*.txt"))):
            seen += f"\n--- {file}\n{file.read_text()}"
        assert nodes[1].returncode == 76 and "rank 0" in nodes[1].output.read_text(), seen
    finally:
        for process in first:
            os.kill(process, signal.SIGKILL)
        nodes[0].wait()


def test_two_nodes_train_as_two_ranks_of_one(make_config, start, tmp_path):
    port, found = str(free_port(behind=9)), []
    for folder, count in (("one", 1), ("two", 2)):
        config = make_config(job={"dump_folder": str(tmp_path / folder)}, training={"steps": 4})
        names = {"NNODES": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port} if count > 1 else {}
        nodes = [
            start.by_fork(
                config, "--nproc", str(2 // count), environment=names | {"NODE_RANK": str(rank)} if names else {}
            )
            for rank in range(count)
        ]
        outputs = [end(node) for node in nodes]
        assert [node.returncode for node in nodes] == [0] * count, outputs
        found.append(losses(config))
    assert found[0] == found[1] and len(found[0]) == 4  # bit for bit


def test_one_node_listens_on_loopback_only(make_config, start):
    """Its stores have no password: who sets the key of the alarm there ends the run."""
    config = make_config(training={"steps": 100_000}, checkpoint={"enable": False})
    launcher = start.by_fork(config)
    wait_for_step(config, 2, launcher)
    found = listening({launcher.pid, *descendants(launcher.pid)})
    os.kill(launcher.pid, signal.SIGTERM)
    end(launcher)
    assert len(found) > 2 and set(found) <= {"0100007F", f"{'0' * 24}01000000"}, found


def descendants(process: int) -> set[int]:
    """Of a process, all of which live."""
    return {each for child in children_of(process) for each in (child, *descendants(child))}


def listening(processes: set[int]) -> list[str]:
    """The addresses, as in /proc/net/tcp, on which processes listen, one per socket."""
    sockets = set()
    for process in processes:
        with suppress(FileNotFoundError):  # ended meanwhile
            for link in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    sockets.add(os.readlink(link))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_a_killed_launcher_leaves_no_rank_behind(make_config, start):
    config = make_config(training={"steps": 1_000_000}, checkpoint={"enable": False}, metrics={"log_freq": 50})
    process = start.as_command(config)
    wait_for_step(config, 1, process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, ranks)), "a rank outlived its launcher")


@pytest.fixture
def start_on_hosts(tmp_path):
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


def test_a_signal_saves_on_all_hosts_and_the_same_command_goes_on(make_config, start_on_hosts):
    config = make_config(training={"steps": 100_000}, checkpoint={"interval": 100_000})
    process = start_on_hosts(config, *NODES)
    wait_for_step(config, 3, process)
    os.kill(process.pid, signal.SIGUSR1)
    output = end(process)
    assert process.returncode == 75 and "Traceback" not in output, output
    assert re.search(r"^localhost: .*continues from here", output, re.MULTILINE), output
    stopped = losses(config)[-1][0]
    process = start_on_hosts(config, *NODES, training__steps=stopped + 2)
    output = end(process)
    assert process.returncode == 0 and f"resumed after step {stopped}" in output, output
    assert [step for step, _ in losses(config)] == list(range(1, stopped + 3))
    assert re.search(r"^localhost: Next: train longer  HOSTFILE=hosts CONFIG_FILE=run.toml ", output, re.MULTILINE)


def kill_all(processes: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def wait_for_resumes(config, count: int, process) -> None:
    """Until the run has gone on from a checkpoint so many times."""

    def has_resumed() -> bool:
        assert process.poll() is None, process.output.read_text()
        return len(re.findall(RESUMED, log_of(config))) >= count

    wait_until(has_resumed, process.output.read_text)


def test_a_killed_rank_starts_all_hosts_again(make_config, start_on_hosts):
    """From the newest checkpoint, with the losses of a run that nothing disturbs."""
    shared = {"checkpoint": {"interval": 2, "keep_latest_k": 0}, "lr_scheduler": {"total_tokens": 100_000}}
    config = make_config(training={"steps": 100_000}, **shared)
    process = start_on_hosts(config, *NODES, options=("--max-restarts", "5"))
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
