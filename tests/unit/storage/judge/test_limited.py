"""Programs in limited processes, and documents that must run: what hangs, forks or fills memory meets its limit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from glm46.config.text_recipe import TextRecipe
from glm46.storage.data.manifest import load_manifest
from glm46.storage.judge import compilers, limited
from glm46.storage.judge.compilers import run_fault
from glm46.storage.judge.jail import BUBBLEWRAP, LANDLOCK, has_bubblewrap
from glm46.storage.judge.landlock import landlock_version
from glm46.storage.judge.limited import run_limited
from glm46.storage.prepare.pipeline import prepare_text

LIMITS = dict(cpu_seconds=1, seconds=300, memory_gib=0.25)
CLONE = "import ctypes\nprint(ctypes.CDLL(None).syscall({}, {}, 0, 0, 0, 0))"


@pytest.mark.parametrize("program, error", [
    ("import os\nos.fork()", "PermissionError"), ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "PermissionError"),
    ("import socket\nsocket.socket()", "PermissionError"), ("bytearray(2**30)", "MemoryError"),
    ("x = []\nwhile True: x.append('a' * 2**20)", "MemoryError"), ("while True: print('x' * 2**16)", "OSError"),
    ("import os\nos.environ['HOME']", "KeyError"),
    ("open('big', 'wb').write(bytes(2**23))", "OSError"), ("import sys\nsys.exit('no')", "no"),
])  # fmt: skip
def test_a_program_meets_its_limits(program, error):
    ended = run_limited(program, **LIMITS)
    assert ended.status > 0 and ended.error.startswith(error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    pytest.param(LANDLOCK, marks=pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")),
    pytest.param(BUBBLEWRAP, marks=pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap does not start here")),
])  # fmt: skip
def test_files_and_processes_of_others_are_out_of_reach(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(limited, "jail_of_code", lambda: kind)
    secret = tmp_path / "secret"
    secret.write_text("key")
    for place in (secret, *(f"/proc/{os.getpid()}/{name}" for name in ("mem", "environ", "fd/0")), "/etc/shadow"):
        assert run_limited(f"open({str(place)!r})", **LIMITS).error.startswith(("PermissionError", "FileNotFound")), (
            place
        )
    run_limited(f"open({str(secret)!r}, 'w')", **LIMITS)
    assert secret.read_text() == "key"
    assert run_limited("open('own', 'w').write('a')\nprint(open('own').read())", **LIMITS) == (0, "a\n", "")
    assert run_limited("while True: pass", **LIMITS).status == -signal.SIGKILL
    assert run_limited("import os\nos.fork()", **LIMITS).error.startswith("PermissionError")


@pytest.mark.parametrize("flags", [int(signal.SIGCHLD), 0x100 | int(signal.SIGCHLD)])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
def test_system_calls_that_start_a_process_fail_without_libc_too(flags):
    for number in (56, 57, 58, 435, 0x40000000 | 57):  # clone, fork, vfork, clone3, fork by another number
        assert run_limited(CLONE.format(number, flags), **LIMITS)[:2] == (0, "-1\n")


def test_a_lower_hard_limit_of_the_job_stays(tmp_path):
    """A limit that could not be taken on would be a verdict on each program."""
    script = tmp_path / "job.py"
    script.write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "from glm46.storage.judge.compilers import run_fault\n"
        "print(run_fault('print(1)'), run_fault('open(\"a\", \"wb\").write(bytes(2**21))'))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert ended.stdout == "None ends with OSError\n", ended.stderr


def test_threads_input_and_output_are_there():
    program = "import threading, sys\nt = threading.Thread(target=lambda: print(sys.stdin.read()))\nt.start()\nt.join()"
    assert run_limited(program, "é\n", **LIMITS) == (0, "é\n\n", "")
    assert run_limited("x = 1\n" * 50_000, **LIMITS).status == 0  # longer than an argument of a program may be


@pytest.mark.slow
def test_time_ends_a_program_that_computes_and_one_that_waits():
    start = time.monotonic()
    assert run_limited("while True: pass", **LIMITS).status == -signal.SIGKILL
    assert run_limited("import time\ntime.sleep(999)", **LIMITS | {"seconds": 0.3}).status is None
    ignores = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(999)"
    assert run_limited(ignores, **LIMITS | {"seconds": 0.3}).status is None
    assert time.monotonic() - start < 100


@pytest.mark.parametrize(
    "program, fault",
    [
        ("assert sum(range(10)) == 45\n", None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "runs too long"),  # as the limit of CPU time does
        ("bytearray(2**40)\n", "ends with MemoryError"),
        ("import a_module_that_is_nowhere\n", "needs a module that is not here"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ends by SIGSEGV"),
        ("class Odd(Exception):\n    pass\nraise Odd\n", "ends with an error"),
        ("import os\nos._exit(3)", "ends with an error"),
    ],
)
def test_the_cause_is_told(program, fault, monkeypatch):
    monkeypatch.setattr(compilers, "_RUN_LIMITS", LIMITS)
    assert run_fault(program) == fault


@pytest.mark.slow
def test_documents_that_do_not_run_are_dropped_and_counted_by_cause(tmp_path):
    programs = [
        "assert sum(range(10)) == 45\n", "def f(:\n", "assert sum(range(10)) == 44\n", "assert sum(range(10)) == 46\n",
        "import os\nwhile True:\n    os.fork()\n",
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in programs))
    recipe = TextRecipe(
        input=(str(tmp_path / "a.jsonl"),), output=str(tmp_path / "out"), verify="execute", held_out=0.0, processes=1,
        deduplicate="exact",
    )  # fmt: skip
    said = []
    prepare_text(recipe, report=said.append)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.splits["train"].documents == 1
    causes = {"ends with SyntaxError": 1, "ends with AssertionError": 2, "ends with PermissionError": 1}
    assert manifest.dropped == causes
    assert all(f"{cause}: {number}" in "\n".join(said) for cause, number in causes.items())
