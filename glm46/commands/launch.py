"""``python -m glm46 launch``: check a config, compare it with this machine, prepare its data and train it."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.options import positive, process_count, whole
from glm46.operate.launch.config_options import config_parser, parse_with_overrides
from glm46.operate.launch.host_group import CONNECTIONS


def launch_command(argv: Sequence[str]) -> int:
    """Train a config on this node.

    Returns:
        Exit code: 0 trained to the end; 2 refused; EXIT_DIVERGED diverged;
        EXIT_STOPPED stopped by SIGTERM, SIGHUP or SIGUSR1, nothing is lost;
        128 + n stopped by signal n otherwise; else a rank failed or hung, and no restart is left.

    Raises:
        UserError: the config has faults, or this node cannot train it.
    """
    parser = config_parser("launch")
    parser.add_argument(
        "--nproc", type=process_count, metavar="N",
        help="processes to start; auto, the default, takes one for each GPU, or two on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", type=whole(0), default=0, metavar="N",
        help="start all processes again, from the newest checkpoint, up to N times after one has failed or hangs; "
        "0, the default, ends the run",
    )  # fmt: skip
    parser.add_argument(
        "--hostfile", type=Path, metavar="FILE",
        help="start all nodes from here, over ssh: a host on each line, NAME slots=N, and N processes on each",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=positive, metavar="N",
        help="train on the first N hosts of --hostfile; the others are spares, which take the place of lost ones "
        "with --max-restarts; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--connect", choices=CONNECTIONS, default="ssh",
        help="client that starts the hosts of --hostfile: ssh, the default, or srun in an allocation of Slurm",
    )  # fmt: skip
    parser.add_argument("--from-hostfile", action="store_true", help=argparse.SUPPRESS)  # of one host
    arguments, overrides = parse_with_overrides(parser, argv, is_start=True)
    for option, value in {"--nodes": arguments.nodes, "--connect": arguments.connect}.items():
        if arguments.hostfile is None and value not in (None, "ssh"):
            raise UserError(f"command line: {option} {value}: has no effect without --hostfile; add it")
    # Imported here: --help takes half the time without them.
    from glm46.operate.launch.launch_hosts import launch_hosts
    from glm46.operate.launch.one_node import launch_here, load_run, take_orders
    from glm46.operate.launch.torchrun import LauncherSignals, Standby

    if arguments.hostfile is not None and not arguments.from_hostfile:
        return launch_hosts(arguments, overrides, load_run)
    with closing(LauncherSignals()) as signals, closing(Standby(signals)) as standby:
        if arguments.from_hostfile:
            return take_orders(arguments, overrides, standby)
        return launch_here(arguments, overrides, standby)
