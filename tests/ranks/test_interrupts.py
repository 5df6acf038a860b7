"""Signals before ranks train, once and twice: interrupts.py, which says how to run many."""

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ranks.interrupts import ROOT, attempt, phases

CASES = {
    "start": ("start", signal.SIGINT), "prepare": ("prepare", signal.SIGINT, signal.SIGINT),
    "prepare terminated": ("prepare", signal.SIGTERM),
    "prepare a source": ("prepare a source", signal.SIGHUP, signal.SIGTERM), "waiting": ("waiting", signal.SIGTERM),
    "misspelt": ("misspelt", signal.SIGINT, signal.SIGINT), "first": ("first", signal.SIGUSR1),
    "convert": ("convert", signal.SIGTERM), "generate": ("generate", signal.SIGINT, signal.SIGINT),
}  # fmt: skip
"""By name: what is started, and the signals."""


def end_in_time(inputs: Path, folder: Path, phase: str, *numbers: int) -> dict:
    """The row of an attempt whose signals came before the end."""
    for i in range(4):
        outputs = folder / str(i)
        outputs.mkdir(parents=True)
        started = phases(inputs, outputs)[phase]
        # A fast machine may be done before the signal comes, or be ending, which shows nothing: the next one comes
        # earlier. A program that ignores its signals ends so each time.
        row = attempt(phase, started._replace(within=started.within / 4**i), numbers, random.Random(0), outputs)
        if not row["ended_before"] and row["code"] != 0:
            break
    return row


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory):
    """By name, `end_in_time` of the selected cases, three at a time: they import on one core, then wait."""
    inputs, outputs = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("outputs")
    phases(inputs, outputs)  # makes the inputs, which no attempt changes
    items = [item for item in request.session.items if item.module is request.module]
    names = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(end_in_time, inputs, outputs / name, *CASES[name]) for name in names}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_ends_all_that_was_started(case, ends):
    row = ends[case].result()
    assert row["right"] and not row["left"], row
    assert "Traceback" not in row["said"], row


@pytest.mark.parametrize(("command", "code"), [
    (["bash", str(ROOT / "run_train.sh")], 75), ([sys.executable, "-m", "glm46", "launch"], 75),
    ([sys.executable, "-m", "glm46", "schema"], 128 + signal.SIGTERM),
])  # fmt: skip
def test_a_signal_that_comes_before_python_listens_is_not_lost(command, code, tmp_path):
    """After run_train.sh it comes before Python's first import, else before glm46's own first import."""
    is_script = command[0] == "bash"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Sender:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'glm46.engine.reliability.stop': os.kill(os.getpid(), signal.SIGTERM)\n"
        f"if {is_script}:\n"
        "    if b'\\0launch\\0' in open('/proc/self/cmdline', 'rb').read(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "else: sys.meta_path.insert(0, Sender)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    end = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert end.returncode == code and end.stderr.endswith("stopped by SIGTERM\n"), end
