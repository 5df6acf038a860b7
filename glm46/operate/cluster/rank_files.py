"""Files by which the ranks of a host report to the process that started them: stages, errors and results."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from glm46.config.errors import UserError
from glm46.operate.cluster.results import FAIL, Result, describe_error

WAITS = ", waits for the others"
"""End of the stage of a rank that has done its own part."""
DONE = "done"
"""Stage of a rank that has done all parts."""

Rows = dict[int, list[Result]]
"""Results by the number of the host, -1 for the group."""

_ERROR = ": "
"""Separator of a stage and the error that ended it."""
_ROWS_FILE = "rows.json"
_HAS_LOST_OTHERS = re.compile("by peer|Broken pipe|pair closure|[Tt]imed out|remote process|remote error")
"""Texts in errors of gloo, NCCL and their store on a rank whose peers have ended or do not answer."""


def write_stage(folder: Path, rank: int, stage: str) -> None:
    """Note the stage that a rank begins."""
    (folder / f"rank-{rank}").write_text(stage)


def write_error(folder: Path, rank: int, error: BaseException) -> str | None:
    """Note the error that has ended a rank; return it, or None if the rank has only lost the others."""
    stage = (folder / f"rank-{rank}").read_text()
    if isinstance(error, RuntimeError) and WAITS not in stage and _HAS_LOST_OTHERS.search(str(error)):
        stage += WAITS
    text = "; ".join(error.faults) if isinstance(error, UserError) else describe_error(error)
    write_stage(folder, rank, f"{stage}{_ERROR}{text}")
    return None if WAITS in stage else f"{stage}{_ERROR}{text}"


def read_stages(folder: Path) -> dict[int, str]:
    """Return the last stage of each rank of this host."""
    return {int(path.name.removeprefix("rank-")): path.read_text() for path in folder.glob("rank-*")}


def write_rows(folder: Path, rows: Mapping[int, list[Result]]) -> None:
    """Write the results so far, in one step: this rank may be killed at any time."""
    content = {str(host): [result._asdict() for result in results] for host, results in rows.items()}
    draft = folder / f"{_ROWS_FILE}.draft"
    draft.write_text(json.dumps(content))
    draft.replace(folder / _ROWS_FILE)


def read_rows(folder: Path) -> Rows:
    """Invert `write_rows`; empty if rank 0 has written nothing, or is on another host."""
    path = folder / _ROWS_FILE
    content = json.loads(path.read_text()) if path.is_file() else {}
    return {int(host): [Result(**result) for result in results] for host, results in content.items()}


def failed_ranks(stages: Mapping[int, str], cause: str, local_ranks: int) -> Rows:
    """Return a result for each host with ranks that did not finish and that the others wait for.

    Args:
        stages: stages of all ranks, see `read_stages`.
        cause: cause of the end, from the process that started the ranks.
        local_ranks: ranks of each host.
    """
    unfinished = {rank: stage for rank, stage in sorted(stages.items()) if WAITS not in stage and stage != DONE}
    are_equal = len(unfinished) == len(stages) > 1 and len(set(unfinished.values())) == 1
    unfinished = unfinished or dict(sorted(stages.items()))
    ended = {rank: stage for rank, stage in unfinished.items() if _ERROR in stage}
    remedy = "look at this host: dmesg, GPU, network; then preflight it alone"
    remedy = "all ranks fail alike: report it with the output of --json" if ended and are_equal else remedy
    by_host: dict[int, dict[str, list[int]]] = {} if unfinished else {-1: {}}
    for rank, stage in (ended or unfinished).items():
        by_host.setdefault(rank // local_ranks, {}).setdefault(stage, []).append(rank)
    rows = {}
    for host, ranks_by_stage in by_host.items():
        where = [f"rank {', '.join(map(str, ranks))} in {stage}" for stage, ranks in ranks_by_stage.items()]
        value = "; ".join([*([] if ended else [cause]), *(where or ["before they began"])])
        rows[host] = [Result("ranks", FAIL, value, "all come to their end", remedy)]
    return rows
