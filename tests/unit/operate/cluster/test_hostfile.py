"""`preflight --hostfile`: hosts that ssh does not reach are results, options that exclude each other are refused."""

import os

import pytest

from glm46.commands.preflight import preflight_command
from glm46.config.errors import UserError
from glm46.operate.cluster import hosts, preflight
from glm46.operate.cluster.results import FAIL, PASS, Result, as_json, from_json
from glm46.operate.launch.ssh_hosts import HostAnswer
from tests.fake_ssh import UNREACHABLE, write_ssh


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
