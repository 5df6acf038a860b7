"""Plant known faults in the code, one at a time, and show that the tests named for each of them fail.

    python scripts/check_mutations.py                  all faults of tests/mutations.toml
    python scripts/check_mutations.py router adamw     those whose name or file contains one of these words

The faults are planted in a copy of the checkout. Exit code 1 if a fault is not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).resolve().parents[1]
TABLE = "tests/mutations.toml"
_SECONDS = 900
"""Time for the tests of one fault. Tests that hang under a fault have found it."""
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest."""


class Mutation(NamedTuple):
    """A fault and the tests that must find it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    """Files or tests of pytest."""


def read_mutations(root: Path = ROOT) -> list[Mutation]:
    """Return the faults of the table."""
    return [Mutation(**row) for row in tomli.loads((root / TABLE).read_text())["mutation"]]


def planted(mutation: Mutation, text: str) -> str:
    """Return the text of a file with the fault. Raises ValueError unless the line to change occurs exactly once."""
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{TABLE}: {mutation.name}: `old` occurs {count} times in {mutation.file}; it must once")
    return text.replace(mutation.old, mutation.new)


def _copy_checkout(target: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def _run_tests(folder: Path, tests: Sequence[str], seconds: float | None = None) -> tuple[int, str]:
    """Run tests up to the first failure. Returns pytest's exit code and the name of the test that failed."""
    # Of a file the default tier, of tests given by name also thorough ones.
    tier = "" if any("::" in test for test in tests) else "not thorough and "
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", f"{tier}not long and not slurm"]
    # Without bytecode: a fault that is planted within a second of another one would run the other one's.
    variables = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        result = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"the tests hang for {seconds:.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) \S*::(\S+)", result.stdout, re.MULTILINE)
    return result.returncode, failed[1] if failed else result.stdout[-2000:]


def _pass_without_fault(folder: Path, mutations: Sequence[Mutation]) -> bool:
    all_tests = sorted({test for mutation in mutations for test in mutation.tests})
    print(f"{len(mutations)} faults; first {len(all_tests)} tests and files without any", flush=True)
    code, detail = _run_tests(folder, all_tests)
    if code != _PASSED:
        print(f"error: these tests fail without a fault: {detail}")
    return code == _PASSED


def main() -> int:
    """Check the faults that the command line selects; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names or files of faults; all if absent")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the faults, for N machines")
    parser.add_argument(
        "--passed", action="store_true", help="the suite has just passed: do not run the tests without a fault"
    )
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    words = arguments.words or [""]
    chosen = [row for row in read_mutations() if any(word in f"{row.name} {row.file}" for word in words)]
    chosen = chosen[part - 1 :: parts]
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        folder = Path(temporary)
        _copy_checkout(folder)
        if not arguments.passed and not _pass_without_fault(folder, chosen):
            return 1
        missed = []
        for number, mutation in enumerate(chosen, 1):
            file = folder / mutation.file
            sound = file.read_text()
            file.write_text(planted(mutation, sound))
            began = time.monotonic()
            code, detail = _run_tests(folder, mutation.tests, _SECONDS)
            file.write_text(sound)
            verdict = "found" if code == _FAILED else "MISSED" if code == _PASSED else f"ERROR {code}"
            if code != _FAILED:
                missed.append(mutation.name)
            seconds = time.monotonic() - began
            where = detail.splitlines()[-1] if detail else ""
            print(f"{number:3} {verdict:6} {seconds:5.0f} s  {mutation.name}: {where}", flush=True)
    found = len(chosen) - len(missed)
    print(f"{found} of {len(chosen)} faults found ({100 * found / max(len(chosen), 1):.1f} %)")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
