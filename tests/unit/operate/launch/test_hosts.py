"""Commands on hosts over a stand-in for ssh, with small programs in place of the launcher; real ones: tests/ranks.

Hostfiles as DeepSpeed and Open MPI write them; a line of another form is refused with its number.
"""

import os
import shlex
import signal
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED
from glm46.operate.launch import launch_hosts
from glm46.operate.launch.hostfile import Host, read_hostfile, refuse_hosts
from glm46.operate.launch.launch_hosts import HostRun, unreachable
from glm46.operate.launch.process_end import EXIT_BROKEN_PIPE
from glm46.operate.launch.ssh_hosts import (
    HostProcesses,
    client_words,
    in_this_folder,
    module_words,
    place_variables,
    run_on_hosts,
    stoppable,
)
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK, End
from tests.fake_ssh import UNREACHABLE, write_ssh
from tests.processes import HANG_SECONDS, MARK, left_behind, wait_until

HOSTS = [Host(1, "one"), Host(2, "two", "me")]
TIMES = StartTimes("the command")


@pytest.fixture(autouse=True)
def mark(tmp_path, monkeypatch):
    """A value by which all processes of a test are found; none may outlive it."""
    value = f"{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("PATH", f"{write_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(MARK, value)
    yield value
    own = {os.getpid()}
    wait_until(lambda: not set(left_behind(value)) - own, "a process outlived the command")


def program(text: str) -> str:
    """Words for `env` that run a program of Python, with the mark of this test."""
    return f"{MARK}={os.environ[MARK]} {sys.executable} -uISc {shlex.quote(text)}"


def processes(*programs: str) -> HostProcesses:
    """Programs on as many hosts."""
    commands = []
    for number, text in enumerate(programs):
        host = Host(number, f"h{number}")
        commands.append((host.name, client_words(host, stoppable(program(text), 1))))
    return HostProcesses(commands, stop_seconds=1)


WAIT = "import signal, time\nprint('waits')\ntime.sleep(1000)"
TELL = """import signal, sys, time
def end(number, _):
    print('got', signal.Signals(number).name)
    sys.exit(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
print('waits')
time.sleep(1000)"""
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('waits')\ntime.sleep(1000)"


def test_a_command_for_a_host_begins_in_this_folder_with_variables_and_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    words = module_words({"NCCL_DEBUG": "a $b"}, ["launch", "--x", "it's"])
    assert shlex.split(words) == ["env", "NCCL_DEBUG=a $b", sys.executable, "-m", "glm46", "launch", "--x", "it's"]
    text = "import os\nprint(os.getcwd(), os.environ['FAKE_SSH_HOST'])"
    [answer] = run_on_hosts([HOSTS[1]], [in_this_folder(f"env {program(text)}")], HANG_SECONDS)
    assert answer.code == 0 and f"{tmp_path / 'a b'} me@two" in answer.output


def test_srun_starts_one_process_on_the_named_node():
    words = client_words(Host(3, "n3"), "true", "srun")
    assert words[0] == "srun" and "--nodelist=n3" in words and words[-3:] == ["sh", "-c", "true"]


def test_each_host_gets_its_place_and_the_address_of_the_first():
    assert place_variables(HOSTS, {}) == [
        {"MASTER_ADDR": "one", "NNODES": "2", "NODE_RANK": "0"},
        {"MASTER_ADDR": "one", "NNODES": "2", "NODE_RANK": "1"},
    ]
    assert {place["MASTER_ADDR"] for place in place_variables(HOSTS, {"MASTER_ADDR": "10.0.0.1"})} == {"10.0.0.1"}


def test_answers_have_code_output_and_a_reason(tmp_path):
    hosts = [Host(1, "good"), Host(2, UNREACHABLE), Host(3, "slow")]
    good, lost, slow = run_on_hosts(hosts, ["echo hello; exit 3", "true", "exec sleep 1000"], 5.0)
    assert good.code == 3 and "hello" in good.output
    assert lost.code == 255 and "No route to host" in lost.reason()
    assert slow.code is None


def test_without_a_client_the_program_to_install_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="ssh is not on PATH; install the OpenSSH client"):
        run_on_hosts([HOSTS[0]], ["true"], 5.0)
    with pytest.raises(UserError, match="srun is not on PATH; start it in an allocation of Slurm"):
        run_on_hosts([HOSTS[0]], ["true"], 5.0, "srun")


def test_lines_have_the_name_of_their_host_and_the_end_of_all_follows_the_first(capfd):
    with closing(processes("print('works')\nraise SystemExit(7)", WAIT)) as running:
        end = running.next_end()
    assert (end.command_index, end.code) == (0, 7)
    assert "h0: works\n" in capfd.readouterr().out


