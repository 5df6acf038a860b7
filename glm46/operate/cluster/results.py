"""Results of checks: the faults of one check, the result of each host, one table of all, and one line of JSON."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from subprocess import SubprocessError
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glm46.config.errors import UserError
from glm46.config.faults import counted

PASS = "PASS"
SKIP = "SKIP"
WARN = "WARN"
FAIL = "FAIL"
STATUSES = (PASS, SKIP, WARN, FAIL)
"""From the best to the worst; the value of a SKIP is its reason."""
_STYLES = {PASS: "green", SKIP: "default", WARN: "yellow", FAIL: "bold red"}
STANDARD_OUTPUT = Path("-")
"""Value of ``--json`` that prints the line."""
EXIT_FAIL = 1
"""Exit code of a preflight with a FAIL."""
_ERROR_LETTERS = 300
_LOG_COLUMNS = 150


class Result(NamedTuple):
    """The result of one check on one host."""

    name: str
    status: str
    """One of `STATUSES`."""
    value: str
    """Measured value."""
    requirement: str = ""
    remedy: str = ""
    host: str = ""


class Defect(NamedTuple):
    """A value that does not meet the requirement of a check."""

    status: str
    """WARN or FAIL."""
    value: str
    remedy: str


def judge(name: str, faults: Sequence[Defect], value: str, requirement: str) -> Result:
    """Return a PASS with the value, or the worst status with the values and remedies of all faults."""
    if not faults:
        return Result(name, PASS, value, requirement)
    values = "; ".join(fault.value for fault in faults)
    remedies = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
    return Result(name, worst(faults), values, requirement, remedies)


def worst(results: Iterable[Result | Defect]) -> str:
    """Return the worst status; a SKIP counts as a PASS."""
    statuses = {result.status for result in results}
    return next((status for status in (FAIL, WARN) if status in statuses), PASS)


def merge_ranks(hosts: Sequence[str], results: Sequence[Result | None]) -> list[Result]:
    """Return the worst result of each host, with the value of each rank that has it.

    Args:
        hosts: host of each rank.
        results: result of each rank; None from ranks that checked nothing.
    """
    merged = []
    for host in dict.fromkeys(hosts):
        answers = {rank: result for rank, result in enumerate(results) if result is not None and hosts[rank] == host}
        bad = {rank: result for rank, result in answers.items() if result.status in (WARN, FAIL)}
        result = max(answers.values(), key=lambda answer: STATUSES.index(answer.status))
        if len({answer.value for answer in bad.values()}) > 1:
            result = result._replace(value="; ".join(f"rank {rank}: {answer.value}" for rank, answer in bad.items()))
        merged.append(result._replace(host=host))
    return merged


def run_check(name: str, check: Callable[[], Result]) -> Result:
    """Return the result of a check; its error is a FAIL."""
    try:
        return check()
    except (OSError, ValueError, RuntimeError, UserError, SubprocessError) as error:
        remedy = "look at this part of the host by hand; if it is well, report the error with the output of --json"
        return Result(name, FAIL, describe_error(error), "an answer", remedy)


def describe_error(error: BaseException) -> str:
    """Describe an error on one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", _ERROR_LETTERS)


def show_results(results: Sequence[Result], seconds: float, json_file: Path | None) -> int:
    """Print all results, or write them to a file, too; return the exit code."""
    if json_file == STANDARD_OUTPUT:
        print(as_json(results, seconds), flush=True)
    else:
        if json_file is not None:
            json_file.write_text(as_json(results, seconds) + "\n")
        width = None if sys.stdout.isatty() else _LOG_COLUMNS
        print_table(results, seconds, Console(highlight=False, width=width))
    return EXIT_FAIL if worst(results) == FAIL else 0


def as_json(results: Sequence[Result], seconds: float) -> str:
    """Return all results as one line of JSON."""
    rows = [result._asdict() for result in results]
    return json.dumps({"preflight": worst(results), "seconds": round(seconds, 1), "results": rows})


def write_results(file: Path, results: Sequence[Result]) -> None:
    """Replace a file of results, whose reader sees all of the old or all of the new ones."""
    draft = file.with_suffix(".draft")
    draft.write_text(as_json(results, 0.0))
    draft.replace(file)


def from_json(line: str) -> list[Result]:
    """Return the results in a line of `as_json`."""
    return [Result(**row) for row in json.loads(line)["results"]]


def print_table(results: Sequence[Result], seconds: float, console: Console) -> None:
    """Print the checks in order, one row for all hosts on which a check has no fault; then the remedies."""
    table = Table("check", "status", "host", "measured", "required", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for result in _rows(results):
        name, host, value, requirement = map(escape, (result.name, result.host, result.value, result.requirement))
        table.add_row(name, f"[{_STYLES[result.status]}]{result.status}[/]", host, value, requirement)
    console.print(table)
    for result in results:
        if result.status in (WARN, FAIL):
            line = f"{result.status} {result.host}, {result.name}: {result.remedy}"
            console.print(escape(line), soft_wrap=True)
    hosts = {result.host for result in results}
    counts = ", ".join(f"{sum(r.status == status for r in results)} {status}" for status in STATUSES)
    console.print(f"{worst(results)}: {counted(len(hosts), 'host')}, {counts}, {seconds:.0f} s")


def _rows(results: Sequence[Result]) -> list[Result]:
    """Merge the results of each check that have no fault, and order the rows by check."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.name, result.host if result.status in (WARN, FAIL) else ""), []).append(result)
    order = list(dict.fromkeys(result.name for result in results))
    rows = [
        group[0]._replace(host=group[0].host if len(group) == 1 else counted(len(group), "host"))
        for group in groups.values()
    ]
    return sorted(rows, key=lambda row: order.index(row.name))
