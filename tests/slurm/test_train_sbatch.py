"""The job scripts of `deploy/slurm` under a real Slurm on this machine, two nodes of one rank: `pytest -m slurm`."""

import json
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
from tests.ranks.forked_launch import is_rank
from tests.slurm.cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing()), reason=missing())]

ROOT = Path(__file__).parents[2]
STEPS = 150


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    one = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=4)
    try:
        one.start()
        yield one
    finally:
        one.stop()


class Job:
    """One job of a shipped script, in the folder of a run of its own.

    Args:
        words: overrides of the config.
        seen: the folder as the nodes see it, if at another place.
        nodes: of the allocation of a job with spares; 0 for the script without.
        ranks: on each node.
        options: of sbatch.
        checks: begin with a preflight.
    """

    def __init__(
        self, cluster: SlurmCluster, folder: Path, config, *words: str,
        seen: Path | None = None, nodes: int = 0, ranks: int = 1, options: tuple[str, ...] = (), checks: bool = False,
    ):  # fmt: skip
        self._cluster, self._folder = cluster, folder
        folder.mkdir(exist_ok=True)
        table = config.job.model_copy(update={"dump_folder": str((seen or folder) / "run")})
        (folder / "run.toml").write_text(dump_config(config.model_copy(update={"job": table})))
        variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "CONFIG_FILE": str(folder / "run.toml"), "NGPU": str(ranks), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        variables |= {"GLM46_JOBS": str(folder / "jobs"), "PREFLIGHT": str(int(checks))}
        output = f"--output={folder}/%x-%j.log"
        script = ["deploy/slurm/train.sbatch"]
        if nodes:
            script, variables["NODES"] = [f"--nodes={nodes}", "deploy/slurm/spares.sbatch"], "2"
        command = ("sbatch", "--parsable", output, *options, *script, *words)
        self.number = cluster.call(*command, cwd=ROOT, **variables).strip()

    def state(self) -> dict[str, str]:
        """What Slurm says of the job."""
        return dict(re.findall(r"(\w+)=(\S*)", self._cluster.call("scontrol", "show", "job", self.number)))

    def rows(self) -> list[dict]:
        file = self._folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows() if "loss" in row]

    def output(self) -> str:
        return "".join(file.read_text() for file in self._folder.glob("*.log"))

    def wait(self, what: Callable[[], bool], seconds: float = 240) -> float:
        """Wait until this is so. Returns the time that it took."""
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < seconds, f"{self.state()}\n{self.output()}"
            time.sleep(0.2)
        return time.monotonic() - began

    def has_ended(self) -> bool:
        return self.state()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.mark.parametrize("script", sorted(ROOT.glob("deploy/slurm/*.sbatch")), ids=lambda path: path.name)
def test_slurm_takes_the_options_of_the_shipped_scripts(cluster, script):
    assert cluster.call("sbatch", "--test-only", str(script), cwd=ROOT) == ""  # what it says goes to stderr


def test_a_refused_job_and_a_cancelled_one_are_not_requeued(cluster, make_config, tmp_path):
    config = make_config(training={"steps": 100_000})
    refused = Job(cluster, tmp_path / "refused", config, "--training.seq_len", "0", checks=True)
    refused.wait(refused.has_ended)
    assert (refused.state()["ExitCode"], refused.state()["Restarts"]) == ("2:0", "0"), refused.output()
    assert "training.seq_len" in refused.output() and "preflight ended with exit code 2" in refused.output()

    cancelled = Job(cluster, tmp_path / "cancelled", config)
    cancelled.wait(lambda: len(cancelled.losses()) >= 3)
    cluster.call("scancel", cancelled.number)
    cancelled.wait(cancelled.has_ended)
    cluster.wait_for_nodes(len(cluster.nodes))  # the script has ended too
    time.sleep(3)  # Slurm looks for jobs that can start every two seconds
    assert (cancelled.state()["JobState"], cancelled.state()["Restarts"]) == ("CANCELLED", "0"), cancelled.output()
    assert [*(tmp_path / "refused/jobs").iterdir(), *(tmp_path / "cancelled/jobs").iterdir()] == []


