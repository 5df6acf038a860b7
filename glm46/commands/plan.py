"""``python -m glm46 plan``: parameters, memory, time and cost of a config on any number of any GPU."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm46.compute.distributed.environment import visible_gpus
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.config.options import above_zero, positive, process_count, require_writable
from glm46.config.parallelism import ParallelismConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.generation import EngineOptions
from glm46.operate.estimate.machine import detect_machine
from glm46.operate.estimate.prices import KINDS, PRICES_DATE, price_of
from glm46.operate.estimate.report import plan_numbers, plan_run, plan_text
from glm46.operate.estimate.requirement import judge_config
from glm46.operate.estimate.search import search_layouts, search_numbers, search_text
from glm46.operate.estimate.target_cluster import NETWORK_GBITS, STORAGE_GBYTES, Efficiencies, TargetCluster
from glm46.operate.launch.config_options import config_parser, parse_with_overrides
from glm46.run.layout import smallest_world
from glm46.run.plan import resolve_plan

DEFAULT_GPU = "H100"
EXIT_DOES_NOT_FIT = 1
_MOST_GPUS = 2**18
"""Upper bound on GPUs, above the size of any cluster. The time of a plan grows with the ranks, because Muon assigns
matrices to them."""


def plan_command(argv: Sequence[str]) -> int:
    """Print the plan of a config; returns the exit code: 1 if it does not fit on the named GPUs.

    Raises:
        UserError: the config has faults, or an option is wrong.
    """
    parser = config_parser("plan")
    parser.add_argument(
        "--gpus", "--nproc", type=process_count, metavar="N", help="default: the fewest that fit the degrees"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="such as H800, or described: MI300X:bf16=1307,memory=191,bandwidth=5300,link=448 (dense BF16 TFLOP/s, "
        "GiB, GB/s of the memory, GB/s to the other GPUs of its node); default: H100, and a look at this machine",
    )
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help="of a host; default: the GPU's, mostly 8")
    parser.add_argument(
        "--network",
        type=above_zero,
        default=NETWORK_GBITS,
        metavar="GBIT",
        help=f"Gbit/s of each GPU's own port between nodes; default {NETWORK_GBITS:.0f}",
    )
    parser.add_argument(
        "--storage",
        type=above_zero,
        default=STORAGE_GBYTES,
        metavar="GBYTES",
        help=f"GB/s that each node writes to the folder of checkpoints; default {STORAGE_GBYTES:g}",
    )
    parser.add_argument("--exchange", choices=("own", "deepep"), default="own", help="the run's, or published stacks'")
    price_help = f"of one GPU for one hour, or {', '.join(KINDS)}: of {PRICES_DATE}"
    parser.add_argument("--price", type=_word_or(above_zero, *KINDS), metavar="DOLLARS", help=price_help)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="efficiencies of `benchmark rates` and `links`")
    parser.add_argument(
        "--document-tokens",
        type=positive,
        metavar="N",
        help="mean tokens of a document, whose lengths are taken as exponential; absent: each row is one document",
    )
    parser.add_argument(
        "--engines", type=positive, metavar="N", help="GPUs of servers; default: an engine for each URL"
    )
    parser.add_argument("--gpus-per-engine", type=positive, metavar="N", help="default: the fewest with room")
    parser.add_argument("--completion-tokens", type=positive, metavar="N", help="mean; default: half of the longest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    parser.add_argument(
        "--search",
        action="store_true",
        help="instead of the plan: the best layouts on these GPUs, the smallest cluster that fits, and some changes",
    )
    arguments, overrides = parse_with_overrides(parser, argv)
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    config = load_config(arguments.config, overrides, world_size=None if arguments.search else arguments.gpus)
    if arguments.document_tokens is not None and not config.data.document_mask:
        raise UserError(
            "command line: --document-tokens: data.document_mask = false, so attention crosses documents; leave it out"
        )
    cluster = _cluster(arguments, config.parallelism)
    if arguments.search:
        search = search_layouts(config, cluster, arguments.document_tokens)
        print(search_text(search))
        _write_numbers(arguments.json, lambda: search_numbers(search))
        return 0 if search.best else EXIT_DOES_NOT_FIT
    plan = resolve_plan(config, cluster.gpus, arguments.document_tokens, host_ranks=cluster.host_ranks)
    engines = EngineOptions(arguments.engines, arguments.gpus_per_engine, arguments.completion_tokens)
    run = plan_run(plan, cluster, engines)
    local = None
    if arguments.gpu is None:
        machine = detect_machine(visible_gpus())
        local = machine, judge_config(config, machine, arguments.gpus)
    print(plan_text(run, local))
    _write_numbers(arguments.json, lambda: plan_numbers(run))
    return 0 if run.verdict.fits else EXIT_DOES_NOT_FIT


def _word_or(read: Callable[[str], float], *words: str) -> Callable[[str], float | str]:
    return lambda text: text if text in words else read(text)


def _cluster(arguments: argparse.Namespace, parallelism: ParallelismConfig) -> TargetCluster:
    if arguments.exchange == "deepep" and parallelism.expert_exchange == "all_to_all":
        why = 'parallelism.expert_exchange = "all_to_all" sends a row for each expert, DeepEP one to each host'
        raise UserError(f"command line: --exchange deepep: {why}; remove one of them")
    if (gpus := arguments.gpus or smallest_world(parallelism)) > _MOST_GPUS:
        raise UserError(f"command line: --gpus: {gpus:,} GPUs: a plan goes up to {_MOST_GPUS:,}; take fewer")
    option = "--gpu"
    try:
        gpu = accelerator_of(arguments.gpu or DEFAULT_GPU)
        option = "--price"
        price = price_of(gpu, arguments.price) if arguments.price in KINDS else arguments.price
    except ValueError as error:
        raise UserError(f"command line: {option} {error}") from error
    shares = Efficiencies.assumed(gpu)
    if arguments.measured is not None:
        shares = Efficiencies.read(arguments.measured, shares)
    node = arguments.gpus_per_node or gpu.host_gpus, arguments.network, price, arguments.storage
    return TargetCluster(gpu, gpus, *node, shares, arguments.exchange)


def _write_numbers(path: Path | None, numbers: Callable[[], dict[str, Any]]) -> None:
    if path is None:
        return
    text = json.dumps(numbers(), indent=2) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"command line: --json {path}: {error.strerror}; name a file that can be written") from error
