"""One rank of ``python -m glm46 preflight``: it takes part in all checks. The first rank of each host writes all
results to a file, which its launcher reads."""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from glm46.compute.distributed.environment import launched_local_rank, launched_rank
from glm46.compute.distributed.process import join, leave, ranks_of_every_host
from glm46.compute.distributed.process_control import die_with_parent
from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.operate.cluster.devices import collectives, pairs, products
from glm46.operate.cluster.equal_hosts import clock_offset, equal_hosts, host_facts
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, Result, describe_error, from_json, merge_ranks, write_results
from glm46.operate.cluster.small_job import small_job, small_plan
from glm46.operate.cluster.storage import inputs, shared_folder, storage
from glm46.run.plan import resolve_plan

RESULTS_FILE = "results.json"
"""Results of a host, and later of all hosts."""
_EXIT_ERROR = 1
_WAIT_SECONDS = {False: 30, True: 300}
"""Time that ranks wait for the slowest of them; the key is True for a full preflight."""
_RANK_SECONDS = {False: 180, True: 1500}
"""Time for all checks by the ranks, after which the system ends them."""
_END_SECONDS = 2.0
"""Time for rank 0 to write which ranks did not come, before torchrun ends it because another rank has ended."""


def run_rank(arguments: argparse.Namespace, config: RunConfig | None) -> int:
    """Take part as one rank. Return the exit code, 1 if a check raised an error; a FAIL is only in the file.
    Collective."""
    die_with_parent()
    # The system ends a rank that hangs, also in a call that no exception interrupts.
    signal.alarm(_RANK_SECONDS[arguments.full])
    file = arguments.ranks_folder / RESULTS_FILE
    results = from_json(file.read_text())
    host = results[0].host
    name = "meeting"
    code = 0
    try:
        ranks = _join(_WAIT_SECONDS[arguments.full], is_full=arguments.full)
        results_by_rank = ranks.gather(results)
        hosts = [rank_results[0].host for rank_results in results_by_rank]
        results_by_host = dict(zip(hosts, results_by_rank, strict=True))
        results = [result for host_results in results_by_host.values() for result in host_results]
        for next_name, check in _checks(ranks, config).items():
            name = next_name
            results += merge_ranks(hosts, ranks.gather(check()))
            if ranks.is_first_of_host:
                write_results(file, results)
        leave()
    except (RuntimeError, OSError, ValueError, UserError) as error:
        text = f"rank {launched_rank()}: {describe_error(error)}"
        print(f"error: {text}, in {name}", file=sys.stderr, flush=True)
        remedy = "look at the hosts of the named ranks: dmesg, GPU, network; preflight them alone"
        if launched_local_rank() == 0:
            write_results(file, [*results, Result(name, FAIL, text, "an end", remedy, host)])
        if launched_rank() != 0:
            time.sleep(_END_SECONDS)
        code = _EXIT_ERROR
    return code


def _join(wait_seconds: int, *, is_full: bool) -> RankGroup:
    process = join(wait_seconds)
    gloo: Any = dist.new_group(backend="gloo")  # torch's type includes a constant for ranks outside the group
    local_ranks = ranks_of_every_host()
    if local_ranks == 0:
        raise RuntimeError("hosts have different numbers of ranks; state one number with --nproc")
    return RankGroup(process, gloo, local_ranks, wait_seconds, is_full)


def _checks(ranks: RankGroup, config: RunConfig | None) -> dict[str, Callable[[], Result | None]]:
    """Return the checks in their order, by name."""
    world_size = ranks.process.world_size
    checks: dict[str, Callable[[], Result | None]] = {}
    if ranks.hosts > 1:
        facts = host_facts("" if config is None else dump_config(config))
        checks |= {"equal hosts": partial(equal_hosts, ranks, facts), "clock offset": partial(clock_offset, ranks)}
    if config is not None:
        # Degrees that do not fit the ranks, which `launch` refuses, are checked with the fewest ranks that they allow.
        plan = resolve_plan(config, None if check_config(config, world_size=world_size) else world_size)
        if ranks.hosts > 1:
            checks["shared folder"] = partial(shared_folder, ranks, plan)
        checks |= {"storage": partial(storage, ranks, plan), "inputs": partial(inputs, ranks, plan)}
    return checks | {
        "products": partial(products, ranks),
        "collectives": partial(collectives, ranks),
        "pairs": partial(pairs, ranks),
        "small job": partial(small_job, small_plan(config, world_size, ranks.local_ranks), ranks.process),
    }