@pytest.fixture
def config(make_config):
    return make_config(training={"steps": STEPS}, checkpoint={"interval": 20})


@pytest.fixture(scope="module")
def known() -> dict[str, list]:
    return {}


@pytest.fixture
def expected(cluster, config, tmp_path, known) -> list[tuple[int, float]]:
    """The losses of a job that nothing disturbs."""
    if not known:
        undisturbed = Job(cluster, tmp_path / "undisturbed", config)
        undisturbed.wait(undisturbed.has_ended)
        state = undisturbed.state()
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), undisturbed.output()
        known["losses"] = undisturbed.losses()
        assert [step for step, _ in known["losses"]] == list(range(1, STEPS + 1))
    return known["losses"]


def test_a_stopped_job_goes_on_as_an_undisturbed_one(cluster, config, expected, tmp_path):
    # What --signal=B:USR1@300 does before the time limit.
    stopped = Job(cluster, tmp_path / "stopped", config)
    stopped.wait(lambda: len(stopped.losses()) >= 30)
    cluster.call("scancel", "--signal=USR1", "--batch", stopped.number)
    check_same_after_a_requeue(stopped, "the signal", expected)


def test_jobs_of_one_name_go_on_one_after_another(cluster, config, expected, tmp_path):
    """Where requeue is forbidden."""
    options = ("--no-requeue", "--dependency=singleton", "--job-name=chain")
    first, second, third = (Job(cluster, tmp_path / "chain", config, options=options) for _ in range(3))
    first.wait(lambda: len(first.losses()) >= 30)
    cluster.call("scancel", "--signal=USR1", "--batch", first.number)
    second.wait(second.has_ended)
    third.wait(third.has_ended, 20)
    assert [job.state()["JobState"] for job in (first, second, third)] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert first.state()["ExitCode"] == "75:0" and re.search(r"resumed after step \d+", second.output())
    assert second.losses() == expected and list((tmp_path / "chain/jobs").iterdir()) == []


def test_a_job_goes_on_behind_its_time_limit(cluster, make_config, tmp_path):
    """Slurm sends the signal up to a minute early, so after 35 s or more of the two minutes."""
    config = make_config(training={"steps": 1_000_000}, checkpoint={"interval": 1_000_000})
    job = Job(cluster, tmp_path / "job", config, options=("--time=2", "--signal=B:USR1@25"))
    report("from the start to the requeue at the time limit", job.wait(lambda: job.state()["Restarts"] == "1"))
    saved = job.losses()[-1][0]
    job.wait(lambda: job.losses()[-1][0] > saved + 3)
    cluster.call("scancel", job.number)
    job.wait(job.has_ended)
    cluster.wait_for_nodes(len(cluster.nodes))
    steps = [step for step, _ in job.losses()]
    assert f"resumed after step {saved}" in job.output() and steps == list(range(1, steps[-1] + 1))


def test_several_ranks_of_each_node_go_on_after_one_is_killed(cluster, config, expected, tmp_path):
    """Within the allocation. They compute what one rank of each node computes, with sums in another order."""
    halved = config.training.model_copy(update={"local_batch_size": 1})
    job = Job(cluster, tmp_path / "job", config.model_copy(update={"training": halved}), ranks=2)
    job.wait(lambda: len(job.losses()) >= 30)
    found = ranks(cluster, "n2")
    assert len(found) == len(ranks(cluster, "n1")) == 2
    os.kill(found[-1], signal.SIGKILL)
    report("from the kill of a rank to the resume", job.wait(lambda: "resumed after step" in job.output()))
    job.wait(job.has_ended)
    assert (job.state()["JobState"], job.state()["Restarts"]) == ("COMPLETED", "0"), job.output()
    assert [step for step, _ in job.losses()] == list(range(1, STEPS + 1))
    # Sums of FP32 numbers in another order, which later steps amplify.
    assert dict(job.losses()[:20]) == pytest.approx(dict(expected[:20]), rel=1e-3)


