"""Programs of episodes in each sandbox: the policy is in reach, and what a hostile one tries is held."""

import asyncio
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.config.rl import RLConfig
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.judge import jail
from glm46.storage.judge.jail import BUBBLEWRAP, LANDLOCK, NO_JAIL
from glm46.storage.judge.landlock import landlock_version
from glm46.tasks.rl.rewards import function_pool
from glm46.tasks.rl.rollout import programs
from glm46.tasks.rl.rollout.endpoint import PolicyEndpoint
from glm46.tasks.rl.rollout.programs import ProgramOutcome, Programs
from glm46.tasks.rl.rollout.records import Request
from glm46.tasks.rl.rollout.session import Session

IS_BUBBLEWRAP_MISSING, VERSION = not jail.has_bubblewrap(), landlock_version()
IN_BUBBLEWRAP = pytest.param(
    BUBBLEWRAP, marks=pytest.mark.skipif(IS_BUBBLEWRAP_MISSING, reason="bubblewrap does not start here")
)
UNDER_LANDLOCK = pytest.param(LANDLOCK, marks=pytest.mark.skipif(VERSION < 6, reason="Linux 6.12 has what is tested"))
SANDBOXES = pytest.mark.parametrize("kind", [IN_BUBBLEWRAP, UNDER_LANDLOCK])
CONNECTS = """
import os, sys
from http.client import HTTPConnection
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = HTTPConnection(url.netloc)
connection.request("GET", url.path + "/models", headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
print(connection.getresponse().status)
"""
TELLS = "\nimport sys\ntry:\n    {}\nexcept OSError as error:\n    sys.exit(type(error).__name__)\nprint('done')"


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def run(monkeypatch, tmp_path, loop):
    """What a program of Python ends with in a sandbox of a kind."""
    folder = tmp_path / "own"
    folder.mkdir()

    def run_in(
        kind: str, script: str, allow: tuple[str, ...] = (), seconds: float = 100.0, is_scoring: bool = False
    ) -> ProgramOutcome:
        monkeypatch.setattr(programs, "jail_of_programs", lambda: kind)

        async def whole() -> ProgramOutcome:
            tokenizer = load_tokenizer("builtin")
            endpoint = PolicyEndpoint(print)
            server = await endpoint.start()
            episode = endpoint.open(Session(tokenizer, Request([1], 0, 9), thinking=False, most_turns=2), 2, None)
            policy = None if is_scoring else episode
            command = [sys.executable, "-c", script]
            ended = await Programs((), allow).run(
                command, str(folder), episode.variables, seconds, policy=policy, is_judge=is_scoring
            )
            server.close()
            return ended

        return loop.run_until_complete(whole())

    run_in.folder = folder
    return run_in


@pytest.mark.parametrize("kind", [IN_BUBBLEWRAP, UNDER_LANDLOCK, NO_JAIL])
def test_a_program_reaches_the_policy_and_its_own_folder_and_exit_codes_are_told(run, kind):
    writes = "import pathlib\npathlib.Path('a/b').mkdir(parents=True)\npathlib.Path('a/b/c').write_text('d')\n"
    assert run(kind, writes + CONNECTS) == ("", "200\n", "")
    assert (run.folder / "a/b/c").read_text() == "d"
    assert run(kind, "import sys\nsys.exit('a reason')").fault == "it ended with code 1: a reason"
    starts = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)"
    assert run(kind, starts).fault == ""


@SANDBOXES
def test_a_python_of_a_version_manager_starts(kind, tmp_path, loop, monkeypatch):
    """As pyenv does it: the program on PATH is a script that asks a program beside its folder."""
    manager, folder = tmp_path / "manager", tmp_path / "own"
    for name, calls in (("libexec/choose", sys.executable), ("shims/python9", manager / "libexec/choose")):
        (manager / name).parent.mkdir(parents=True)
        (manager / name).write_text(f'#!/bin/sh\nexec {calls} "$@"\n')
        (manager / name).chmod(0o755)
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{manager / 'shims'}:{os.environ['PATH']}")
    monkeypatch.setattr(programs, "jail_of_programs", lambda: kind)
    ended = loop.run_until_complete(
        Programs((), ()).run(["python9", "-c", "print(6 * 7)"], str(folder), {}, 100.0, is_judge=True)
    )
    assert ended == ("", "42\n", "")


