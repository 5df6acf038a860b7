"""scripts/setup_cluster.sh: wrong values and hosts change nothing; the files are those of the job scripts; hosts are
asked over a stand-in for ssh.

`preflight --hostfile`: hosts that ssh does not reach are results, options that exclude each other are refused.
"""

import json
import os
import re
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.commands.preflight import preflight_command
from glm46.config.errors import UserError
from glm46.operate.cluster import hosts, preflight, setup
from glm46.operate.cluster.results import FAIL, PASS, Result, as_json, from_json
from glm46.operate.cluster.setup import ANSWER, host_state
from glm46.operate.launch.hostfile import Host
from glm46.operate.launch.ssh_hosts import HostAnswer
from tests.fake_ssh import UNREACHABLE, write_ssh

ROOT = Path(__file__).parents[4]
GOOD = {"--nodes": "2", "--gpus-per-node": "2", "--master-addr": "127.0.0.2", "--master-port": "29500"}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Arguments of the verb, for a type of cluster and changed options; None takes an option out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{write_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n127.0.0.2 slots=2\n127.0.0.3 slots=2\n")

    def arguments(kind: str = "ssh", **changed: str | None) -> list[str]:
        options = {
            "--type": kind, **GOOD, "--nvme-path": str(tmp_path / "nvme"), "--hostfile": "hosts",
            "--config": str(ROOT / "train_configs/debug.toml"), "--output": "cluster",
        }  # fmt: skip
        options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        return [word for name, value in options.items() if value is not None for word in (name, value)]

    return arguments


@pytest.mark.parametrize(("changed", "words"), [
    ({"type": "lsf"}, ("--type", "lsf", "slurm")), ({"nodes": "0"}, ("--nodes", "0", "at least 1")),
    ({"nodes": "1e3"}, ("--nodes", "1e3")), ({"nodes": "4"}, ("--nodes 4", "3 hosts", "add hosts")),
    ({"gpus_per_node": "8"}, ("slots", "2, 8", "same number")),
    ({"master_addr": "127.0.0.9"}, ("--master-addr 127.0.0.9", "none of the hosts", "127.0.0.1")),
    ({"master_addr": "fe80::1"}, ("--master-addr fe80::1", "none of the hosts")),
    ({"master_port": "80"}, ("--master-port 80", "1024")),
    ({"master_port": "70000"}, ("--master-port 70000", "restart")),
    ({"nvme_path": "nvme"}, ("--nvme-path nvme", "absolute")),
    ({"nvme_path": "/tmp/my disk"}, ("--nvme-path /tmp/my disk", "letters")),
    ({"hostfile": None}, ("--hostfile", "not given", "NAME slots=N")),
    ({"hostfile": "nowhere"}, ("nowhere", "cannot be read")), ({"config": "nowhere.toml"}, ("nowhere.toml",)),
    ({"output": "hosts/cluster"}, ("--output", "hosts/cluster", "hosts is a file", "set another folder")),
])  # fmt: skip
def test_wrong_values_have_one_message_and_change_nothing(cluster, capsys, tmp_path, changed, words):
    before = sorted(tmp_path.iterdir())
    code = None
    try:
        code = main(["setup-cluster", *cluster(**changed)])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "error: " in line]
    assert code == 2 and len(said) <= 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("kind", "variable", "value", "words"), [
    ("slurm", "SLURM_JOB_NODELIST", "n[1-2]", "scontrol show hostnames 'n[1-2]'"),
    ("pbs", "PBS_NODEFILE", "nowhere", "No such file"), ("pbs", "PBS_NODEFILE", os.devnull, "names no host"),
])  # fmt: skip
def test_an_allocation_that_cannot_be_read_is_one_message(cluster, capsys, monkeypatch, kind, variable, value, words):
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["setup-cluster", *cluster(kind, hostfile=None)]) == 2
    (fault,) = capsys.readouterr().err.splitlines()
    assert variable in fault and words in fault and "--hostfile" in fault