def test_a_command_that_ignores_sigterm_is_killed_at_the_end_of_its_input(capfd):
    running = processes(DEAF)
    assert running.next_end(time.monotonic() + 0.1) is None
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < HANG_SECONDS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_command_by_name(number, capfd):
    with closing(processes(TELL)) as running:
        shown = ""
        while "waits" not in shown:
            running.next_end(time.monotonic() + 0.05)
            shown += capfd.readouterr().out
        running.send(number)
        assert running.next_end().code == number
    assert f"h0: got {number.name}" in capfd.readouterr().out


@pytest.mark.parametrize("attempt", range(5))
def test_a_signal_that_is_sent_with_the_start_ends_the_command(attempt):
    with closing(processes(WAIT)) as running:
        running.send(signal.SIGTERM)
        assert running.next_end(time.monotonic() + HANG_SECONDS).code == 128 + signal.SIGTERM


def test_a_command_on_this_machine_ends_with_its_connection(mark, capfd):
    running = HostProcesses([("here", ["sh", "-c", stoppable(program(DEAF), 1)])], stop_seconds=1)
    shown = ""
    while "waits" not in shown:
        running.next_end(time.monotonic() + 0.05)
        shown += capfd.readouterr().out
    running.disconnect()
    wait_until(lambda: not set(left_behind(mark)) - {os.getpid()}, "a command outlived its client")


def test_what_a_command_leaves_behind_does_not_delay_its_end():
    with closing(processes("import subprocess\nsubprocess.Popen(['sleep', '1000'])\nraise SystemExit(3)")) as running:
        assert running.next_end(time.monotonic() + HANG_SECONDS).code == 3


def test_a_deadline_holds_while_output_comes(capfd):
    with closing(processes("while True:\n    print('more')")) as running:
        began = time.monotonic()
        assert running.next_end(began + 0.2) is None
        assert time.monotonic() - began < 10.0


def test_a_killed_driver_leaves_no_command(mark, tmp_path):
    child = os.fork()
    if child == 0:
        sys.stdout = (tmp_path / "out").open("w")  # pytest's own would be a file of its capture
        processes(WAIT, DEAF).next_end()
        os._exit(0)
    wait_until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("waits") == 2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: not set(left_behind(mark)) - {os.getpid()}, "a command outlived its driver")