@pytest.mark.parametrize("kind", [UNDER_LANDLOCK])
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not on this machine")
def test_a_library_that_a_program_leaves_in_its_folder_is_not_loaded_outside_of_the_sandbox(
    run, kind, tmp_path, monkeypatch
):
    """An empty element of LD_LIBRARY_PATH is the current folder to the loader, before any line of Python runs."""
    escaped, source = tmp_path / "escaped", tmp_path / "planted.c"
    source.write_text(
        "#include <fcntl.h>\n__attribute__((constructor)) static void loaded(void) "
        f'{{ open("{escaped}", O_CREAT | O_WRONLY, 0600); }}'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", run.folder / "libm.so.6"], check=True)
    subprocess.run([sys.executable, "-c", ""], cwd=run.folder, env={"LD_LIBRARY_PATH": ":"})
    if not escaped.exists():
        pytest.skip("this Python loads no libm")
    escaped.unlink()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/lib:")
    run(kind, "print('starts')")
    assert not escaped.exists()


def test_signals_and_limits_of_a_program_are_not_those_of_its_first_one(tmp_path, loop, monkeypatch):
    """Python ignores two signals, which exec would keep; and a limit above the hard one is none that can be set."""
    monkeypatch.setattr(programs, "jail_of_programs", lambda: NO_JAIL)
    command = ["bash", "-c", "yes | head -n 1 > /dev/null; echo ${PIPESTATUS[0]}; ulimit -c"]
    hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard[1]))
    ended = loop.run_until_complete(Programs((), ()).run(command, str(tmp_path), {}, 100.0, is_judge=True))
    resource.setrlimit(resource.RLIMIT_CORE, hard)
    assert ended[:2] == ("", f"{128 + signal.SIGPIPE}\n0\n")
    absent = ["no-such-program"]
    missing = loop.run_until_complete(Programs((), ()).run(absent, str(tmp_path), {}, 100.0, is_judge=True))
    assert missing.fault == "it ended with code 1: no-such-program: No such file or directory"