@pytest.mark.slow
def test_hosts_that_do_not_answer_are_all_named_and_nothing_is_changed(cluster, capsys, tmp_path):
    (tmp_path / "hosts").write_text(f"127.0.0.2 slots=2\nme@{UNREACHABLE} slots=2\n")
    assert main(["setup-cluster", *cluster()]) == 2
    (fault,) = capsys.readouterr().err.splitlines()
    assert (
        fault.startswith(f"error: {UNREACHABLE}: ")
        and "No route to host" in fault
        and f"me@{UNREACHABLE} true" in fault
    )
    assert not (tmp_path / "nvme").exists() and not (tmp_path / "cluster").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "job", "directives"), [
    ("ssh", None, {}), ("slurm", "submit_job.slurm", {"--nodes=2", "--gpus-per-node=2"}),
    ("pbs", "submit_job.pbs", {f"-l select=2:ncpus={len(os.sched_getaffinity(0))}:ngpus=2:mpiprocs=1"}),
])  # fmt: skip
def test_a_cluster_is_set_up_and_again_gives_the_same(cluster, capsys, tmp_path, kind, job, directives):
    """Three hosts, two of which train."""
    (tmp_path / "debug.toml").symlink_to(ROOT / "train_configs/debug.toml")
    words, folder = cluster(kind, config="debug.toml"), tmp_path / "cluster"
    script = [ROOT / "scripts" / "setup_cluster.sh", *words]
    path = os.pathsep.join(
        [os.environ["PATH"].split(os.pathsep)[0], str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / "nvme").stat().st_mode) == 0o700
    hosts = (folder / "hostfile").read_text().splitlines()
    assert hosts == ["127.0.0.2 slots=2", "127.0.0.1 slots=2"]  # the master first
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert set(texts) == {"hostfile", "setup_env.sh", "launch.sh", *([job] if job else [])}
    for name in set(texts) - {"hostfile"}:
        assert subprocess.run(["bash", "-n", folder / name]).returncode == 0, name
    assert "MASTER_ADDR=127.0.0.2" in texts["launch.sh"]
    assert f"\nexport CONFIG_FILE={tmp_path / 'debug.toml'}\n" in texts["setup_env.sh"]
    assert "\nexport NGPU=2\n" in texts["setup_env.sh"]
    if job:
        assert "export MASTER_ADDR" not in texts[job] + texts["setup_env.sh"]  # the first node of the job
        assert directives <= set(re.findall(r"^#(?:SBATCH|PBS) (.*)", texts[job], re.MULTILINE))
        before, after = texts[job].split(f". {folder}/setup_env.sh\n")
        assert "\nif" not in before and "#SBATCH" not in after and "#PBS" not in after
    if kind == "ssh":
        assert main(["setup-cluster", *words]) == 0
        assert {file.name: file.read_text() for file in folder.iterdir()} == texts


def test_hosts_with_other_versions_or_gpus_are_named(tmp_path, monkeypatch):
    """The first host is the standard of the versions; without a driver, GPUs are not counted."""
    state = {"versions": "glm46 1", "has_driver": True, "gpus": 2, "nvme": ""}
    states = [state, state | {"versions": "glm46 2"}, state | {"gpus": 0}, state | {"gpus": 0, "has_driver": False}]
    answers = [HostAnswer(0, f"Welcome!\n{ANSWER}{json.dumps(state)}\n", "") for state in states]
    monkeypatch.setattr(setup, "run_on_hosts", lambda *_: answers)
    hosts = [Host(line, f"n{line}") for line in range(4)]
    with pytest.raises(UserError) as refused:
        setup.check_hosts(hosts, "ssh", Namespace(gpus_per_node=2, nvme_path=tmp_path))
    versions, gpus = refused.value.faults
    assert versions.startswith("n1: has glm46 2, the first host glm46 1") and "n2 has 0" in gpus


