"""One rank of ``python -m glm46 preflight``, and the small model that it trains."""

import argparse
import os
import sys
import threading
from pathlib import Path

from glm46.compute.distributed.environment import launched_rank
from glm46.config.check import check_config
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.stop import EXIT_HANG
from glm46.operate.cluster.rank_files import write_error, write_stage
from glm46.operate.cluster.storage import existing
from glm46.run.plan import Plan, resolve_plan

_EXIT_ERROR = 1
_JOIN_SECONDS = 30


def small_plan(config: RunConfig | None, world_size: int, host_ranks: int | None = None) -> Plan:
    """Return the plan of a small model on these ranks.

    It has the config's degrees if they fit the model, so that its groups of ranks are the groups that the run will
    make. Otherwise it has the fewest replicas with even shards. Any number of ranks has such a plan: as many replicas
    as ranks is the last resort.
    """
    kept = (
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
    )
    degrees = {key: getattr(config.parallelism, key) for key in kept} if config is not None else {}
    replicas = (count for count in range(1, world_size + 1) if world_size % count == 0)
    for parallelism in (degrees, *({"data_parallel_replicate_degree": count} for count in replicas)):
        small = RunConfig.model_validate_json(_SMALL_RUN).model_copy()
        small = small.model_copy(update={"parallelism": small.parallelism.model_copy(update=parallelism)})
        if not check_config(small, world_size=world_size):
            break
    return resolve_plan(small, world_size, host_ranks=host_ranks)


_SMALL_RUN = """{
    "job": {"dump_folder": "none"}, "model": {"flavor": "debug"},
    "data": {"document_mask": true, "sources": [{"name": "random", "path": "none"}]},
    "training": {"seq_len": 64, "local_batch_size": 1, "steps": 4, "mixed_precision_param": "float32"},
    "optimizer": {"name": "AdamW", "lr": 1e-3}
}"""


def run_rank(arguments: argparse.Namespace, config: RunConfig | None, seconds: float) -> int:
    """Take part as one rank, for at most this many seconds; return the exit code. Collective.

    An error of the rank is a result of its host, and one line of its output.
    """
    from glm46.compute.distributed.process import join, leave
    from glm46.compute.distributed.process_control import die_with_parent
    from glm46.operate.cluster.ranks import Examination

    die_with_parent()
    deadline = threading.Timer(seconds, os._exit, (EXIT_HANG,))
    deadline.daemon = True
    deadline.start()
    folder = arguments.ranks_folder
    rank = launched_rank()
    write_stage(folder, rank, "meeting")
    try:
        process = join(_JOIN_SECONDS)
        shared = None if config is None else existing(Path(config.job.dump_folder))
        examination = Examination(process, folder, arguments.ranks_per_host, is_full=arguments.full)
        examination.run(shared, small_plan(config, process.world_size, arguments.ranks_per_host))
        leave()
    except BaseException as error:
        fault = write_error(folder, rank, error)
        if not isinstance(error, Exception):
            raise
        if fault is not None:
            print(f"error: rank {rank} in {fault}", file=sys.stderr, flush=True)
        return _EXIT_ERROR
    return 0