@pytest.mark.slow
@SANDBOXES
def test_files_of_others_are_neither_read_nor_written(run, kind, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # what it names may be read
    secret = tmp_path / "secret"
    secret.write_text("key")
    assert "done" in run(NO_JAIL, TELLS.format(f"open({str(secret)!r})")).output
    for place in (secret, Path(__file__), Path("/etc/shadow")):
        assert run(kind, TELLS.format(f"open({str(place)!r})")).fault.split(": ")[-1] in (
            "FileNotFoundError", "PermissionError"
        ), place  # fmt: skip
    run(kind, TELLS.format(f"open({str(secret)!r}, 'w')"))
    run(kind, TELLS.format(f"open({str(tmp_path / 'other')!r}, 'w')"))
    run(kind, f"import os\nos.truncate({str(secret)!r}, 0)")
    assert secret.read_text() == "key" and not (tmp_path / "other").exists()
    assert run(kind, TELLS.format(f"open({str(secret)!r})"), allow=(str(secret),)).fault == ""
    assert run(kind, TELLS.format(f"open({str(secret)!r}, 'w')"), allow=(str(secret),)).fault != ""
    assert secret.read_text() == "key"
    assert run(kind, "import os, sys\nsys.exit(os.environ['HOME'])").fault.endswith(str(run.folder))


@SANDBOXES
def test_other_processes_are_neither_seen_nor_signalled(run, kind):
    seen = run(kind, TELLS.format("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"))
    assert seen.output.startswith("2\n") if kind == BUBBLEWRAP else "PermissionError" in seen.fault
    run(kind, "import os\nos.kill(os.getppid(), 9)")  # this process goes on
    other = TELLS.format(f"import os; os.kill({os.getpid()}, 9)")
    assert run(kind, other).fault.split(": ")[-1] in ("ProcessLookupError", "PermissionError")


@SANDBOXES
def test_no_other_port_is_reached_and_none_by_the_scoring_program(run, kind):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        connects = TELLS.format(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        assert "done" in run(NO_JAIL, connects).output
        refused = ("ConnectionRefusedError", "PermissionError")
        assert run(kind, connects).fault.split(": ")[-1] in refused
        assert "done" in run(kind, connects, allow=("network",)).output
    for name in ("SOCK_DGRAM", "SOCK_RAW"):
        sends = f"import socket; socket.socket(socket.AF_INET, socket.{name}).sendto(b'a', ('192.0.2.1', 53))"
        assert run(kind, TELLS.format(sends)).fault.split(": ")[-1] in ("PermissionError", "OSError")
    assert run(kind, TELLS.format("import os") + CONNECTS, is_scoring=True).fault != ""


@SANDBOXES
def test_no_port_is_reached_by_fast_open_or_opened_by_listen(run, kind):
    """Calls that Landlock's rules of ports do not see: the data of a SYN, and a socket without an address."""
    sends = "import socket; socket.socket().sendto(b'GET', 0x20000000, ('127.0.0.1', {}))"
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.1)
        for is_scoring in (False, True):
            ended = run(kind, TELLS.format(sends.format(other.getsockname()[1])), is_scoring=is_scoring)
            assert "done" not in ended.output
            with pytest.raises(TimeoutError):
                other.accept()
    listens = run(kind, TELLS.format("import socket; socket.socket().listen(1)"))
    assert "PermissionError" in listens.fault if kind == LANDLOCK else listens.fault == "", "a network of its own"


@SANDBOXES
def test_git_starts_where_the_configuration_of_the_system_cannot_be_read(run, kind):
    """Git ends with a fault if /etc/gitconfig is there and not shown."""
    script = "import os, subprocess\nsubprocess.run(['git', 'init', '-q'], check=True)\n"
    script += "print(os.environ['GIT_CONFIG_NOSYSTEM'])"
    assert run(kind, script) == ("", "1\n", "")


@SANDBOXES
def test_limits_of_others_keys_and_descriptors_are_out_of_reach(run, kind):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"import os, resource; resource.prlimit({os.getpid()}, resource.RLIMIT_NOFILE, (7, 7))"
    assert run(kind, TELLS.format(limits)).fault.split(": ")[-1] in ("PermissionError", "ProcessLookupError")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    number = {"x86_64": (248, 438), "aarch64": (217, 438)}[os.uname().machine]
    script = f"""
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({number[0]}, b"user", b"name", b"x", 1, -4), ctypes.get_errno())
child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
print(libc.syscall({number[1]}, os.pidfd_open(child.pid), 1, 0), ctypes.get_errno())
child.communicate(b"end")
"""
    assert run(kind, script) == ("", "-1 1\n-1 1\n", "")


@pytest.mark.parametrize("kind", [UNDER_LANDLOCK])
def test_modes_of_files_are_kept_where_a_sandbox_is_required(kind, tmp_path, loop, monkeypatch):
    monkeypatch.setattr(programs, "jail_of_programs", lambda: kind)
    private = tmp_path / "key"
    private.touch(mode=0o600)
    command = [sys.executable, "-c", f"import os\nos.chmod({str(private)!r}, 0o666)"]
    ended = loop.run_until_complete(
        Programs((), (), keeps_modes=True).run(command, str(tmp_path), {}, 100.0, is_judge=True)
    )
    assert "PermissionError" in ended.fault and private.stat().st_mode & 0o777 == 0o600


EVIL = "import os\nos.write(1, b'EVIL\\n')\nos._exit(0)\n"
SYSTEM_PYTHON = next(
    (path for path in ("/usr/bin/python3", os.path.realpath(sys.executable)) if os.access(path, os.X_OK)),
    sys.executable,
)
USER_SITE = subprocess.run(
    [SYSTEM_PYTHON, "-c", "import site; print(site.getusersitepackages())"],
    env={"HOME": "/HOME", "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
).stdout.strip().removeprefix("/HOME/")  # fmt: skip
MONITOR = "[core]\n\tfsmonitor = echo EVIL; false\n"


@pytest.mark.parametrize("kind", [IN_BUBBLEWRAP, UNDER_LANDLOCK, NO_JAIL])
@pytest.mark.parametrize(
    ("files", "command", "variables"),
    [
        ({f"{USER_SITE}/usercustomize.py": EVIL}, [SYSTEM_PYTHON, "-c", "print(0)"], {}),
        ({f"{USER_SITE}/x.pth": EVIL.replace("\n", ";")}, [SYSTEM_PYTHON, "-c", "print(0)"], {}),
        ({"json.py": EVIL}, [SYSTEM_PYTHON, "-c", "import json; print(0)"], {}),
        ({"json/__main__.py": EVIL, "json/__init__.py": EVIL}, [SYSTEM_PYTHON, "-m", "json.tool", "-h"], {}),
        ({"json.py": EVIL},
         ["sh", "-c", f'cd "$GLM46_EPISODE_FOLDER" && {sys.executable} -c "import json; print(0)"'], {}),
        ({"conftest.py": EVIL}, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], {}),
        ({".gitconfig": MONITOR}, ["sh", "-c", "git init -q r && cd r && git status; echo 0"], {}),
        ({".git/config": MONITOR, ".git/HEAD": "ref: refs/heads/a\n", ".git/objects/a": "", ".git/refs/a": ""},
         ["sh", "-c", 'git -C "$GLM46_EPISODE_FOLDER" status; git status; echo 0'], {}),
        ({"Makefile": "all:\n\techo EVIL\n"}, ["sh", "-c", "make; echo 0"], {}),
        ({".bash_profile": "echo EVIL\n"}, ["bash", "-l", "-c", "echo 0"], {}),
        ({"json.py": EVIL, "sitecustomize.py": EVIL}, [SYSTEM_PYTHON, "-c", "import json; print(0)"],
         {"PYTHONPATH": "."}),
        ({"json.py": EVIL, "sitecustomize.py": EVIL}, [SYSTEM_PYTHON, "-c", "import json; print(0)"],
         {"PYTHONPATH": "/x:"}),
        ({"cat": "#!/bin/sh\necho EVIL\n"}, ["sh", "-c", "cat /dev/null; echo 0"], {"PATH": f".:{os.environ['PATH']}"}),
        ({"cat": "#!/bin/sh\necho EVIL\n"}, ["sh", "-c", "cat /dev/null; echo 0"], {"PATH": f":{os.environ['PATH']}"}),
    ],
)  # fmt: skip
def test_a_scoring_program_runs_nothing_that_the_policy_wrote(
    kind, files, command, variables, tmp_path, loop, monkeypatch
):
    folder = tmp_path / "folder"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(programs, "jail_of_programs", lambda: kind)
    ended = loop.run_until_complete(Programs((), ()).run(command, str(folder), {}, 100.0, is_judge=True))
    assert "EVIL" not in ended.both and ended.both.strip(), ended


def test_lists_of_folders_lead_from_the_folder_of_the_trainer(monkeypatch, tmp_path):
    """An empty element is the current folder to Python, to the shell and to the loader of libraries."""
    monkeypatch.chdir(tmp_path)
    variables = {"PATH": ":/bin:.:", "PYTHONPATH": "src:", "LD_LIBRARY_PATH": ":", "LANG": "C"}
    expected = {"PATH": f"/bin:{tmp_path}", "PYTHONPATH": f"{tmp_path}/src", "LANG": "C"}
    assert programs._with_absolute_folders(variables) == expected


@SANDBOXES
def test_a_scoring_program_reads_the_folder_and_imports_what_is_next_to_it(kind, tmp_path, loop, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "answer").write_text("3")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "rules.py").write_text("def points(text): return int(text) / 2")
    (scripts / "score.py").write_text(
        "import os, rules\nfolder = os.environ['GLM46_EPISODE_FOLDER']\n"
        "try:\n    open(folder + '/new', 'w')\nexcept OSError:\n    print('read only')\n"
        "assert os.environ['HOME'] == os.getcwd() != folder\nopen('own', 'w')\n"
        "print(rules.points(open(folder + '/answer').read()))"
    )
    monkeypatch.setattr(programs, "jail_of_programs", lambda: kind)
    command = [sys.executable, str(scripts / "score.py")]
    ended = loop.run_until_complete(Programs((), ()).run(command, str(folder), {}, 100.0, is_judge=True))
    assert ended == ("", "read only\n1.5\n", "")
    assert os.listdir(folder) == ["answer"]


