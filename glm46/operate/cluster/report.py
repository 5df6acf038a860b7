"""The results of all hosts as a table and as one line of JSON."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glm46.config.faults import counted
from glm46.operate.cluster.results import ALL_RANKS, FAIL, PASS, SKIP, VERDICTS, WARN, Result, worst

_STYLES = {PASS: "green", SKIP: "", WARN: "yellow", FAIL: "bold red"}


def as_json(results: Sequence[Result], seconds: float) -> str:
    """Return all results as one line of JSON."""
    rows = [result._asdict() for result in results]
    return json.dumps({"preflight": worst(results), "seconds": round(seconds, 1), "results": rows})


def from_json(line: str) -> list[Result]:
    """Return the results in a line of `as_json`."""
    return [Result(**row) for row in json.loads(line)["results"]]


def print_table(results: Sequence[Result], seconds: float, console: Console) -> None:
    """Print a row for each WARN and FAIL, one row for all hosts on which a check has neither, then the remedies."""
    table = Table("check", "verdict", "host", "found", "limit", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for result in _rows(results):
        cells = (result.check, result.verdict, result.host, result.value, result.limit)
        check, verdict, host, value, limit = map(escape, cells)
        style = _STYLES[result.verdict]
        table.add_row(check, f"[{style}]{verdict}[/]" if style else verdict, host, value, limit)
    console.print(table)
    for result in results:
        if result.verdict in (WARN, FAIL):
            line = f"{result.verdict} {result.host}, {result.check}: {result.remedy}"
            console.print(escape(line), soft_wrap=True)
    hosts = {result.host for result in results} - {ALL_RANKS}
    counts = ", ".join(f"{sum(r.verdict == verdict for r in results)} {verdict}" for verdict in VERDICTS)
    console.print(f"{worst(results)}: {counted(len(hosts), 'host')}, {counts}, {seconds:.0f} s")


def _rows(results: Sequence[Result]) -> list[Result]:
    """Order the results by check, and merge equal checks without a fault."""
    rows = []
    for check in dict.fromkeys(result.check for result in results):
        check_results = [result for result in results if result.check == check]
        good = [result for result in check_results if result.verdict not in (WARN, FAIL)]
        rows += [result for result in check_results if result not in good]
        if len({result.host for result in good}) == 1:
            rows += good
        elif good:
            rows.append(good[0]._replace(host=counted(len(good), "host")))
    return rows
