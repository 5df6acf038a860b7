"""Results as a table: what is wrong first by host, then what was found."""

import re
import shlex
import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from glm46.config.faults import counted
from glm46.operate.cluster.compare import worst
from glm46.operate.cluster.results import FAIL, PASS, VERDICTS, WARN, HostReport, Result

_STYLES = {PASS: "green", WARN: "yellow", FAIL: "bold red"}
_GROUP = "all ranks"
_BROKEN = re.compile("ISOLATE|REBOOT|RESET")
"""In the remedies of what a config cannot cause, see docs/preflight.md."""


def print_table(reports: Sequence[HostReport], group: Sequence[Result], seconds: float, console: Console) -> None:
    """Print each result once: a check whose verdict is PASS or SKIP on all hosts is one row, else one for each bad
    host and one for the good ones. Remedies follow the table."""
    table = Table(box=None, pad_edge=False)
    for title in ("check", "verdict", "host", "found", "limit"):
        table.add_column(title, overflow="fold")
    rows = [*_rows(reports), *((_GROUP, result) for result in group)]
    for host, result in rows:
        style = _STYLES.get(result.verdict, "")
        table.add_row(_plain(result.check), f"[{style}]{result.verdict}[/]" if style else result.verdict, host,
                      _plain(result.value), _plain(result.limit))  # fmt: skip
    console.print(table)
    bad = [(host, result) for host, result in rows if result.verdict in (WARN, FAIL)]
    for host, result in bad:
        console.print(f"{result.verdict} {host}, {_plain(result.check)}: {_plain(result.remedy)}", soft_wrap=True)
    for report in reports if shutil.which("scontrol") else ():
        checks = [r.check for r in report.results if r.verdict == FAIL and _BROKEN.search(r.remedy)]
        if checks:
            node = report.host.split()[0].partition(".")[0]
            reason = shlex.quote(f"preflight: {', '.join(dict.fromkeys(checks))}")
            console.print(f"drain: scontrol update NodeName={node} State=DRAIN Reason={_plain(reason)}", soft_wrap=True)
    every = [*group, *(result for report in reports for result in report.results)]
    counts = ", ".join(f"{sum(r.verdict == verdict for r in every)} {verdict}" for verdict in VERDICTS)
    console.print(f"{worst(every)}: {counted(len(reports), 'host')}, {counts}, {seconds:.0f} s")


def _rows(reports: Sequence[HostReport]) -> list[tuple[str, Result]]:
    if len(reports) == 1:
        return [(reports[0].host, result) for result in reports[0].results]
    checks = dict.fromkeys(result.check for report in reports for result in report.results)
    rows = []
    for check in checks:
        here = [(report.host, result) for report in reports for result in report.results if result.check == check]
        bad = [(host, result) for host, result in here if result.verdict in (WARN, FAIL)]
        good = [(host, result) for host, result in here if result.verdict not in (WARN, FAIL)]
        rows += bad
        if good:
            rows.append((good[0][0] if len(good) == 1 else counted(len(good), "host"), good[0][1]))
    return rows


def _plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", "\\[")