@SANDBOXES
def test_a_scoring_program_can_take_the_folder_as_its_current_one(kind, tmp_path, loop, monkeypatch):
    """The command of docs/rl_agents.md: files that are words of a command are visible."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "answer").write_text("3")
    (folder / "json.py").write_text("print('of the policy')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "score.py").write_text("import json\nprint(json.loads(open('answer').read()))")
    monkeypatch.setattr(programs, "jail_of_programs", lambda: kind)
    start = f'cd "$GLM46_EPISODE_FOLDER" && exec {sys.executable} "$0"'
    command = ["sh", "-c", start, str(scripts / "score.py")]
    ended = loop.run_until_complete(Programs((), ()).run(command, str(folder), {}, 100.0, is_judge=True))
    assert ended == ("", "3\n", "")


def check_all_have_ended(alive: int) -> None:
    """Nobody has the fifo open for writing, at once or soon."""
    watch = select.poll()
    watch.register(alive, 0)
    assert watch.poll(60_000) and watch.poll(0)[0][1] & select.POLLHUP


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "session"), [
    pytest.param(BUBBLEWRAP, "os.setsid()", marks=IN_BUBBLEWRAP.marks),
    pytest.param(LANDLOCK, "", marks=UNDER_LANDLOCK.marks), (NO_JAIL, ""),
])  # fmt: skip
def test_what_a_program_starts_ends_with_it(run, kind, session):
    fifo = run.folder / "alive"
    os.mkfifo(fifo)
    alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    forks = f"""
