"""Comparison of all hosts: facts that must be equal, hosts that differ from most others, and a table of all results."""

import hashlib
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

import glm46
from glm46.config.faults import counted
from glm46.operate.cluster.host import addresses_of
from glm46.operate.cluster.results import FAIL, PASS, VERDICTS, WARN, HostReport, Result, Subject
from glm46.operate.estimate.machine import driver_version

_PACKAGES = ("torch", "torchao", "numpy", "safetensors", "tiktoken", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_REMEDIES = {
    "code": "the same checkout on all hosts, best on storage that all of them see",
    "config": "put the file on storage that all hosts see, or copy it",
    "GPUs": "ISOLATE the host, or take it out of the hostfile",
    "address of the first node": "the same entry in DNS or /etc/hosts of all hosts",
}
_FORGIVEN = ("kernel", "memory")
"""Facts whose difference is a WARN."""


def host_facts(subject: Subject, config: str) -> dict[str, str]:
    """Return the facts that must be equal on all hosts of a run.

    Args:
        config: the resolved config as text; empty if there is no config.
    """
    gpus = Counter(gpu.name for gpu in subject.machine.gpus)
    facts = {
        "code": _source_digest(),
        "config": hashlib.sha256(config.encode()).hexdigest()[:12] if config else "none",
        "kernel": subject.read("proc/sys/kernel/osrelease") or "unknown",
        "driver": driver_version(subject.root),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())) or "none",
        "cores": str(subject.machine.cores),
        "memory": f"{subject.machine.memory_bytes / 2**30:.0f} GiB",
        "ranks": str(subject.processes),
        "variables": " ".join(f"{name}={value}" for name, value in sorted(subject.variables.items())) or "none",
    }
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "missing"
    if subject.nodes > 1:
        facts["address of the first node"] = ", ".join(addresses_of(subject.address)) or "unknown"
    return facts


def _source_digest() -> str:
    root = Path(glm46.__path__[0])
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compare_hosts(reports: Sequence[HostReport]) -> None:
    """Add to each report the facts in which its host differs from most others, or a PASS if there are no such facts."""
    if len(reports) < 2:
        return
    names = dict.fromkeys(name for report in reports for name in report.facts)
    different: dict[str, list[Result]] = {report.host: [] for report in reports}
    for name in names:
        counts = Counter(report.facts.get(name, "unknown") for report in reports)
        usual = counts.most_common(1)[0][0]  # on a tie, the value of the first host
        for report in reports:
            fact = report.facts.get(name, "unknown")
            if fact != usual:
                verdict = WARN if name in _FORGIVEN else FAIL
                remedy = _REMEDIES.get(name, "install or set the same on all hosts")
                different[report.host].append(Result(f"equal {name}", verdict, fact, usual, remedy))
    for report in reports:
        value = f"{len(names)} facts as most hosts have them"
        report.results += different[report.host] or [Result("equal hosts", PASS, value, "equal")]


def as_json(reports: Sequence[HostReport], group: Sequence[Result], seconds: float) -> str:
    """Return all results as one line of JSON."""
    content = {
        "preflight": worst([*group, *(result for report in reports for result in report.results)]),
        "seconds": round(seconds, 1),
        "hosts": [report.as_dict() for report in reports],
        "group": [result._asdict() for result in group],
    }
    return json.dumps(content)


def from_json(line: str) -> tuple[list[HostReport], list[Result], float]:
    """Invert `as_json`: return the reports, the results of the group, and the seconds."""
    content: Mapping = json.loads(line)
    reports = [HostReport.of(report) for report in content["hosts"]]
    return reports, [Result(**result) for result in content["group"]], content["seconds"]


def worst(results: Sequence[Result]) -> str:
    """Return the worst verdict; a SKIP counts as a PASS."""
    verdicts = {result.verdict for result in results}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)


_STYLES = {PASS: "green", WARN: "yellow", FAIL: "bold red"}
_GROUP = "all ranks"
_BROKEN = re.compile("ISOLATE|REBOOT|RESET")
"""Words in the remedies of faults that no config can cause, see docs/preflight.md."""


def print_table(reports: Sequence[HostReport], group: Sequence[Result], seconds: float, console: Console) -> None:
    """Print each result once, with the remedies after the table.

    A check with the verdict PASS or SKIP on all hosts takes one row; another one takes a row for each bad host, and one
    for all good hosts.
    """
    table = Table(box=None, pad_edge=False)
    for title in ("check", "verdict", "host", "found", "limit"):
        table.add_column(title, overflow="fold")
    rows = [*_rows(reports), *((_GROUP, result) for result in group)]
    for host, result in rows:
        style = _STYLES.get(result.verdict, "")
        table.add_row(
            _plain(result.check),
            f"[{style}]{result.verdict}[/]" if style else result.verdict,
            host,
            _plain(result.value),
            _plain(result.limit),
        )
    console.print(table)
    bad = [(host, result) for host, result in rows if result.verdict in (WARN, FAIL)]
    for host, result in bad:
        console.print(f"{result.verdict} {host}, {_plain(result.check)}: {_plain(result.remedy)}", soft_wrap=True)
    if shutil.which("scontrol"):
        _print_drain_commands(reports, console)
    results = [*group, *(result for report in reports for result in report.results)]
    counts = ", ".join(f"{sum(r.verdict == verdict for r in results)} {verdict}" for verdict in VERDICTS)
    console.print(f"{worst(results)}: {counted(len(reports), 'host')}, {counts}, {seconds:.0f} s")


def _print_drain_commands(reports: Sequence[HostReport], console: Console) -> None:
    """Print Slurm's command that drains a host, for each host with a fault that no config can cause."""
    for report in reports:
        checks = [r.check for r in report.results if r.verdict == FAIL and _BROKEN.search(r.remedy)]
        if checks:
            node = report.host.split()[0].partition(".")[0]
            reason = shlex.quote(f"preflight: {', '.join(dict.fromkeys(checks))}")
            console.print(f"drain: scontrol update NodeName={node} State=DRAIN Reason={_plain(reason)}", soft_wrap=True)


def _rows(reports: Sequence[HostReport]) -> list[tuple[str, Result]]:
    if len(reports) == 1:
        return [(reports[0].host, result) for result in reports[0].results]
    checks = dict.fromkeys(result.check for report in reports for result in report.results)
    rows = []
    for check in checks:
        check_rows = [(report.host, result) for report in reports for result in report.results if result.check == check]
        bad = [(host, result) for host, result in check_rows if result.verdict in (WARN, FAIL)]
        good = [(host, result) for host, result in check_rows if result.verdict not in (WARN, FAIL)]
        rows += bad
        if good:
            first_host, first_result = good[0]
            host = first_host if len(good) == 1 else counted(len(good), "host")
            rows.append((host, first_result))
    return rows


def _plain(text: str) -> str:
    """Escape the markup of rich."""
    return text.replace("[", "\\[")
