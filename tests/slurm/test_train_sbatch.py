"""The job scripts of `deploy/slurm` under a real Slurm on this machine, two nodes of one rank: `pytest -m slurm`.

Every job that goes on is compared with a job of the same mesh that nothing disturbs: all losses, bit for bit.
"""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.engine.observe.history import ROWS_FILE, read_history
from glm46.storage.checkpoint.integrity import published_steps
from tests.builders import small_config
from tests.processes import is_rank
from tests.slurm.cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing()), reason=missing())]

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
STEPS = 150
RESUMED = re.compile(r"resumed after step (\d+)")

Losses = list[tuple[int, float]]
"""Each with its step, in the order of the file."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    one = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=5)
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(autouse=True)
def restored(cluster) -> Iterator[None]:
    """The next test gets all nodes idle, also after a failure."""
    yield
    cluster.restore()


class Job:
    """One job of a shipped script, in the folder of a run of its own.

    Args:
        words: overrides of the config.
        seen: the folder as the nodes see it, if at another place.
        ranks: on each node.
        options: of sbatch.
        checks: begin with a preflight.
    """

    def __init__(
        self, cluster: SlurmCluster, folder: Path, config: RunConfig, *words: str,
        seen: Path | None = None, ranks: int = 1, options: tuple[str, ...] = (), checks: bool = False,
    ):  # fmt: skip
        self._cluster, self._folder = cluster, folder
        folder.mkdir(exist_ok=True)
        variables = {
            "PATH": PATH, "CONFIG_FILE": str(write_config(config, folder, (seen or folder) / "run")),
            "NGPU": str(ranks), "OMP_NUM_THREADS": "1", "GLM46_JOBS": str(folder / "jobs"),
            "PREFLIGHT": str(int(checks)),
        }  # fmt: skip
        command = (
            "sbatch",
            "--parsable",
            f"--output={folder}/%x-%j.log",
            *options,
            "deploy/slurm/train.sbatch",
            *words,
        )
        self.number = cluster.call(*command, cwd=ROOT, **variables).strip()

    def state(self) -> dict[str, str]:
        """What Slurm says of the job."""
        return dict(re.findall(r"(\w+)=(\S*)", self._cluster.call("scontrol", "show", "job", self.number)))

    def losses(self) -> Losses:
        return losses_in(self._folder / "run")

    def output(self) -> str:
        return "".join(file.read_text() for file in self._folder.glob("*.log"))

    def resumes(self) -> list[int]:
        """Steps after which the run has been resumed."""
        return [int(step) for step in RESUMED.findall(self.output())]

    def wait(self, what: Callable[[], bool], seconds: float = 240) -> float:
        """Wait until this is so. Returns the time that it took."""
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < seconds, f"{self.state()}\n{self.output()}"
            time.sleep(0.2)
        return time.monotonic() - began

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: bool(self.losses()) and self.losses()[-1][0] >= step)

    def has_ended(self) -> bool:
        return self.state()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def wait_for_completion(self, restarts: int) -> None:
        """Wait until all is trained, after so many starts by Slurm besides the first one."""
        self.wait(self.has_ended)
        state = self.state()
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", str(restarts)), self.output()

    def report_requeue(self, event: str) -> None:
        """Wait until the job was requeued, and starts again, after an event just now."""
        report(f"from {event} to the requeue", self.wait(lambda: self.state()["Restarts"] == "1"))
        report("from the requeue to the start", self.wait(lambda: self.state()["JobState"] == "RUNNING"))


def write_config(config: RunConfig, folder: Path, dump_folder: Path) -> Path:
    """Write the TOML of a run with this dump folder; returns its path."""
    job = config.job.model_copy(update={"dump_folder": str(dump_folder)})
    (folder / "run.toml").write_text(dump_config(config.model_copy(update={"job": job})))
    return folder / "run.toml"


def losses_in(dump_folder: Path) -> Losses:
    file = dump_folder / ROWS_FILE
    return [(row["step"], row["loss"]) for row in read_history(file) if "loss" in row] if file.exists() else []


def undisturbed(cluster: SlurmCluster, folder: Path, config: RunConfig, *words: str, ranks: int = 1) -> Losses:
    """The losses of a job that nothing disturbs."""
    job = Job(cluster, folder, config, *words, ranks=ranks)
    job.wait_for_completion(restarts=0)
    losses = job.losses()
    assert not job.resumes() and [step for step, _ in losses] == list(range(1, STEPS + 1)), job.output()
    return losses


@pytest.fixture(scope="module")
def config(source_folder, tmp_path_factory) -> RunConfig:
    tables = {"training": {"steps": STEPS}, "checkpoint": {"interval": 20}, "comm": {"hang_seconds": 8.0}}
    return small_config(source_folder, tmp_path_factory.mktemp("unused"), **tables)


@pytest.fixture(scope="module")
def expected(cluster, config, tmp_path_factory) -> Losses:
    """Of two nodes of one rank."""
    return undisturbed(cluster, tmp_path_factory.mktemp("undisturbed"), config)


@pytest.mark.parametrize("script", sorted(ROOT.glob("deploy/slurm/*.sbatch")), ids=lambda path: path.name)
def test_slurm_takes_the_options_of_the_shipped_scripts(cluster, script):
    assert cluster.call("sbatch", "--test-only", str(script), cwd=ROOT) == ""  # what it says goes to stderr


def test_a_refused_job_and_a_cancelled_one_are_not_requeued(cluster, config, tmp_path):
    refused = Job(cluster, tmp_path / "refused", config, "--training.seq_len", "0", checks=True)
    refused.wait(refused.has_ended)
    assert (refused.state()["ExitCode"], refused.state()["Restarts"]) == ("2:0", "0"), refused.output()
    assert "training.seq_len" in refused.output() and "preflight ended with exit code 2" in refused.output()

    cancelled = Job(cluster, tmp_path / "cancelled", config, "--training.steps", "100000")
    cancelled.wait_for_step(3)
    cluster.call("scancel", cancelled.number)
    cancelled.wait(cancelled.has_ended)
    # A later job that needs all nodes: the script has ended, and Slurm has looked for jobs that wait.
    options = ("--wait", f"--nodes={len(cluster.nodes)}", "--exclusive", f"--output={tmp_path}/later.log")
    cluster.call("sbatch", *options, "--wrap=true", seconds=60)
    assert (cancelled.state()["JobState"], cancelled.state()["Restarts"]) == ("CANCELLED", "0"), cancelled.output()
    assert [*(tmp_path / "refused/jobs").iterdir(), *(tmp_path / "cancelled/jobs").iterdir()] == []


def test_a_stopped_job_goes_on_as_an_undisturbed_one(cluster, config, expected, tmp_path):
    # What --signal=B:USR1@300 does before the time limit.
    stopped = Job(cluster, tmp_path / "stopped", config)
    stopped.wait_for_step(30)
    cluster.call("scancel", "--signal=USR1", "--batch", stopped.number)
    check_same_after_a_requeue(stopped, "the signal", expected)


def test_jobs_of_one_name_go_on_one_after_another(cluster, config, expected, tmp_path):
    """Where requeue is forbidden."""
    options = ("--no-requeue", "--dependency=singleton", "--job-name=chain")
    first, second, third = (Job(cluster, tmp_path / "chain", config, options=options) for _ in range(3))
    first.wait_for_step(30)
    cluster.call("scancel", "--signal=USR1", "--batch", first.number)
    second.wait(second.has_ended)
    third.wait(third.has_ended)
    assert [job.state()["JobState"] for job in (first, second, third)] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert first.state()["ExitCode"] == "75:0" and min(second.resumes(), default=0) >= 30
    assert second.losses() == expected and list((tmp_path / "chain/jobs").iterdir()) == []


def test_a_job_goes_on_behind_its_time_limit(cluster, config, tmp_path):
    """Slurm sends the signal up to a minute early, so after 35 s or more of the two minutes. The undisturbed job trains
    beside it on other nodes, because the number of steps depends on the machine."""
    words = ("--training.steps", "1000000", "--checkpoint.interval", "1000000")
    job = Job(cluster, tmp_path / "job", config, *words, options=("--time=2", "--signal=B:USR1@25"))
    twin = Job(cluster, tmp_path / "twin", config, *words)
    report("from the start to the requeue at the time limit", job.wait(lambda: job.state()["Restarts"] == "1"))
    saved = job.losses()[-1][0]
    job.wait_for_step(saved + 20)
    cluster.call("scancel", job.number)
    job.wait(job.has_ended)
    losses = job.losses()
    twin.wait_for_step(losses[-1][0])
    assert saved in job.resumes(), job.output()
    assert twin.state()["Restarts"] == "0" and not twin.resumes(), twin.output()
    assert losses == twin.losses()[: len(losses)]


def test_several_ranks_of_each_node_go_on_after_one_is_killed(cluster, config, expected, tmp_path):
    """Within the allocation. They compute what one rank of each node computes, with sums in another order."""
    halved = ("--training.local_batch_size", "1")
    same_mesh = undisturbed(cluster, tmp_path / "undisturbed", config, *halved, ranks=2)
    job = Job(cluster, tmp_path / "job", config, *halved, ranks=2)
    job.wait_for_step(30)
    found = ranks(cluster, "n2")
    assert len(found) == len(ranks(cluster, "n1")) == 2
    os.kill(found[-1], signal.SIGKILL)
    report("from the kill of a rank to the resume", job.wait(lambda: bool(job.resumes())))
    job.wait_for_completion(restarts=0)
    assert job.losses() == same_mesh
    # Sums of FP32 numbers in another order, which later steps amplify.
    assert dict(same_mesh[:20]) == pytest.approx(dict(expected[:20]), rel=1e-3)


def test_a_preempted_job_goes_on_as_an_undisturbed_one(cluster, config, expected, tmp_path):
    preempted = Job(cluster, tmp_path / "preempted", config)
    preempted.wait_for_step(30)
    options = ("--partition=urgent", f"--nodes={len(cluster.nodes)}", "--exclusive", f"--output={tmp_path}/urgent.log")
    cluster.call("sbatch", *options, "--wrap=sleep 3")
    check_same_after_a_requeue(preempted, "the urgent job", expected)


def check_same_after_a_requeue(job: Job, event: str, expected: Losses) -> None:
    job.report_requeue(event)
    job.wait_for_completion(restarts=1)
    assert job.resumes() and 30 <= job.resumes()[0] < STEPS, job.output()
    assert job.losses() == expected


def test_a_job_without_its_first_node_goes_on_as_an_undisturbed_one(cluster, config, expected, tmp_path):
    """The first node also runs the script. Another one takes its place."""
    bereft = Job(cluster, tmp_path / "bereft", config)
    bereft.wait_for_step(50)
    cluster.kill_node("n1")
    bereft.report_requeue("the loss")
    assert bereft.state()["NodeList"] == "n[2-3]"
    bereft.wait_for_completion(restarts=1)
    assert bereft.resumes() and bereft.losses() == expected, bereft.output()


def test_setup_cluster_asks_the_nodes_of_an_allocation_and_its_job_script_trains(cluster, config, expected, tmp_path):
    words = ["scripts/setup_cluster.sh", "--type", "slurm", "--nodes", "2", "--gpus-per-node", "1"]
    words += ["--master-addr", "n2", "--nvme-path", f"{tmp_path}/nvme", "--output", f"{tmp_path}/cluster"]
    words += ["--config", str(write_config(config, tmp_path, tmp_path / "out"))]
    variables = {"PATH": PATH, "OMP_NUM_THREADS": "1", "GLM46_JOBS": str(tmp_path / "jobs")}
    options = ("--wait", "--nodes=3", "--exclusive", f"--output={tmp_path}/setup.log")
    cluster.call("sbatch", *options, "--wrap", shlex.join(words), seconds=240, cwd=ROOT, **variables)
    said = (tmp_path / "setup.log").read_text()
    assert (tmp_path / "nvme").is_dir() and all(f"\n{host}: glm46" in f"\n{said}" for host in ("n1", "n2")), said
    assert (tmp_path / "cluster/hostfile").read_text() == "n2 slots=1\nn1 slots=1\n"

    options = ("--wait", f"--output={tmp_path}/job.log")
    cluster.call("sbatch", *options, f"{tmp_path}/cluster/submit_job.slurm", seconds=240, cwd=ROOT, **variables)
    assert losses_in(tmp_path / "out") == expected, (tmp_path / "job.log").read_text()


class Storage:
    """A folder that each node sees through a mount of its own, as one of a network disk."""

    def __init__(self, cluster: SlurmCluster, folder: Path):
        self._cluster, self.folder, self.seen = cluster, folder / "disk", folder / "seen"
        self.folder.mkdir()
        self.seen.mkdir()
        self.mount()

    def mount(self) -> None:
        self._servers = [self._cluster.mount(host, self.folder, self.seen) for host in self._cluster.nodes]

    def unmount(self) -> None:
        for host in self._cluster.nodes:
            self._cluster.unmount(host, self.seen)

    def signal(self, number: int) -> None:
        """Send a signal to the servers."""
        for server in self._servers:
            server.send_signal(number)


@pytest.fixture
def storage(cluster, tmp_path) -> Iterator[Storage]:
    one = Storage(cluster, tmp_path)
    yield one
    one.signal(signal.SIGKILL)
    one.unmount()


def test_a_job_whose_storage_is_lost_is_requeued_and_waits_for_it(cluster, storage, config, expected):
    """First every access fails, and three saves in a row. Then the folder is an empty one, from which a start would
    begin at step 0; the next start of the job knows that there were checkpoints."""
    job = begin_on(cluster, storage, config)
    storage.signal(signal.SIGKILL)
    report("from the loss to the requeue", job.wait(lambda: job.state()["Restarts"] == "1"))
    storage.unmount()
    job.wait(lambda: "waiting for storage" in job.output())
    time.sleep(3)
    assert not job.resumes() and job.state()["JobState"] == "RUNNING", job.output()
    storage.mount()
    report("from the return to the resume", job.wait(lambda: bool(job.resumes())))
    job.wait_for_completion(restarts=1)
    assert job.losses() == expected


def test_a_job_whose_storage_hangs_trains_on(cluster, storage, config, expected):
    """Longer than comm.hang_seconds: rows and checkpoints wait in threads, and no rank is ended."""
    job = begin_on(cluster, storage, config)

    def step() -> int:
        return max(int(number) for number in re.findall(r"step {2,}(\d+)", job.output()))

    began = time.monotonic()
    storage.signal(signal.SIGSTOP)
    time.sleep(1)  # steps that were under way are printed
    before = step()
    job.wait(lambda: step() >= before + 10)
    report("from the hang to the tenth step after its first second", time.monotonic() - began)
    time.sleep(2 * config.comm.hang_seconds)
    storage.signal(signal.SIGCONT)
    report("from the return to the end", job.wait(job.has_ended))
    job.wait_for_completion(restarts=0)
    assert "no progress for" not in job.output() and not job.resumes()
    assert job.losses() == expected


def begin_on(cluster: SlurmCluster, storage: Storage, config: RunConfig) -> Job:
    """Start a job, and wait until its launchers have seen a checkpoint: they look every two seconds. It
    saves often, so that saves are left on a fast machine."""
    job = Job(cluster, storage.folder, config, "--checkpoint.interval", "10", seen=storage.seen)
    job.wait(lambda: bool(published_steps(storage.folder / "run/checkpoint")))
    time.sleep(3)
    return job


def ranks(cluster: SlurmCluster, host: str) -> list[int]:
    """The ranks on a node."""
    return [process for process in cluster.processes(host) if is_rank(process)]


def report(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s")
