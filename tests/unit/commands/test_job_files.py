"""Files for job systems under deploy/: PBS by stubs, since no PBS server is at hand; Kubernetes and SkyPilot by tables
of their fields. Slurm's run under a real one (tests/slurm)."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from glm46.commands.torchrun import EXIT_USER_ERROR, SAVE_SECONDS
from glm46.reliability.stop import EXIT_DIVERGED, EXIT_HANG, EXIT_STOPPED

DEPLOY = Path(__file__).parents[3] / "deploy"
PBS = DEPLOY / "pbs" / "train.pbs"

# Options of qsub that a directive may hold, with the form of their values. Source: OpenPBS, doc/man1/qsub.1B and
# pbs_resources.7B.
PBS_DIRECTIVES = {
    "-N": r"[A-Za-z0-9]\S{0,235}",
    "-r": "y|n",
    "-j": "oe|eo|n",
    "-l": r"select=\d+(:(ncpus|ngpus|mpiprocs|ompthreads|mem)=\w+)+|place=(free|pack|scatter|vscatter)(:(excl|exclhost|"
    r"shared))?|walltime=\d+:\d\d:\d\d",
}


def test_directives_of_pbs_are_legal():
    lines = [line.split() for line in PBS.read_text().splitlines() if line.startswith("#PBS")]
    assert len(lines) == 6
    for _, option, value in lines:
        assert re.fullmatch(PBS_DIRECTIVES[option], value), (option, value)


JOB = """Job Id: 42.server
    Job_Name = mine
    queue = big
    Resource_List.place = scatter:excl
    Resource_List.select = 3:ncpus=96:ngpus=8:
\tmpiprocs=1
    Resource_List.walltime = {walltime}
"""


@pytest.fixture
def pbs(tmp_path):
    """A function that starts the script as PBS does, with stubs of qstat, qsub and run_train.sh. Its arguments: the
    code and the state of the run, which ends by itself or waits for a signal."""
    programs = {
        "bin/qstat": 'cat "$PBS_O_WORKDIR/job"',
        "bin/qsub": 'printf "%s\\n" "$@" > "$PBS_O_WORKDIR/submitted"; printf "%s\\n" 43.server',
        "run_train.sh": """echo "$@" > arguments; cat "$HOSTFILE" > hosts
