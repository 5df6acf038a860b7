"""``python -m glm46 preflight``: check hosts, network, storage and the files of a run before it begins."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.config.options import VERBS, process_count, require_writable, verb_parser
from glm46.operate.cluster.hosts import preflight_hosts
from glm46.operate.cluster.results import STANDARD_OUTPUT
from glm46.operate.launch.config_options import parse_with_overrides


def preflight_command(argv: Sequence[str]) -> int:
    """Check the hosts of a run; returns the exit code.

    Returns:
        0 nothing fails; EXIT_FAIL something does.

    Raises:
        UserError: the config has faults, or options and environment variables do not define the hosts.
    """
    arguments, overrides = parse_with_overrides(_parser(), argv)
    if arguments.config is None and overrides:
        raise UserError(f"command line: {overrides[0]}: overrides a key of no file; add --config FILE")
    if arguments.json not in (None, STANDARD_OUTPUT):
        require_writable("--json", arguments.json)
    config = load_config(arguments.config, overrides, world_size=None) if arguments.config else None
    if arguments.hostfile is not None:
        if arguments.local:
            raise UserError("command line: --hostfile with --local: one is many hosts, the other this one; remove one")
        return preflight_hosts(arguments, overrides)
    from glm46.operate.cluster.preflight import preflight  # it loads torch

    return preflight(arguments, overrides, config)


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser(
        "preflight",
        description=f"{VERBS['preflight'].capitalize()}.",
        epilog="Exit code 0: nothing fails; 1: something does; 2: a mistake in options or config. On several hosts "
        "start it as the run is started. Keys of the file can be stated again as --section.key VALUE.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the TOML file of a run, whose needs are checked too"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="hash all files, larger messages, rehearse recovery; without it under a minute",
    )
    parser.add_argument("--local", action="store_true", help="this host alone, without starting ranks")
    parser.add_argument(
        "--nproc", type=process_count, metavar="N", help="ranks of each host; auto: one for each GPU, or two on a CPU"
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="start it on these hosts from here, over ssh; as --hostfile of launch",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one line of JSON; - prints it")
    parser.add_argument("--ranks-folder", type=Path, help=argparse.SUPPRESS)  # in the ranks that this verb starts
    return parser