def test_a_host_names_its_network_and_what_is_against_its_folder(tmp_path):
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    for name, text in {
        "proc/net/route": "Iface\tDestination\neth7\t00000000\n",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 9 kB\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5 2024\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    state = host_state(tmp_path / "nvme", root=tmp_path)
    assert state["network"] == "InfiniBand, 1 of 1 ports active" and state["interface"] == ""
    assert ", driver " in state["versions"] and state["has_driver"]
    port.joinpath("state").write_text("1: DOWN\n")
    assert host_state(tmp_path / "nvme", root=tmp_path)["interface"] == "eth7"
    assert state["nvme"] == "" and not (tmp_path / "nvme").exists()
    (tmp_path / "link").symlink_to("/tmp")
    assert "symbolic link" in host_state(tmp_path / "link", root=tmp_path)["nvme"]
    assert "is a file" in host_state(tmp_path / "proc/meminfo", root=tmp_path)["nvme"]


def test_a_host_that_ssh_does_not_reach_is_a_result_and_the_others_are_checked(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", f"{write_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "hosts").write_text(f"localhost\nme@{UNREACHABLE}\n")
    commands = []

    def run(hosts, words, *_, **options):
        commands.extend(words)
        line = as_json([Result("GPU count", PASS, "8 x H100", host="n0")], 1.0)
        return [HostAnswer(0, f"Welcome!\n{line}\n", "") for _ in hosts]

    monkeypatch.setattr(hosts, "run_on_hosts", run)
    assert preflight_command(["--hostfile", str(tmp_path / "hosts"), "--json", str(tmp_path / "found.json")]) == 1
    good, lost = sorted(from_json((tmp_path / "found.json").read_text()), key=lambda result: result.status)[::-1]
    assert (good.host, good.status, good.name) == ("n0", PASS, "GPU count")
    assert lost.host == UNREACHABLE and lost.status == FAIL
    assert "No route to host" in lost.value and f"me@{UNREACHABLE}" in lost.value
    [command] = commands
    assert "NNODES=1" in command and "preflight --json - --nproc auto" in command
    assert f"FAIL {UNREACHABLE}, ssh: " in capfd.readouterr().out


def test_a_first_host_without_results_is_a_result(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("localhost\n")
    monkeypatch.setattr(hosts, "unreachable", lambda hosts: {})
    monkeypatch.setattr(hosts, "run_on_hosts", lambda hosts, *_, **options: [HostAnswer(2, "", "error: no port")])
    assert preflight_command(["--hostfile", str(tmp_path / "hosts"), "--json", str(tmp_path / "found.json")]) == 1
    [result] = from_json((tmp_path / "found.json").read_text())
    assert (result.host, result.name, result.value) == ("localhost", "preflight", "error: no port")


def test_a_host_that_never_met_the_first_one_shows_its_own_results(tmp_path, monkeypatch):
    """The first host ended because node 1 did not come; node 1 says why; node 2 printed nothing."""
    (tmp_path / "hosts").write_text("localhost\n127.0.0.2\n127.0.0.3\n")
    monkeypatch.setattr(hosts, "unreachable", lambda hosts: {})
    first = as_json([Result("ranks", FAIL, "a node did not join", host="a (node 0)")], 1.0)
    slow = as_json(
        [
            Result("job.dump_folder", FAIL, "no answer within 15 s", host="b (node 1)"),
            Result("x", PASS, "", host="a (node 0)"),
        ],
        90.0,
    )
    answers = [HostAnswer(1, first, ""), HostAnswer(1, slow, ""), HostAnswer(255, "", "lost\n")]
    monkeypatch.setattr(hosts, "run_on_hosts", lambda hosts, *_, **options: answers)
    assert preflight_command(["--hostfile", str(tmp_path / "hosts"), "--json", str(tmp_path / "found.json")]) == 1
    rows = {(row.host, row.name): row.value for row in from_json((tmp_path / "found.json").read_text())}
    assert rows == {
        ("a (node 0)", "ranks"): "a node did not join",
        ("b (node 1)", "job.dump_folder"): "no answer within 15 s",
        ("127.0.0.3", "preflight"): "lost",
    }


def test_without_ssh_and_with_options_that_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hosts").write_text("localhost\n")
    with pytest.raises(UserError, match="ssh is not on PATH"):
        preflight_command(["--hostfile", str(tmp_path / "hosts")])
    with pytest.raises(UserError, match="--hostfile with --local"):
        preflight_command(["--hostfile", "hosts", "--local"])
    with pytest.raises(UserError, match="add --config"):
        preflight_command(["--job.dump_folder", "out"])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--json", "/none/found.json"], ("--json /none/found.json", "folder that exists")),
        (["--json", "/"], ("--json /", "folder that exists")),
    ],
)
def test_options_that_could_be_used_only_at_the_end_are_refused_before_any_check(options, words, monkeypatch):
    monkeypatch.setattr(preflight, "run_check", lambda *_: pytest.fail("a check has run"))
    with pytest.raises(UserError) as refused:
        preflight_command(["--local", *options])
    (message,) = refused.value.faults
    assert all(word in message for word in words)
