"""Verdict of a hang report, for launchers: the ranks that blocked the others, and their hosts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

HANG_FOLDER = "hang"
"""Folder in the dump folder for stacks, flight recorders, hang.txt and verdict.json."""
VERDICT_FILE = "verdict.json"


def write_verdict(folder: Path, ranks: Sequence[int], hosts: Mapping[int, str], step: int) -> None:
    """Write ``{"step": 12, "ranks": [3], "hosts": ["node4"]}``; an unknown host is written as ""."""
    verdict = {"step": step, "ranks": list(ranks), "hosts": [hosts.get(rank, "") for rank in ranks]}
    (folder / VERDICT_FILE).write_text(json.dumps(verdict) + "\n")
