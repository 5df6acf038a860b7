"""All ranks judge a published checkpoint together: the cheap checks once, the hashes shared out between them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from glm46.checkpoint.integrity import check_files, check_hash, read_manifest, records_of
from glm46.checkpoint.publish import published_steps
from glm46.distributed.ranks import Ranks

_FILES_AT_ONCE = 8


def verify_folder(path: Path, step: int | None, ranks: Ranks) -> list[str]:
    """Everything wrong with a checkpoint, one line each, the same on all ranks; empty when it is whole. Collective.

    Args:
        path: the step folder.
        step: the step it must be of; None takes any.
    """
    with ranks.stage(f"verifying {path}") as stage:
        if ranks.is_first:
            stage.value = cheap_faults(path, step)
    body, faults = stage.values[0]
    if faults:
        return faults
    with ranks.stage(f"verifying {path}") as stage:
        largest_first = sorted(records_of(body).items(), key=lambda item: -item[1].bytes)
        mine = largest_first[ranks.rank :: ranks.size]
        # Alone on a machine, several files at once; many ranks on one keep its cores busy as it is.
        with ThreadPoolExecutor(min(_FILES_AT_ONCE, max(1, (os.cpu_count() or 1) // ranks.size))) as pool:
            checked = pool.map(lambda item: check_hash(path / item[0], item[1]), mine)
            stage.value = [fault for faults in checked for fault in faults]
    return [fault for faults in stage.values for fault in faults]


def cheap_faults(path: Path, step: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The manifest's body, and what is wrong without reading the content of the other files. Not collective."""
    if not path.is_dir():
        there = ", ".join(str(known) for known in published_steps(path.parent)) or "none"
        return None, [f"{path}: no such checkpoint; steps in {path.parent}: {there}"]
    body, faults = read_manifest(path, step)
    return body, faults if body is None else check_files(path, body)
