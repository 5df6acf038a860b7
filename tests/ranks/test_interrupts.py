"""Signals before ranks train, once and twice: interrupts.py, which says how to run many."""

import os
import random
import signal
import subprocess
import sys

import pytest

from tests.ranks.interrupts import ROOT, attempt, phases


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder of text, a prepared source, a configuration and a model, which all phases read and none changes."""
    return tmp_path_factory.mktemp("inputs")


@pytest.mark.parametrize(
    ("phase", "numbers"),
    [
        ("start", (signal.SIGINT,)),
        ("prepare", (signal.SIGINT, signal.SIGINT)),
        ("prepare", (signal.SIGTERM,)),
        ("prepare a source", (signal.SIGHUP, signal.SIGTERM)),
        ("waiting", (signal.SIGTERM,)),
        ("misspelt", (signal.SIGINT, signal.SIGINT)),
        ("first", (signal.SIGUSR1,)),
        ("convert", (signal.SIGTERM,)),
        ("generate", (signal.SIGINT, signal.SIGINT)),
    ],
)
def test_a_signal_ends_all_that_was_started(phase, numbers, inputs, tmp_path):
    for i in range(4):
        outputs = tmp_path / str(i)
        outputs.mkdir()
        started = phases(inputs, outputs)[phase]
        # A fast machine may be done before the signal comes, which shows nothing: the next one comes earlier.
        row = attempt(phase, started._replace(within=started.within / 4**i), numbers, random.Random(0), outputs)
        if not row["ended_before"]:
            break
    assert row["right"] and not row["left"] and row["seconds"] < 10, row
    assert "Traceback" not in row["said"], row


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["bash", str(ROOT / "run_train.sh")], 75),
        ([sys.executable, "-m", "glm46", "launch"], 75),
        ([sys.executable, "-m", "glm46", "schema"], 128 + signal.SIGTERM),
    ],
)
def test_a_signal_that_comes_before_python_listens_is_not_lost(command, code, tmp_path):
    """After run_train.sh it comes before Python's first import, else before glm46's own first import."""
    is_script = command[0] == "bash"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Sender:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'glm46.reliability.stop': os.kill(os.getpid(), signal.SIGTERM)\n"
        f"if {is_script}:\n"
        "    if b'launch' in open('/proc/self/cmdline', 'rb').read(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "else: sys.meta_path.insert(0, Sender)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    end = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert end.returncode == code and end.stderr.endswith("stopped by SIGTERM\n"), end
