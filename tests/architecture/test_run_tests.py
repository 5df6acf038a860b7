"""scripts/run_tests.sh gives its arguments to the right runs of pytest and ends with the right code."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import EVERY

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.sh"
# In place of scripts/environment.sh: a python that prints its arguments and ends with the next of the codes.
ENVIRONMENT = """
use_environment() { python=fake_python; codes=($CODES); }
fake_python() {
    local code=${codes[0]:-0}
    codes=("${codes[@]:1}")
    echo "${OMP_NUM_THREADS:-all} $*"
    return "$code"
}
"""
PYTEST = "-m pytest --durations=15 "
SIDE_BY_SIDE = f"1 {PYTEST}-n auto --maxprocesses=8 "
ALONE = f"all {PYTEST}"
FAST = SIDE_BY_SIDE + "tests/unit tests/architecture"
UNIT = FAST.replace("auto", "5")
RANKS = ALONE + "-n 2 --dist loadfile tests/ranks tests/gpu"
TIER = " -m not thorough and not long and not slurm"
QUICK = " -m not slow and not further and not long and not slurm"


@pytest.fixture
def run_tests(tmp_path):
    """Run the script in a checkout of a few empty rooms; its exit code and what pytest would have been called with."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    # The programs that the script calls, without the machine's nvidia-smi.
    (tmp_path / "programs").mkdir()
    for name in ("bash", "dirname", "readlink", "rm"):
        (tmp_path / "programs" / name).symlink_to(shutil.which(name))
    (tmp_path / "programs" / "nproc").write_text("#!/bin/sh\necho 4\n")
    (tmp_path / "programs" / "nproc").chmod(0o755)
    for package in ("storage/data", "compute/model"):
        (tmp_path / "tests" / "unit" / package).mkdir(parents=True)

    def run(*arguments: str, codes: str = "") -> tuple[int, list[str]]:
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        variables["PATH"] = str(tmp_path / "programs")
        command = [shutil.which("bash"), str(tmp_path / "scripts" / SCRIPT.name), *arguments]
        done = subprocess.run(command, env=variables | {"CODES": codes}, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    return run


@pytest.mark.parametrize(("arguments", "calls"), [
    ([], [UNIT + TIER, RANKS + TIER]), (["--all"], [UNIT, RANKS]), (["--fast"], [FAST + QUICK]),
    (["data"], [SIDE_BY_SIDE + "tests/unit/storage/data"]),
    (["storage/data", "compute"], [SIDE_BY_SIDE + "tests/unit/storage/data tests/unit/compute"]),
    (["--fast", "data", "model", "-x"], [SIDE_BY_SIDE + "tests/unit/storage/data tests/unit/compute/model -x" + QUICK]),
    (["-k", "data"], [UNIT + " -k data", RANKS + " -k data"]),
    (["-k", "tp2 and pp2", "-x"], [UNIT + " -k tp2 and pp2 -x", RANKS + " -k tp2 and pp2 -x"]),
    (["tests"], [UNIT, RANKS]),
    (["tests/unit/storage/data", "--pdb"], [SIDE_BY_SIDE + "tests/unit/storage/data --pdb"]),
    (["./tests/ranks/test_a.py::test_b[2ranks-tp2]"], [ALONE + "./tests/ranks/test_a.py::test_b[2ranks-tp2]"]),
    (["tests/gpu", "tests/unit/compute/model"], [SIDE_BY_SIDE + "tests/unit/compute/model", ALONE + "tests/gpu"]),
])  # fmt: skip
def test_arguments_reach_the_right_run(run_tests, arguments, calls):
    assert run_tests(*arguments) == (0, calls)


def test_coverage_measures_the_same_tests(run_tests):
    measured = [call.replace("-m pytest", "-m coverage run -m pytest") for call in (UNIT + TIER, RANKS + TIER)]
    code, calls = run_tests("--coverage")
    assert code == 0
    assert calls[:2] == measured
    assert calls[2].split()[1] == "scripts/print_coverage.py"
    assert run_tests("--coverage", "--all")[1][:2] == [call.removesuffix(TIER) for call in measured]


def test_tests_of_a_gpu_share_it_with_no_others(run_tests, tmp_path):
    (tmp_path / "programs" / "nvidia-smi").symlink_to(shutil.which("true"))
    assert run_tests() == (0, [UNIT + TIER, ALONE + "tests/ranks tests/gpu" + TIER])


@pytest.mark.parametrize(
    ("arguments", "codes", "code", "runs"),
    [
        ([], "1 0", 1, 2),
        ([], "0 1", 1, 2),
        (["--all"], "2 0", 2, 2),
        ([], "2 0", 2, 2),  # an error of collection in one half does not hide the other half
        (["-x"], "2", 2, 1),
        (["-k", "a"], "5 0", 0, 2),  # only one half has tests of this name
        (["-k", "a"], "0 5", 0, 2),
        (["-k", "a"], "5 1", 1, 2),
        (["-k", "a"], "5 5", 5, 2),
    ],
)
def test_a_failure_in_either_run_is_the_exit_code(run_tests, arguments, codes, code, runs):
    found, calls = run_tests(*arguments, codes=codes)
    assert (found, len(calls)) == (code, runs)


@pytest.mark.parametrize("test", EVERY)
def test_tests_of_the_second_tier_exist_once(test):
    file, name = test.split("::")
    sources = (path.read_text(encoding="utf-8") for path in SCRIPT.parents[1].glob(f"tests/**/{file}.py"))
    assert [f"def {name}(" in source for source in sources].count(True) == 1
