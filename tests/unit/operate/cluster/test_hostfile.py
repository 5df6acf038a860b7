"""`preflight --hostfile`: hosts that ssh does not reach are results, options that exclude each other are refused."""

import os

import pytest

from glm46.commands.preflight import preflight_command
from glm46.config.errors import UserError
from glm46.operate.cluster import preflight
from glm46.operate.cluster.preflight_hosts import reach
from glm46.operate.cluster.results import FAIL
from glm46.operate.launch.hostfile import Host
from tests.fake_ssh import UNREACHABLE, write_ssh


def test_a_host_that_ssh_does_not_reach_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{write_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    good, lost = Host(1, "localhost"), Host(2, UNREACHABLE, "me")
    reached, reports = reach([good, lost])
    assert reached == [good] and [report.host for report in reports] == [UNREACHABLE]
    [found] = reports[0].results
    assert found.verdict == FAIL and "No route to host" in found.value and f"me@{UNREACHABLE}" in found.remedy


def test_without_ssh_and_with_options_that_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh is not on PATH"):
        reach([Host(1, "localhost")])
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
    monkeypatch.setattr(preflight, "run_checks", lambda *_: pytest.fail("a check has run"))
    with pytest.raises(UserError) as refused:
        preflight_command(["--local", *options])
    (message,) = refused.value.faults
    assert all(word in message for word in words)
