"""Files for job systems under deploy/: PBS by stubs, since no PBS server is at hand; Kubernetes and SkyPilot by tables
of their fields. Slurm's run under a real one (tests/slurm)."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from glm46.engine.reliability.stop import EXIT_DIVERGED, EXIT_HANG, EXIT_STOPPED
from glm46.operate.launch.torchrun import EXIT_USER_ERROR, SAVE_SECONDS
from tests.processes import HANG_SECONDS, wait_until

DEPLOY = Path(__file__).parents[4] / "deploy"
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


# Options of sbatch that a directive may hold, with the form of their values. Source: Slurm 22.05, sbatch.1.
SLURM_DIRECTIVES = {
    "--job-name": r"\w+", "--nodes": r"\d+", "--ntasks-per-node": "1", "--gpus-per-node": r"\d+", "--exclusive": None,
    "--time": r"\d+-\d\d:\d\d:\d\d", "--signal": r"B:USR1@\d+", "--requeue": None,
    "--open-mode": "append", "--output": "%x-%j.log",
}  # fmt: skip


def test_directives_of_slurm_are_legal_and_let_a_job_be_requeued():
    lines = (DEPLOY / "slurm" / "train.sbatch").read_text().splitlines()
    words = [line.split(maxsplit=1)[1].partition("=") for line in lines if line.startswith("#SBATCH")]
    options = {option: value if equals else None for option, equals, value in words}
    assert len(options) == len(words)
    for option, value in options.items():
        form = SLURM_DIRECTIVES[option]
        assert value is None if form is None else re.fullmatch(form, value), (option, value)
    assert set(options) == set(SLURM_DIRECTIVES)
    assert int(options["--signal"].partition("@")[2]) >= 300  # a save, and the minute that Slurm may be early


ROOT = DEPLOY.parent
SCRIPTS = [ROOT / "run_train.sh", PBS, *sorted(ROOT.glob("deploy/slurm/*")), *sorted(ROOT.glob("scripts/*.sh"))]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_against_the_scripts():
    names = [str(path.relative_to(ROOT)) for path in SCRIPTS]
    command = ["shellcheck", "--external-sources", "--severity=warning", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("code", "dies_by"), [(0, ""), (EXIT_STOPPED, ""), (143, ""), (128 + signal.SIGKILL, "kill -KILL $$")]
)
def test_the_code_of_a_run_is_its_own_under_signals_that_arrive_until_it_has_ended(tmp_path, code, dies_by):
    """A trapped signal ends `wait` of bash with a code above 128 while the run goes on, or in the moment of its end."""
    run, ready = tmp_path / "run", tmp_path / "ready"
    run.write_text(f"""trap 'echo USR1 >> {tmp_path}/got' USR1
touch {ready}
until [ -e {tmp_path}/enough ]; do sleep 0.02; done
{dies_by}
exit {code}
""")
    script = '. scripts/job.sh; attend bash "$1"; [ -z "$is_ended" ] && exit "$code"'
    job = subprocess.Popen(["bash", "-c", script, "job", str(run)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(ready.exists)
    sent = 0
    while job.poll() is None:
        job.send_signal(signal.SIGUSR1)
        sent += 1
        if sent == 50:
            (tmp_path / "enough").touch()
        time.sleep(0.001)
    assert job.returncode in (code, EXIT_STOPPED)  # bash 5.2 may lose it: then another start has its own code
    assert sent >= 50 and (tmp_path / "got").read_text().startswith("USR1\n")
    assert "No such process" not in job.stderr.read()


JOB = """Job Id: 42.server
    Job_Name = mine
    queue = big
    Account_Name = a1
    Mail_Points = abe
    Output_Path = server:mine.o42
    project = _pbs_project_default
    Resource_List.filesystems = home:eagle
    Resource_List.gpu_type = h100
    Resource_List.ncpus = 288
    Resource_List.ngpus = 24
    Resource_List.nodect = 3
    Resource_List.place = scatter:excl
    Resource_List.select = 3:ncpus=96:ngpus=8:
\tmpiprocs=1:gpu_type=h100
    Resource_List.walltime = {walltime}
    run_count = {starts}
    Variable_List = PBS_O_HOME=/me,PBS_O_WORKDIR=/w,CONFIG_FILE=my.toml,NGPU=
\t2,NCCL_SOCKET_IFNAME==ib0\\,ib1,OVERRIDES=--a.b\\,PATH=3,GONE=1
    group_list = g1
"""


@pytest.fixture
def pbs(tmp_path):
    """A function that starts the script as PBS does, with stubs of qstat, qsub and run_train.sh. Its arguments: the
    code and the state of the run, which ends by itself or waits for a signal."""
    programs = {
        "bin/qstat": 'cat "$PBS_O_WORKDIR/job"',
        "bin/qsub": 'printf "%s\\n" "$@" > "$PBS_O_WORKDIR/submitted"; printf "%s\\n" 43.server',
        "run_train.sh": """echo "$@" > arguments; cat "$HOSTFILE" > hosts; cat "$GLM46_STATE" > found 2>/dev/null
[ -z "$STATE" ] || echo "$STATE" > "$GLM46_STATE"
if [ -n "$WAITS" ]; then trap 'echo USR1 > got; exit 75' USR1; trap 'echo TERM > got; exit 75' TERM
touch ready; while :; do sleep 0.02; done; fi
exit "$CODE\"""",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(DEPLOY.parent / "scripts")
    (tmp_path / "nodes").write_text("n1.site\nn1.site\nn2.site\nn3.site\n")

    def start(code: int = 0, state: str = "", walltime: str = "48:00:00", starts: int = 1, **variables: str):
        for name in ("submitted", "got", "ready", "found"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "job").write_text(JOB.format(walltime=walltime, starts=starts))
        own = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PBS_O_WORKDIR": str(tmp_path),
            "PBS_JOBID": "42.server", "PBS_NODEFILE": str(tmp_path / "nodes"), "PREFLIGHT": "0",
            "CODE": str(code), "STATE": state, "CONFIG_FILE": "my.toml",
        }  # fmt: skip
        command = ["bash", str(PBS)]
        return subprocess.Popen(
            command, env=own | variables, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def submitted(folder: Path) -> list[str]:
    """The words that qsub got."""
    return (folder / "submitted").read_text().splitlines()


def state_files(folder: Path) -> list[str]:
    return [file.name for file in (folder / "outputs" / "jobs").iterdir()]


def test_a_job_of_pbs_that_was_stopped_is_submitted_again_with_its_request(pbs, tmp_path):
    job = pbs(EXIT_STOPPED, "newest_step=7", NGPU="2", OVERRIDES="--training.steps 9", NCCL_SOCKET_IFNAME="=ib0,ib1")
    assert job.wait() == EXIT_STOPPED, job.stdout.read()
    assert (tmp_path / "arguments").read_text().split() == shlex.split("--max-restarts 100 --training.steps 9")
    assert (tmp_path / "hosts").read_text().split() == ["n1.site", "n2.site", "n3.site"]
    # Names of variables, whose values qsub takes from the environment; no sum over nodes, no file of this job alone.
    assert submitted(tmp_path) == [
        *("-N", "mine", "-q", "big", "-v", "GLM46_RUN,CONFIG_FILE,NGPU,NCCL_SOCKET_IFNAME,OVERRIDES"),
        *("-A", "a1", "-m", "abe", "-W", "group_list=g1"),
        *("-l", "filesystems=home:eagle", "-l", "place=scatter:excl"),
        *("-l", "select=3:ncpus=96:ngpus=8:mpiprocs=1:gpu_type=h100", "-l", "walltime=48:00:00", str(PBS)),
    ]

    # The second and the third job have made no new checkpoint.
    assert pbs(EXIT_STOPPED, "newest_step=7", GLM46_RUN="42.server", PBS_JOBID="43.server").wait() == EXIT_STOPPED
    assert (tmp_path / "submitted").exists()
    assert (tmp_path / "found").read_text() == "newest_step=7\n"
    job = pbs(EXIT_STOPPED, "newest_step=7", GLM46_RUN="42.server", PBS_JOBID="44.server")
    assert job.wait() == EXIT_STOPPED and "three jobs of this run without a new checkpoint" in job.stdout.read()
    assert not (tmp_path / "submitted").exists() and state_files(tmp_path) == []


def test_a_job_of_pbs_reads_what_its_own_starts_have_left(pbs, tmp_path):
    """And not the files of an earlier job with its number, of a server that was set up anew."""
    for starts, is_read in ((1, False), (2, True)):
        assert pbs(EXIT_STOPPED, "newest_step=7", starts=starts).wait() == EXIT_STOPPED
        assert (tmp_path / "found").read_text() == ("newest_step=7\n" if is_read else "")


@pytest.mark.parametrize(("walltime", "seconds"), [("00:05:00", "300"), ("00:05:00", "0"), ("01:00:00", "5 m")])
def test_a_job_of_pbs_without_time_to_save_is_refused(pbs, tmp_path, walltime, seconds):
    job = pbs(walltime=walltime, SAVE_SECONDS=seconds)
    assert job.wait() == EXIT_USER_ERROR
    (said,) = job.stdout.read().splitlines()
    assert f"SAVE_SECONDS={seconds} with walltime={walltime}" in said and not (tmp_path / "arguments").exists()


@pytest.mark.parametrize(("code", "state", "is_submitted"), [
    (0, "newest_step=9", False), (EXIT_USER_ERROR, "", False), (1, "newest_step=9\nlost_hosts=''", False),
    (1, "newest_step=9\nlost_hosts=n2.site", True), (EXIT_HANG, "newest_step=9\nlost_hosts='n2.site n3.site'", True),
])  # fmt: skip
def test_a_job_of_pbs_is_submitted_again_where_other_nodes_can_help(pbs, tmp_path, code, state, is_submitted):
    assert pbs(code, state).wait() == code
    assert (tmp_path / "submitted").exists() is is_submitted
    assert bool(state_files(tmp_path)) is is_submitted


@pytest.mark.slow
def test_a_job_of_pbs_saves_before_its_walltime_and_is_not_submitted_again_after_qdel(pbs, tmp_path):
    job = pbs(state="newest_step=7", walltime="00:00:12", SAVE_SECONDS="1", WAITS="1")
    assert job.wait(HANG_SECONDS) == EXIT_STOPPED and (tmp_path / "got").read_text() == "USR1\n"
    assert (tmp_path / "submitted").exists()
    job = pbs(state="newest_step=7", WAITS="1")
    wait_until((tmp_path / "ready").exists)
    job.send_signal(signal.SIGTERM)
    assert job.wait(HANG_SECONDS) == EXIT_STOPPED and (tmp_path / "got").read_text() == "TERM\n"
    assert not (tmp_path / "submitted").exists()


@pytest.fixture
def slurm(tmp_path):
    """A function that runs train.sbatch with stubs of srun, which leaves what the launcher writes, and of scontrol; a
    real Slurm runs tests/slurm. Its arguments: exit code and state of the run, restarts of the job before it, further
    variables. It returns what the script has said."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").symlink_to(DEPLOY.parent / "scripts")
    programs = {
        "bin/srun": """echo "$@" >> started
case $2 in *preflight.sh) exit "$CHECK" ;; esac
cat "$GLM46_STATE" > found 2>/dev/null
printf "$STATE" > "$GLM46_STATE"; [ -z "$ENDS" ] || { kill "$PPID"; sleep 0.3; }; exit "$CODE\"""",
        "bin/scontrol": """case $* in
"show job"*) echo "   Requeue=1 Restarts=${RESTARTS} BatchFlag=1"; echo "   ReqNodeList=(null) ExcNodeList=$EXCLUDED" ;;
*) echo "$@" >> asked ;; esac""",
        "bin/squeue": 'echo "$@" >> asked; printf "%s\\n" 8 9',
        "bin/scancel": 'echo "cancel $@" >> asked',
        "run_train.sh": "",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(code: int, state: str, restarts: int = 1, **variables: str) -> str:
        for name in ("asked", "found", "started"):
            (tmp_path / name).unlink(missing_ok=True)
        own = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "trial",
            "SLURM_RESTART_COUNT": str(restarts), "RESTARTS": str(restarts), "EXCLUDED": "(null)",
            "CODE": str(code), "STATE": state, "PREFLIGHT": "0", "SLURM_JOB_NAME": "mine", "SLURM_JOB_USER": "me",
        }  # fmt: skip
        command = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "--a.b", "c"]
        end = subprocess.run(command, env=own | variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert end.returncode == code, end.stderr
        return end.stderr

    return run


def started(folder: Path) -> list[str]:
    return (folder / "started").read_text().splitlines()


def asked(folder: Path) -> list[str]:
    """What the script has asked Slurm to do."""
    file = folder / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_a_job_of_slurm_is_requeued_until_three_starts_have_made_no_checkpoint(slurm, tmp_path):
    for newest in (7, 7, 9, 9):
        assert slurm(EXIT_STOPPED, f"newest_step={newest}") == "" and asked(tmp_path) == ["requeue 7"]
    said = slurm(EXIT_STOPPED, "newest_step=9")
    assert "three starts of this job without a new checkpoint" in said and asked(tmp_path) == []
    assert state_files(tmp_path) == []
    for code in (0, 1, EXIT_USER_ERROR, EXIT_HANG):
        assert slurm(code, "newest_step=9") == "" and asked(tmp_path) == state_files(tmp_path) == []


def test_a_job_of_slurm_reads_what_its_own_starts_have_left(slurm, tmp_path):
    """And not the files of an earlier job with its number, of a controller that was set up anew."""
    for restarts, is_read in ((0, False), (1, True), (0, False)):
        slurm(EXIT_STOPPED, "newest_step=7", restarts)
        assert (tmp_path / "found").read_text() == ("newest_step=7" if is_read else "")


@pytest.mark.parametrize("is_requeued", [True, False])
def test_a_job_that_slurm_ends_leaves_nothing_unless_it_is_requeued(slurm, tmp_path, is_requeued):
    """SIGTERM comes to the script with both, and Slurm has counted the restart then."""
    slurm(EXIT_STOPPED, "newest_step=7", RESTARTS="2" if is_requeued else "1", ENDS="1")
    assert asked(tmp_path) == [] and bool(state_files(tmp_path)) is is_requeued


@pytest.mark.parametrize(("known", "listed"), [("(null)", "n3,n4"), ("n[7-9]", "n[7-9],n3,n4")])
def test_a_requeued_job_keeps_away_from_its_lost_hosts_and_from_those_before(slurm, tmp_path, known, listed):
    slurm(EXIT_HANG, "newest_step=7\nlost_hosts='n3 n4'\n", EXCLUDED=known)
    assert asked(tmp_path) == ["requeue 7", f"update JobId=7 ExcNodeList={listed}"]


def test_a_job_of_slurm_checks_its_nodes_once_before_it_trains(slurm, tmp_path):
    check = "--cpu-bind=none scripts/preflight.sh --a.b c"
    train = "--cpu-bind=none ./run_train.sh --max-restarts 100 --a.b c"
    for code in (1, EXIT_USER_ERROR):
        said = slurm(code, "", 0, PREFLIGHT="", CHECK=str(code))
        assert f"preflight ended with exit code {code}" in said and "PREFLIGHT=0" in said
        assert started(tmp_path) == [check] and asked(tmp_path) == state_files(tmp_path) == []
    slurm(EXIT_STOPPED, "newest_step=7", 0, PREFLIGHT="", CHECK="0")
    assert started(tmp_path) == [check, train] and asked(tmp_path) == ["requeue 7"]
    slurm(EXIT_STOPPED, "newest_step=9", 1, PREFLIGHT="")  # the storage of a later start may be away
    assert started(tmp_path) == [train]
    slurm(EXIT_STOPPED, "newest_step=9", 0, PREFLIGHT="", CHECK=str(EXIT_STOPPED))  # stopped while it checks
    assert started(tmp_path) == [check] and asked(tmp_path) == ["requeue 7"]


def test_a_job_of_pbs_checks_its_hosts_before_it_trains(pbs, tmp_path):
    (tmp_path / "scripts").unlink()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "job.sh").symlink_to(DEPLOY.parent / "scripts" / "job.sh")
    check = tmp_path / "scripts" / "preflight.sh"
    check.write_text('#!/bin/bash\necho "$@" > checked; cat "$2" >> checked; exit "$CHECK"\n')
    check.chmod(0o755)
    job = pbs(PREFLIGHT="", CHECK="1", OVERRIDES="--a.b c")
    assert job.wait() == 1 and "preflight ended with exit code 1" in job.stdout.read()
    assert not (tmp_path / "arguments").exists() and not (tmp_path / "submitted").exists()
    assert (tmp_path / "checked").read_text().split()[2:] == ["--a.b", "c", "n1.site", "n2.site", "n3.site"]
    assert state_files(tmp_path) == []
    assert pbs(PREFLIGHT="", CHECK="0").wait() == 0 and (tmp_path / "arguments").exists()


