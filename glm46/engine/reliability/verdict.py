"""The verdict of a hang report, for programs: which ranks on which hosts kept the others waiting. Needs no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

HANG_FOLDER = "hang"
"""In the dump folder: stacks, flight recorders, hang.txt, verdict.json."""
_FILE = "verdict.json"


def write_verdict(folder: Path, ranks: Sequence[int], hosts: Mapping[int, str], step: int) -> None:
    """Write ``{"step": 12, "ranks": [3], "hosts": ["node4"]}``; a rank of an unknown host has the host ""."""
    verdict = {"step": step, "ranks": list(ranks), "hosts": [hosts.get(rank, "") for rank in ranks]}
    (folder / _FILE).write_text(json.dumps(verdict) + "\n")


def remove_verdict(folder: Path) -> None:
    """Remove the verdict of an earlier start."""
    (folder / _FILE).unlink(missing_ok=True)


def hung_ranks(dump_folder: Path) -> list[int]:
    """The ranks that the verdict of the last start names; none without one."""
    return _read(dump_folder)["ranks"]


def hung_hosts(dump_folder: Path) -> list[str]:
    """The known hosts of `hung_ranks`, each once, without domains: names as Slurm has them."""
    return [host for host in dict.fromkeys(name.partition(".")[0] for name in _read(dump_folder)["hosts"]) if host]


def _read(dump_folder: Path) -> dict[str, list]:
    try:
        return json.loads((dump_folder / HANG_FOLDER / _FILE).read_text())
    except (OSError, ValueError):
        return {"ranks": [], "hosts": []}
