"""The verdict of a hang report, for launchers: the ranks that kept the others waiting, and their hosts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

HANG_FOLDER = "hang"
"""In the dump folder: stacks, flight recorders, hang.txt, verdict.json."""
VERDICT_FILE = "verdict.json"


def write_verdict(folder: Path, ranks: Sequence[int], hosts: Mapping[int, str], step: int) -> None:
    """Write ``{"step": 12, "ranks": [3], "hosts": ["node4"]}``; a rank of an unknown host has the host ""."""
    verdict = {"step": step, "ranks": list(ranks), "hosts": [hosts.get(rank, "") for rank in ranks]}
    (folder / VERDICT_FILE).write_text(json.dumps(verdict) + "\n")
