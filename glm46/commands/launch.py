"""``python -m glm46 launch``: check a config, compare it with this machine, prepare its data and train it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import process_count, whole
from glm46.operate.launch.config_options import config_parser, parse_with_overrides


def launch_command(argv: Sequence[str]) -> int:
    """Train a config on this node, or on all hosts of a hostfile.

    Returns:
        Exit code: 0 trained to the end; 2 refused; EXIT_DIVERGED diverged;
        EXIT_STOPPED stopped by SIGTERM, SIGHUP or SIGUSR1, nothing is lost;
        128 + n stopped by another signal n; else a rank failed or hung, and no restart remains.

    Raises:
        UserError: the config has faults, or this node cannot train it.
    """
    parser = config_parser("launch")
    parser.add_argument(
        "--nproc",
        type=process_count,
        metavar="N",
        help="processes to start; auto, the default, takes one for each GPU, or two on a CPU",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole(0),
        default=0,
        metavar="N",
        help="start all processes again, from the newest checkpoint, up to N times after one has failed or hangs; "
        "0, the default, ends the run",
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="start all nodes from here, over ssh: a host on each line, NAME slots=N, and N processes on each",
    )
    # For the launchers that the command with --hostfile starts: number of the start, newest checkpoint.
    parser.add_argument("--from-hostfile", type=whole(0), help=argparse.SUPPRESS)
    parser.add_argument("--known-step", type=whole(0), default=0, help=argparse.SUPPRESS)
    arguments, overrides = parse_with_overrides(parser, argv, is_start=True)
    from glm46.operate.launch.launch_run import launch  # --help takes half the time without it

    return launch(arguments, overrides)
