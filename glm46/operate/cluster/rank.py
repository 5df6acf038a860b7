"""One rank of ``python -m glm46 preflight``: it takes part in all checks of the group; rank 0 writes their results."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from glm46.compute.distributed.environment import launched_rank
from glm46.compute.distributed.process import join, leave
from glm46.compute.distributed.process_control import die_with_parent
from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.operate.cluster.equal_hosts import compare_hosts
from glm46.operate.cluster.preflight import HOST_FILE, RANK_SECONDS, RESULTS_FILE, plan_for
from glm46.operate.cluster.rank_checks import (
    clocks,
    collectives,
    host_copies,
    pairs,
    products,
    shared_folder,
    states_folder,
)
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, SKIP, Result, describe_error
from glm46.operate.cluster.small_steps import small_plan, small_steps
from glm46.operate.cluster.storage import existing

_EXIT_ERROR = 1
_JOIN_SECONDS = {False: 30, True: 120}
_WAIT_SECONDS = {False: 30.0, True: 90.0}
"""Time that ranks wait for the slowest in each check; the key is True for a full preflight."""


def run_rank(arguments: argparse.Namespace, config: RunConfig | None) -> int:
    """Take part as one rank; return the exit code. Collective."""
    die_with_parent()
    # The system ends a rank that hangs, also in a call that no exception interrupts.
    signal.alarm(RANK_SECONDS[arguments.full])
    rank = launched_rank()
    check = "meeting"
    try:
        process = join(_JOIN_SECONDS[arguments.full])
        cpu_group: Any = dist.new_group(backend="gloo")  # torch's type includes a constant for ranks outside the group
        group = RankGroup(process, cpu_group, _WAIT_SECONDS[arguments.full], arguments.full)
        reports = group.gather(json.loads((arguments.ranks_folder / HOST_FILE).read_text()))
        reports_by_host = {report["host"]: report for report in reports}
        group = replace(group, hosts=list(reports_by_host))
        _write(arguments.ranks_folder, rank, _results_of_hosts(list(reports_by_host.values())))
        if len({report["facts"]["ranks"] for report in reports}) > 1:
            results = [Result("ranks", SKIP, "not checked together: hosts have different numbers of ranks")]
            _write(arguments.ranks_folder, rank, results)
        else:
            for name, run in _group_checks(group, config).items():
                check = name
                _write(arguments.ranks_folder, rank, run())
        leave()
    except (RuntimeError, OSError, ValueError, UserError) as error:
        text = describe_error(error)
        print(f"error: rank {rank} in {check}: {text}", file=sys.stderr, flush=True)
        remedy = "look at the hosts of the named ranks: dmesg, GPU, network; preflight them alone"
        _write(arguments.ranks_folder, rank, [Result(check, FAIL, f"rank {rank}: {text}", "an end", remedy)])
        return _EXIT_ERROR
    return 0


def _write(folder: Path, rank: int, results: Sequence[Result]) -> None:
    if rank == 0:
        with (folder / RESULTS_FILE).open("a") as file:
            file.writelines(f"{json.dumps(result._asdict())}\n" for result in results)


def _results_of_hosts(reports: Sequence[dict]) -> list[Result]:
    """Return the results of the hosts, except the first, whose launcher has its own, and their comparison."""
    results = [Result(**result) for report in reports[1:] for result in report["results"]]
    if len(reports) > 1:
        results += compare_hosts({report["host"]: report["facts"] for report in reports})
    return results


def _group_checks(group: RankGroup, config: RunConfig | None) -> dict[str, Callable[[], list[Result]]]:
    checks: dict[str, Callable[[], list[Result]]] = {"clocks": partial(clocks, group)}
    if config is not None and len(group.hosts) > 1:
        checks["shared folder"] = partial(shared_folder, group, existing(Path(config.job.dump_folder)))
    if config is not None and config.optimizer.state_offload == "nvme":
        run_plan = plan_for(config, group.process.world_size)
        folder = Path(config.optimizer.state_offload_folder or "")
        checks["optimizer.state_offload_folder"] = partial(states_folder, group, run_plan, folder)
    plan = small_plan(config, group.process.world_size, group.local_ranks)
    checks |= {
        "products": partial(products, group),
        "host copies": partial(host_copies, group),
        "collectives": partial(collectives, group),
        "pairs": partial(pairs, group),
        "small steps": partial(small_steps, plan, group.process),
    }
    return checks