def test_jobs_of_one_name_are_the_starts_of_one_run(slurm, tmp_path):
    """Where requeue is forbidden."""
    chain = {"SLURM_JOB_DEPENDENCY": "singleton"}
    assert slurm(EXIT_STOPPED, "newest_step=7", 0, **chain) == "" and asked(tmp_path) == [
        "--noheader --name=mine --user=me --states=PENDING --format=%A"
    ]
    slurm(EXIT_HANG, "newest_step=9\nlost_hosts=n3\n", 0, SLURM_JOB_ID="8", **chain)
    assert (tmp_path / "found").read_text() == "newest_step=7"
    assert asked(tmp_path)[1:] == ["update JobId=8 ExcNodeList=n3", "update JobId=9 ExcNodeList=n3"]
    # Slurm sends SIGTERM at the time limit, too, after which the next job goes on.
    slurm(EXIT_STOPPED, "newest_step=9", 0, ENDS="1", **chain)
    assert asked(tmp_path) == [] and state_files(tmp_path) != []
    for code in (0, EXIT_USER_ERROR):
        slurm(code, "newest_step=9", 0, **chain)
        assert asked(tmp_path) == ["cancel --name=mine --user=me --state=PENDING"] and state_files(tmp_path) == []


def test_preflight_of_a_job_gets_the_config_and_overrides_of_the_run_and_no_option_of_launch(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" >> said; exit "$CODE"\n')
    python.chmod(0o755)
    (tmp_path / "my run.toml").touch()
    variables = {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "CONFIG_FILE": "my run.toml", "NGPU": "4", "CODE": "0",
    }  # fmt: skip
    words = ["--max-restarts", "3", "--a.b", "c d", "--max-restarts=2", "--hostfile", "hosts"]
    script = [str(DEPLOY.parent / "scripts" / "preflight.sh"), *words]
    assert subprocess.run(script, env=os.environ | variables, cwd=tmp_path).returncode == 0
    given = "preflight --config my run.toml --nproc 4 --a.b c d --hostfile hosts"
    assert (tmp_path / "said").read_text().splitlines()[-1] == f"-m glm46 {given}"


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


def test_skypilot_starts_the_script_in_the_volume_and_recovers_what_job_systems_requeue(tmp_path):
    task = yaml.safe_load((DEPLOY / "skypilot" / "train.yaml").read_text())
    assert set(task) <= SKYPILOT
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED, EXIT_HANG]
    (folder,) = task["volumes"]
    # Each node has its own checkout; relative paths are those of the volume, which all nodes see.
    copy, volume = tmp_path / "copy", tmp_path / "volume"
    for place in (copy, volume):
        place.mkdir()
    (copy / "run_train.sh").write_text('#!/bin/sh\necho "$@" > "$PWD/arguments"\n')
    (copy / "run_train.sh").chmod(0o755)
    assert f"cd {folder} " in task["run"]
    subprocess.run(["bash", "-c", task["run"].replace(f"cd {folder} ", f"cd {volume} ")], check=True, cwd=copy)
    assert (volume / "arguments").read_text() == "--max-restarts 100\n"