def test_a_preempted_job_goes_on_as_an_undisturbed_one(cluster, config, expected, tmp_path):
    preempted = Job(cluster, tmp_path / "preempted", config)
    preempted.wait(lambda: len(preempted.losses()) >= 30)
    options = ("--partition=urgent", f"--nodes={len(cluster.nodes)}", "--exclusive", f"--output={tmp_path}/urgent.log")
    cluster.call("sbatch", *options, "--wrap=sleep 3")
    check_same_after_a_requeue(preempted, "the urgent job", expected)


def check_same_after_a_requeue(job: Job, event: str, expected: list[tuple[int, float]]) -> None:
    report(f"from {event} to the requeue", job.wait(lambda: job.state()["Restarts"] == "1"))
    report("from the requeue to the start", job.wait(lambda: job.state()["JobState"] == "RUNNING"))
    job.wait(job.has_ended)
    assert job.state()["JobState"] == "COMPLETED", job.output()
    resumed = re.search(r"resumed after step (\d+)", job.output())
    assert resumed and 30 <= int(resumed[1]) < STEPS, job.output()
    assert job.losses() == expected


def test_a_job_without_its_first_node_goes_on_as_an_undisturbed_one(cluster, config, expected, tmp_path):
    """The first node also runs the script. Another one takes its place."""
    bereft = Job(cluster, tmp_path / "bereft", config)
    bereft.wait(lambda: len(bereft.losses()) >= 50)
    cluster.kill_node("n1")
    report("from the loss to the requeue", bereft.wait(lambda: bereft.state()["Restarts"] == "1"))
    report("from the requeue to the start", bereft.wait(lambda: bereft.state()["JobState"] == "RUNNING"))
    assert bereft.state()["NodeList"] == "n[2-3]"
    bereft.wait(bereft.has_ended)
    cluster.begin_node("n1")
    assert bereft.state()["JobState"] == "COMPLETED", bereft.output()
    assert re.search(r"resumed after step \d+", bereft.output()), bereft.output()
    assert bereft.losses() == expected


def test_spares_of_an_allocation_replace_a_lost_and_a_cut_off_node(cluster, config, expected, tmp_path):
    """Two of four nodes train. One is lost, and the one in its place is cut off from the network."""
    cluster.wait_for_nodes(4)
    job = Job(cluster, tmp_path / "job", config, nodes=4)

    def goes_on(count: int) -> float:
        return job.wait(lambda: job.output().count("resumed after step") == count)

    job.wait(lambda: len(job.losses()) >= 30)
    cluster.kill_node("n2")
    report("from the loss to the resume on a spare", goes_on(1))
    job.wait(lambda: len(job.losses()) >= 70)
    cluster.set_link("n3", "down")
    report("from the cut to the resume on a spare", goes_on(2))
    report("until the ranks of the node that was cut off have ended", job.wait(lambda: not ranks(cluster, "n3")))
    cluster.set_link("n3", "up")
    job.wait(job.has_ended)
    assert (job.state()["JobState"], job.state()["Restarts"]) == ("COMPLETED", "0"), job.output()
    assert job.losses() == expected
    assert "without n2 from now on, 1 spare host in place" in job.output()
    # Slurm may end the connection to n3 before n1 has missed its answer.
    n3_left = r"without n3 from now on, 1 spare host in place|n3 changes its place with a spare host"
    assert re.search(n3_left, job.output()), job.output()
    cluster.begin_node("n2")
    cluster.wait_for_nodes(4)


def test_a_job_without_spares_left_is_requeued_without_its_lost_nodes(cluster, config, tmp_path):
    cluster.wait_for_nodes(4)
    job = Job(cluster, tmp_path / "job", config, nodes=3)
    job.wait(lambda: len(job.losses()) >= 10)
    cluster.kill_node("n2")
    cluster.kill_node("n3")
    job.wait(lambda: job.state()["Restarts"] == "1")
    job.wait(lambda: job.state()["ExcNodeList"] in ("n[2-3]", "n2,n3", "n3,n2"), 20)
    cluster.call("scancel", job.number)
    for host in ("n2", "n3"):
        cluster.begin_node(host)
    job.wait(job.has_ended)
    assert "without n2 n3 from now on, 1 spare host in place" in job.output() or "and no spare" in job.output()