[ -z "$STATE" ] || echo "$STATE" > "$HOSTFILE.state"
if [ -n "$WAITS" ]; then trap 'echo USR1 > got; exit 75' USR1; trap 'echo TERM > got; exit 75' TERM
touch ready; while :; do sleep 0.02; done; fi
exit "$CODE\"""",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("n1.site\nn1.site\nn2.site\nn3.site\n")

    def start(code: int = 0, state: str = "", walltime: str = "48:00:00", **variables: str) -> subprocess.Popen:
        for name in ("submitted", "got", "ready"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "job").write_text(JOB.format(walltime=walltime))
        own = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PBS_O_WORKDIR": str(tmp_path),
            "PBS_JOBID": "42.server", "PBS_NODEFILE": str(tmp_path / "nodes"),
            "CODE": str(code), "STATE": state, "CONFIG_FILE": "my.toml",
        }  # fmt: skip
        command = ["bash", str(PBS)]
        return subprocess.Popen(
            command, env=own | variables, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def submitted(folder: Path) -> dict[str, str]:
    """Options of qsub by their names; its script under ''."""
    words = (folder / "submitted").read_text().splitlines()
    names = [words[i] if words[i] != "-l" else words[i + 1].partition("=")[0] for i in range(0, len(words) - 1, 2)]
    return dict(zip(names, words[1:-1:2], strict=True)) | {"": words[-1]}


def test_a_job_of_pbs_that_was_stopped_is_submitted_again_with_its_request(pbs, tmp_path):
    job = pbs(EXIT_STOPPED, "newest_step=7", NODES="2", OVERRIDES="--training.steps 9")
    assert job.wait() == EXIT_STOPPED, job.stdout.read()
    assert (tmp_path / "arguments").read_text().split() == shlex.split(
        "--nodes 2 --max-restarts 100 --training.steps 9"
    )
    assert (tmp_path / "hosts").read_text().split() == ["n1.site", "n2.site", "n3.site"]
    found = submitted(tmp_path)
    assert (found["-N"], found["-q"], found[""]) == ("mine", "big", str(PBS))
    assert found["select"] == "select=3:ncpus=96:ngpus=8:mpiprocs=1"
    assert (found["place"], found["walltime"]) == ("place=scatter:excl", "walltime=48:00:00")
    variables = dict(pair.split("=", 1) for pair in found["-v"].split(","))
    assert variables["GLM46_RUN"] == "42" and variables["NODES"] == "2" and variables["CONFIG_FILE"] == "my.toml"
    assert variables["OVERRIDES"] == "--training.steps 9"

    # The second and the third job have made no new checkpoint.
    assert pbs(EXIT_STOPPED, "newest_step=7", GLM46_RUN="42", PBS_JOBID="43.server").wait() == EXIT_STOPPED
    assert (tmp_path / "submitted").exists()
    job = pbs(EXIT_STOPPED, "newest_step=7", GLM46_RUN="42", PBS_JOBID="44.server")
    assert job.wait() == EXIT_STOPPED and "without a new checkpoint" in job.stdout.read()
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize(
    ("code", "state", "is_submitted"),
    [
        (0, "newest_step=9", False),
        (EXIT_USER_ERROR, "", False),
        (1, "newest_step=9\nlost_hosts=''", False),
        (1, "newest_step=9\nlost_hosts=n2.site", True),
        (EXIT_HANG, "newest_step=9\nlost_hosts='n2.site n3.site'", True),
    ],
)
def test_a_job_of_pbs_is_submitted_again_where_other_nodes_can_help(pbs, tmp_path, code, state, is_submitted):
    assert pbs(code, state).wait() == code
    assert (tmp_path / "submitted").exists() is is_submitted
    assert bool(list(tmp_path.glob("glm46-42.*"))) is is_submitted  # else nothing is left


def test_a_job_of_pbs_saves_before_its_walltime_and_is_not_submitted_again_after_qdel(pbs, tmp_path):
    job = pbs(state="newest_step=7", walltime="00:00:02", SAVE_SECONDS="1", WAITS="1")
    assert job.wait(10) == EXIT_STOPPED and (tmp_path / "got").read_text() == "USR1\n"
    assert (tmp_path / "submitted").exists()
    job = pbs(state="newest_step=7", WAITS="1")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == EXIT_STOPPED and (tmp_path / "got").read_text() == "TERM\n"
    assert not (tmp_path / "submitted").exists()


def test_a_job_of_slurm_is_requeued_until_three_starts_have_made_no_checkpoint(tmp_path):
    """With stubs of srun, which leaves what the launcher writes, and of scontrol; a real Slurm runs tests/slurm."""
    (tmp_path / "bin").mkdir()
    srun = 'echo "newest_step=$NEWEST" > "$GLM46_STATE"; exit "$CODE"'
    programs = {"bin/srun": srun, "bin/scontrol": 'echo "$@" >> requeued', "run_train.sh": ""}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(code: int, newest: int) -> tuple[bool, str]:
        (tmp_path / "requeued").unlink(missing_ok=True)
        own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        command = ["bash", str(DEPLOY / "slurm" / "train.sbatch")]
        own |= {"CODE": str(code), "NEWEST": str(newest)}
        end = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=20)
        assert end.returncode == code
        return (tmp_path / "requeued").exists(), end.stderr

    assert run(EXIT_STOPPED, 7) == run(EXIT_STOPPED, 7) == run(EXIT_STOPPED, 9) == run(EXIT_STOPPED, 9) == (True, "")
    is_requeued, said = run(EXIT_STOPPED, 9)
    assert not is_requeued and "three starts of this job without a new checkpoint" in said
    for code in (0, 1, EXIT_USER_ERROR, EXIT_HANG):
        assert run(code, 9) == (False, "") and not list(tmp_path.glob("glm46-7.*"))


def test_pods_start_the_script_with_time_to_save_and_mistakes_end_the_job():
    """Checked once against the schemas of Kubeflow Trainer's resources; here what must fit to this program."""
    runtime, job = yaml.safe_load_all((DEPLOY / "kubernetes" / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert set(job["spec"]["trainer"]) <= {
        "args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"
    }  # fmt: skip
    assert job["spec"]["trainer"]["command"] == ["./run_train.sh"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = node["template"]["spec"]
    (rule,) = pods["podFailurePolicy"]["rules"]
    pod = pods["template"]["spec"]
    (container,) = pod["containers"]
    assert rule["onExitCodes"]["values"] == [EXIT_USER_ERROR, EXIT_DIVERGED] and rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container["name"] == node["name"] == "node"  # Trainer's own names
    assert pod["terminationGracePeriodSeconds"] > SAVE_SECONDS and pod["restartPolicy"] == "Never"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (policy,) = runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"]
    assert policy == {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


# Source: SkyPilot 0.14, get_task_schema of sky/utils/schemas.py.
SKYPILOT = {
    "name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets", "volumes", "config"
}  # fmt: skip


def test_skypilot_starts_the_script_and_recovers_what_job_systems_requeue():
    task = yaml.safe_load((DEPLOY / "skypilot" / "train.yaml").read_text())
    assert set(task) <= SKYPILOT
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED, EXIT_HANG]
    assert task["run"].startswith("./run_train.sh ")
    (folder,) = task["volumes"]
    assert f"--job.dump_folder {folder}/" in task["run"]