import os, time
file = os.open("alive", os.O_WRONLY)
for _ in range(100):
    if not os.fork():
        {session or "pass"}
        os.write(file, b".")
        time.sleep(1000)
"""
    for ending, seconds, fault in (("", 100.0, ""), ("time.sleep(1000)", 5.0, "it took more than 5 s")):
        assert run(kind, forks + ending, seconds=seconds).fault == fault
        assert os.read(alive, 1000), "they had started"
        check_all_have_ended(alive)
    os.close(alive)


@pytest.mark.skipif(IS_BUBBLEWRAP_MISSING, reason="bubblewrap does not start here")
@pytest.mark.skipif(os.getuid() == 0, reason="Linux counts no processes of root")
def test_a_fork_bomb_meets_a_limit(run):
    forks = "import os, sys, time\ntry:\n    while True:\n        os.fork() or time.sleep(1000)\nexcept OSError as error:\n    sys.exit(str(error))"  # noqa: E501
    assert "temporarily unavailable" in run(BUBBLEWRAP, forks).fault


@pytest.mark.parametrize("kind", [IN_BUBBLEWRAP, UNDER_LANDLOCK, NO_JAIL])
def test_of_a_long_output_the_end_is_kept(run, kind):
    ended = run(kind, "for _ in range(100):\n    print('x' * 2**20)\nprint('end')")
    assert ended.fault == "" and len(ended.output) == 2**14 and ended.output.endswith("x\nend\n")


def test_a_required_sandbox_is_there_or_the_run_is_refused(monkeypatch):
    def tables(sandbox: str) -> RLConfig:
        return RLConfig.model_validate({
            "prompts_per_rollout": 1, "rewards": [{"name": "code", "options": {"sandbox": sandbox}}],
            "environment": {"kind": "command", "command": [sys.executable], "sandbox": sandbox},
        })  # fmt: skip

    monkeypatch.setattr(jail, "landlock_version", lambda: 0)
    monkeypatch.setattr(jail, "has_bubblewrap", lambda: False)
    with pytest.raises(UserError, match=r'rl\.environment\.sandbox = "required": neither bubblewrap'):
        function_pool.environment_pool(tables("required").environment)
    with pytest.raises(UserError, match=r'reward code = "required"'):
        function_pool.reward_pool(tables("required"))
    function_pool.environment_pool(tables("auto").environment).close()
    function_pool.reward_pool(tables("auto")).close()
    assert "as this user" in jail.describe_jail(jail.jail_of_programs()), "what holds nothing is said"
    monkeypatch.setattr(function_pool, "jail_of_code", lambda: LANDLOCK)
    monkeypatch.setattr(function_pool, "jail_of_programs", lambda: LANDLOCK)
    for sandbox, count in (("auto", 1), ("required", 0)):
        lines = function_pool.sandbox_lines(tables(sandbox))
        assert len(lines) == 2 and sum("may change modes" in line for line in lines) == count, (
            "what is not held is said"
        )
    monkeypatch.undo()
    monkeypatch.setattr(jail, "has_bubblewrap", lambda: False)
    monkeypatch.setattr(jail, "landlock_version", lambda: 5)
    with pytest.raises(UserError, match="bubblewrap does not start here, and in this kernel they may signal processes"):
        jail.require_jail(LANDLOCK, "key", "required")
    jail.require_jail(LANDLOCK, "key", "auto")
    monkeypatch.setattr(jail, "has_bubblewrap", lambda: True)
    assert jail.jail_of_code() == jail.jail_of_programs() == BUBBLEWRAP
    function_pool.environment_pool(tables("required").environment).close()
