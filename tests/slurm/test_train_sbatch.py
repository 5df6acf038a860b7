"""`deploy/slurm/train.sbatch` under a real Slurm on this machine, with two nodes of one rank: `pytest -m slurm`."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm46.config.loader import dump_config
from tests.slurm.cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing()), reason=missing())]

ROOT = Path(__file__).parents[2]
STEPS = 150


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    one = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3)
    try:
        one.start()
        yield one
    finally:
        one.stop()


class Job:
    """One job of the shipped script, in the folder of a run of its own."""

    def __init__(self, cluster: SlurmCluster, folder: Path, config, *overrides: str):
        self._cluster, self._folder = cluster, folder
        folder.mkdir()
        table = config.job.model_copy(update={"dump_folder": str(folder / "run")})
        (folder / "run.toml").write_text(dump_config(config.model_copy(update={"job": table})))
        variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "CONFIG_FILE": str(folder / "run.toml"), "NGPU": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        output = f"--output={folder}/%x-%j.log"
        words = ("sbatch", "--parsable", output, "deploy/slurm/train.sbatch", *overrides)
        self.number = cluster.call(*words, cwd=ROOT, **variables).strip()

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


def test_a_refused_job_and_a_cancelled_one_are_not_requeued(cluster, make_config, tmp_path):
    config = make_config(training={"steps": 100_000})
    refused = Job(cluster, tmp_path / "refused", config, "--training.seq_len", "0")
    refused.wait(refused.has_ended)
    assert (refused.state()["ExitCode"], refused.state()["Restarts"]) == ("2:0", "0"), refused.output()
    assert "training.seq_len" in refused.output()

    cancelled = Job(cluster, tmp_path / "cancelled", config)
    cancelled.wait(lambda: len(cancelled.losses()) >= 3)
    cluster.call("scancel", cancelled.number)
    cancelled.wait(cancelled.has_ended)
    cluster.wait_for_nodes(len(cluster.nodes))  # the script has ended too
    time.sleep(3)  # Slurm looks for jobs that can start every two seconds
    assert (cancelled.state()["JobState"], cancelled.state()["Restarts"]) == ("CANCELLED", "0"), cancelled.output()


def test_a_stopped_job_and_one_that_loses_a_node_go_on_as_an_undisturbed_one(cluster, make_config, tmp_path):
    config = make_config(training={"steps": STEPS}, checkpoint={"interval": 20})
    undisturbed = Job(cluster, tmp_path / "undisturbed", config)
    undisturbed.wait(undisturbed.has_ended)
    state = undisturbed.state()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), undisturbed.output()
    expected = undisturbed.losses()
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))

    # What --signal=B:USR1@300 does before the time limit.
    stopped = Job(cluster, tmp_path / "stopped", config)
    stopped.wait(lambda: len(stopped.losses()) >= 30)
    cluster.call("scancel", "--signal=USR1", "--batch", stopped.number)
    report("from the signal to the requeue", stopped.wait(lambda: stopped.state()["Restarts"] == "1"))
    report("from the requeue to the start", stopped.wait(lambda: stopped.state()["JobState"] == "RUNNING"))
    stopped.wait(stopped.has_ended)
    assert stopped.state()["JobState"] == "COMPLETED", stopped.output()
    resumed = re.search(r"resumed after step (\d+)", stopped.output())
    assert resumed and 30 <= int(resumed[1]) < STEPS, stopped.output()
    assert stopped.losses() == expected

    # Of the three nodes, the first is lost, which also runs the script: the third takes its place.
    bereft = Job(cluster, tmp_path / "bereft", config)
    bereft.wait(lambda: len(bereft.losses()) >= 50)
    cluster.kill_node("n1")
    report("from the loss to the requeue", bereft.wait(lambda: bereft.state()["Restarts"] == "1"))
    report("from the requeue to the start", bereft.wait(lambda: bereft.state()["JobState"] == "RUNNING"))
    assert bereft.state()["NodeList"] == "n[2-3]"
    bereft.wait(bereft.has_ended)
    assert bereft.state()["JobState"] == "COMPLETED", bereft.output()
    assert re.search(r"resumed after step \d+", bereft.output()), bereft.output()
    assert bereft.losses() == expected


def report(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s")
