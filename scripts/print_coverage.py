"""Print which lines and branches of the core the tests did not run, and how much of each package they ran.

    python scripts/print_coverage.py build/coverage/data

The data are from `./scripts/run_tests.sh --coverage`, which calls this.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.rules import CORE


@dataclass
class Coverage:
    """Lines and branches of some files that exist, and that ran."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: dict[str, int]) -> None:
        """Add a file, by its ``summary`` in coverage's JSON report."""
        self.lines += summary["num_statements"]
        self.lines_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    def __str__(self) -> str:
        lines = f"{_percent(self.lines_run, self.lines)} of {self.lines:6,} lines"
        return f"{lines}   {_percent(self.branches_run, self.branches)} of {self.branches:6,} branches"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "      -"


def is_core(file: str) -> bool:
    """Whether a file, such as ``glm46/run/plan.py``, belongs to the core."""
    return file.startswith(tuple(f"glm46/{package}/" for package in CORE))


def package_of(file: str) -> str:
    """Return the package of a file: ``storage/data`` of ``glm46/storage/data/mix.py``."""
    folders = file.split("/")[1:-1]
    return "/".join(folders[:3]) or "glm46"


def ranges(numbers: Iterable[int]) -> str:
    """Return increasing line numbers as text, such as ``3-5, 9``."""
    texts = []
    first = last = -1
    for number in [*numbers, -1]:  # -1 ends the last range
        if number == last + 1:
            last = number
            continue
        if first >= 0:
            texts.append(f"{first}-{last}" if last > first else f"{first}")
        first = last = number
    return ", ".join(texts)


def read_report(data: Path) -> dict[str, dict]:
    """Return coverage's JSON report by file. The data of all processes beside ``data`` become one file first."""
    parts = [file for file in data.parent.iterdir() if file.name.startswith(data.name + ".")]
    if parts:
        command = [sys.executable, "-m", "coverage", "combine", "--quiet", "--append", f"--data-file={data}"]
        subprocess.run([*command, str(data.parent)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "coverage", "json", "--quiet", f"--data-file={data}", "-o", str(report)]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())["files"]


def main(data: str) -> None:
    """Print the lines and branches of the core that did not run, then the table by package."""
    report = read_report(Path(data))
    # Two rows are sums of others: "all" of every package, "core" of those of the core.
    packages: dict[str, Coverage] = defaultdict(Coverage)
    for file, content in sorted(report.items()):
        packages[package_of(file)].add(content["summary"])
        packages["all"].add(content["summary"])
        if is_core(file):
            packages["core"].add(content["summary"])
    print("\nLines and branches that did not run, in the core:")
    for file, content in sorted(report.items()):
        missing = content["missing_lines"]
        # A branch from or to a line that did not run is clear from the line.
        branches = [branch for branch in content["missing_branches"] if not {*branch} & {*missing}]
        # A negative end is the exit of the function that begins there.
        texts = [f"{start} to {end if end > 0 else 'exit'}" for start, end in branches]
        if is_core(file) and (missing or branches):
            print(f"  {file}: lines {ranges(missing) or 'none'}; branches {', '.join(texts) or 'none'}")
    print("\nCoverage by package:")
    for package in [*sorted(packages.keys() - {"core", "all"}), "core", "all"]:
        if packages[package].lines:
            print(f"  {package:24} {packages[package]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