def test_setup_cluster_asks_the_nodes_of_an_allocation_and_its_job_script_trains(cluster, make_config, tmp_path):
    cluster.wait_for_nodes(4)
    (tmp_path / "run.toml").write_text(dump_config(make_config()))
    words = ["scripts/setup_cluster.sh", "--type", "slurm", "--nodes", "2", "--gpus-per-node", "1"]
    words += ["--master-addr", "n2", "--nvme-path", f"{tmp_path}/nvme", "--config", f"{tmp_path}/run.toml"]
    words += ["--output", f"{tmp_path}/cluster"]
    variables = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "GLM46_JOBS": str(tmp_path / "jobs"),
    }
    options = ("--wait", "--nodes=3", "--exclusive", f"--output={tmp_path}/setup.log")
    cluster.call("sbatch", *options, "--wrap", shlex.join(words), seconds=120, cwd=ROOT, **variables)
    said = (tmp_path / "setup.log").read_text()
    assert (tmp_path / "nvme").is_dir() and all(f"\n{host}: glm46" in f"\n{said}" for host in ("n1", "n2", "n3")), said
    assert (tmp_path / "cluster/hostfile").read_text() == "n2 slots=1\nn1 slots=1\nn3 slots=1\n"

    options = ("--wait", f"--output={tmp_path}/job.log")
    cluster.call("sbatch", *options, f"{tmp_path}/cluster/submit_job.slurm", seconds=120, cwd=ROOT, **variables)
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4], (tmp_path / "job.log").read_text()


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
    cluster.wait_for_nodes(len(cluster.nodes))
    one = Storage(cluster, tmp_path)
    yield one
    one.signal(signal.SIGKILL)
    one.unmount()


def test_a_job_whose_storage_is_lost_is_requeued_and_waits_for_it(cluster, storage, config, expected):
    """First every access fails, and three saves in a row. Then the folder is an empty one, from which a start would
    begin at step 0; the next start of the job knows that there were checkpoints."""
    job = Job(cluster, storage.folder, config, seen=storage.seen)
    wait_for_checkpoint(job)
    storage.signal(signal.SIGKILL)
    report("from the loss to the requeue", job.wait(lambda: job.state()["Restarts"] == "1"))
    storage.unmount()
    job.wait(lambda: "waiting for storage" in job.output())
    time.sleep(3)
    storage.mount()
    report("from the return to the resume", job.wait(lambda: "resumed after step" in job.output()))
    job.wait(job.has_ended)
    assert (job.state()["JobState"], job.state()["Restarts"]) == ("COMPLETED", "1"), job.output()
    assert job.losses() == expected


def test_a_job_whose_storage_hangs_trains_on(cluster, storage, config, expected):
    """Longer than comm.hang_seconds: rows, heartbeat and checkpoints wait in threads, and no rank is ended."""
    job = Job(cluster, storage.folder, config, seen=storage.seen)

    def steps() -> list[int]:
        return [int(step) for step in re.findall(r"step {2,}(\d+)", job.output())]

    wait_for_checkpoint(job)
    storage.signal(signal.SIGSTOP)
    time.sleep(1)
    before = max(steps())
    report("from the hang to the tenth step after it", job.wait(lambda: max(steps()) > before + 10, 60))
    time.sleep(2 * config.comm.hang_seconds)
    storage.signal(signal.SIGCONT)
    report("from the return to the end", job.wait(job.has_ended))
    assert (job.state()["JobState"], job.state()["Restarts"]) == ("COMPLETED", "0"), job.output()
    assert "no progress for" not in job.output() and "resumed after step" not in job.output()
    assert job.losses() == expected


def wait_for_checkpoint(job: Job) -> None:
    """Wait until the launchers have seen one."""
    job.wait(lambda: len(job.losses()) >= 45)
    time.sleep(3)


def ranks(cluster: SlurmCluster, host: str) -> list[int]:
    """The ranks on a node."""
    return [process for process in cluster.processes(host) if is_rank(process)]


def report(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s")