class Runs:
    """Starts of small programs in place of the launcher."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch

    def start(self, *programs: str) -> HostRun:
        """One program on each host."""
        texts = iter(programs)
        self._monkeypatch.setattr(launch_hosts, "module_words", lambda variables, arguments: program(next(texts)))
        return HostRun([Host(number, f"h{number}") for number in range(len(programs))], [], TIMES)


@pytest.fixture
def runs(monkeypatch) -> Runs:
    return Runs(monkeypatch)


FINISH = "raise SystemExit({})"


@pytest.mark.parametrize(("codes", "expected"), [
    ((0, 0), 0), ((EXIT_STOPPED, EXIT_STOPPED), EXIT_STOPPED), ((0, EXIT_STOPPED), EXIT_STOPPED), ((2, 0), 2),
    ((EXIT_STOPPED, EXIT_HANG), EXIT_HANG),
])  # fmt: skip
def test_the_code_of_a_run_is_the_code_of_its_hosts(runs, codes, expected):
    end = runs.start(*map(FINISH.format, codes)).wait()
    assert end.code == expected and not end.is_final


def test_a_host_that_fails_ends_the_others_and_is_named_once(runs, monkeypatch, capfd):
    monkeypatch.setattr(launch_hosts, "_FOLLOW_SECONDS", 0.5)
    run = runs.start(FINISH.format(1), DEAF, TELL)
    end = run.wait()
    assert end.code == 1 and end.failed_at is not None and not end.is_final and run.lost == []
    assert capfd.readouterr().err.splitlines() == ["error: h0: ended with exit code 1; all nodes are stopped"]


def test_a_killed_launcher_is_a_failure_that_a_restart_follows(runs):
    end = runs.start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", WAIT).wait()
    assert end.code == EXIT_FAILED_RANK and not end.is_final


def test_a_lost_connection_ends_the_run_with_the_code_for_a_restart(runs, capfd):
    run = runs.start(FINISH.format(255), WAIT)
    assert run.wait().code == 1 and run.lost == ["h0"]
    assert "error: h0: the connection was lost; all nodes are stopped" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "codes", "expected"), [
    (signal.SIGUSR1, (EXIT_STOPPED, EXIT_STOPPED), EXIT_STOPPED), (signal.SIGINT, (130, 130), 130),
    (signal.SIGTERM, (1, EXIT_STOPPED), EXIT_STOPPED),
])  # fmt: skip
def test_a_signal_reaches_all_hosts_and_no_start_follows(runs, tmp_path, number, codes, expected):
    texts = []
    for place, code in enumerate(codes):
        text = TELL.replace("sys.exit(number)", f"sys.exit({code})")
        texts.append(text.replace("print('waits')", f"open({str(tmp_path / str(place))!r}, 'w').close()"))
    run = runs.start(*texts)
    wait_until(lambda: all((tmp_path / str(place)).exists() for place in range(len(codes))))
    os.kill(os.getpid(), number)
    end = run.wait()
    assert end.code == expected and end.is_final


def test_a_closed_output_stops_all_hosts(runs, monkeypatch):
    def closed(until):
        monkeypatch.undo()
        raise BrokenPipeError

    run = runs.start(TELL, TELL)
    saved = os.dup(1)
    try:
        monkeypatch.setattr(run._processes, "next_end", closed)
        monkeypatch.setattr(launch_hosts, "_FOLLOW_SECONDS", 0.5)
        end = run.wait()
    finally:
        os.dup2(saved, 1)
    assert end.code == EXIT_BROKEN_PIPE and end.is_final


def test_hosts_that_cannot_be_used_are_all_named():
    faults = unreachable([Host(1, "good"), Host(2, UNREACHABLE, "me")])
    assert list(faults) == [UNREACHABLE]
    fault = faults[UNREACHABLE]
    assert fault.startswith(f"{UNREACHABLE}: cannot be reached: ") and "No route to host" in fault
    assert f"`ssh -o BatchMode=yes me@{UNREACHABLE} true` must succeed" in fault


def test_a_host_without_this_python_is_named(monkeypatch):
    monkeypatch.setattr(launch_hosts.sys, "executable", "/nowhere/python")
    faults = unreachable([Host(1, "a")])
    assert "/nowhere/python must be at the same places on all nodes" in faults["a"], faults


@pytest.fixture
def launch(make_config, tmp_path, monkeypatch):
    """A function that launches a config on two hosts; the starts end as told. It returns code, starts and output."""
    from glm46.config.loader import dump_config

    def run(ends: list[End], lost: tuple[str, ...] = (), restarts: int = 0, found=lambda hosts: {}) -> tuple:
        started = []

        class Start:
            def __init__(self, hosts, arguments, times):
                started.append(arguments)
                self.lost = list(lost)

            def wait(self) -> End:
                return ends[len(started) - 1]

        config = make_config()
        (tmp_path / "run.toml").write_text(dump_config(config))
        (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
        monkeypatch.setattr(launch_hosts, "HostRun", Start)
        monkeypatch.setattr(launch_hosts, "unreachable", found)
        monkeypatch.setenv("GLM46_STATE", str(tmp_path / "state"))
        arguments = Namespace(
            config=tmp_path / "run.toml", hostfile=tmp_path / "hosts", nproc=None, max_restarts=restarts
        )
        return launch_hosts.launch_hosts(arguments, ["--training.steps=9"]), started

    return run


def test_all_hosts_are_started_again_after_a_failure(launch, tmp_path):
    code, started = launch([End(1), End(EXIT_HANG), End(0)], restarts=5)
    assert code == 0 and len(started) == 3
    for number, arguments in enumerate(started):
        hidden = ["--from-hostfile", str(number), "--known-step", "0"]
        assert arguments[0] == "launch" and arguments[-5:] == ["--training.steps=9", *hidden]
        assert arguments[arguments.index("--nproc") + 1] == "1"
    assert (tmp_path / "state").read_text() == "newest_step=0\nlost_hosts=''\n"


def test_a_lost_host_ends_the_run_where_it_cannot_be_reached_again(launch, tmp_path, capsys):
    calls = []

    def found(hosts) -> dict[str, str]:
        calls.append(hosts)
        return {"two": "two: cannot be reached"} if len(calls) > 1 else {}

    code, started = launch([End(1)], lost=("two",), restarts=5, found=found)
    assert code == 1 and len(started) == 1
    assert "error: two: cannot be reached" in capsys.readouterr().err
    assert (tmp_path / "state").read_text() == "newest_step=0\nlost_hosts=two\n"


def test_faults_of_config_and_hosts_are_found_before_a_start(launch, tmp_path):
    with pytest.raises(UserError, match="two: cannot be reached"):
        launch([], found=lambda hosts: {"two": "two: cannot be reached"})
    assert not Path("state").exists()


def test_lines_of_every_form_are_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(
        b"# the first rack\r\n\r\nnode001 slots=8\r\nroot@node002   slots=8  # spare\n\n  gpu_3.site-a.org\n"
        b"10.0.0.7 slots=16\n[2001:DB8::1] slots=2\nme@2001:db8:0::2\n"
    )
    hosts = read_hostfile(file)
    assert hosts == [
        Host(3, "node001", slots=8),
        Host(4, "node002", "root", 8),
        Host(6, "gpu_3.site-a.org"),
        Host(7, "10.0.0.7", slots=16),
        Host(8, "2001:db8::1", slots=2),
        Host(9, "2001:db8::2", "me"),
    ]
    assert [host.login for host in hosts[1::4]] == ["root@node002", "me@2001:db8::2"]


@pytest.mark.parametrize(("line", "words"), [
    ("-oProxyCommand=evil", "'-oProxyCommand=evil' is not a host name"), ("-l@node", "'-l' is not a user name"),
    ("node$(id)", "is not a host name"), ("node:8", "'node:8' is not a host name"), ("1:2:3", "in '1:2:3'"),
    ("@", "'' is not a host name"), ("node slots=0", "'slots=0': expected slots=N, with N of at least 1"),
    ("node slots=", "'slots=': expected"), ("node slots=-1", "expected"), ("node slots = 8", "'slots': expected"),
    ("node max_slots=8", "'max_slots=8': expected"), ("node 8", "'8': expected"),
])  # fmt: skip
def test_other_lines_are_refused_with_number_and_form(line, words, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"good slots=8\n{line}\nbad!\n")
    with pytest.raises(UserError) as caught:
        read_hostfile(file)
    second, third = caught.value.faults
    assert f"{file}, line 2: " in second and words in second and second.endswith("write NAME slots=N, or NAME alone")
    assert "line 3: 'bad!'" in third


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("\n# none\n", "names no host; write one")])
def test_a_hostfile_without_hosts_is_refused(content, words, tmp_path):
    file = tmp_path / "hosts"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=words):
        read_hostfile(file)


@pytest.mark.parametrize(("content", "faults"), [
    (b"\x7fELF\x02\x01\x01\0\0\n\0\n" * 50, 1),
    (b"\xff\xfe\n" * 50, 1),
    (b"no!\n" * 50, 4),
    (b"x!" * 5000, 1),
])  # fmt: skip
def test_a_file_of_another_kind_has_few_and_short_faults(content, faults, tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_hostfile(file)
    assert len(caught.value.faults) == faults and all(len(fault) < 300 for fault in caught.value.faults)
    assert "state a file of hosts" in caught.value.faults[-1] or faults == 1


TWO = [Host(1, "a", slots=8), Host(2, "b", slots=8)]


@pytest.mark.parametrize(("named", "processes", "variables", "words"), [
    ([*TWO, Host(9, "A", "root", 8)], None, {}, "a stands on lines 1, 9; write each host once"),
    ([*TWO, Host(3, "c")], None, {}, "have the values none, 8; all nodes run the same number"),
    ([*TWO, Host(3, "c", slots=4)], None, {}, "have the values 4, 8"), (TWO, 4, {}, "have the values 4, 8"),
    ([Host(1, "localhost"), Host(2, "b")], None, {}, "the first host, localhost, is another machine for each node"),
    (TWO, None, {"MASTER_ADDR": "127.0.0.1"}, "the first host, 127.0.0.1, is another machine"),
    (TWO, None, {"NNODES": "2"}, "is run once; unset NNODES"),
    (TWO, None, {"SLURM_NODEID": "1"}, "start it outside srun"),
])  # fmt: skip
def test_hostfiles_that_cannot_be_are_refused(named, processes, variables, words):
    with pytest.raises(UserError) as caught:
        refuse_hosts(named, processes, variables, Path("hosts"))
    (fault,) = caught.value.faults
    assert fault.startswith("--hostfile hosts: ") and words in fault


def test_hostfiles_that_can_be_are_accepted():
    refuse_hosts(TWO, None, {"SLURM_NODEID": "0"}, Path("hosts"))
    refuse_hosts(TWO, 8, {}, Path("hosts"))
    refuse_hosts([Host(1, "a"), Host(2, "b")], 4, {}, Path("hosts"))
    refuse_hosts([Host(1, "localhost"), Host(2, "127.0.0.2")], None, {}, Path("hosts"))
    assert refuse_hosts([Host(1, "localhost"), Host(2, "b")], None, {"MASTER_ADDR": "a"}, Path("hosts")) is None
