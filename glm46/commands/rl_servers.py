"""``python -m glm46 rl-servers``: print or start the commands of the inference servers of a run, host by host."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import positive
from glm46.operate.launch.config_options import config_parser, parse_with_overrides


def rl_servers_command(argv: Sequence[str]) -> int:
    """Print the commands of the servers of a config, or start them.

    Returns:
        Exit code: 0, or with --run the exit code of the server that ended first.

    Raises:
        UserError: the config has faults or no servers, or the servers do not fit on the hosts.
    """
    parser = config_parser("rl-servers")
    parser.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="hosts of the servers, NAME slots=GPUS on each line; default: the hosts of rollout.urls",
    )
    parser.add_argument(
        "--gpus-per-engine",
        type=positive,
        metavar="N",
        help="GPUs of one server; default: the fewest that hold the model with one longest sample",
    )
    parser.add_argument("--gpu", metavar="NAME", help="as for plan; default: H100, or this machine's CPU")
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="model that the servers start with, on their disks; default: checkpoint.initial_load_path",
    )
    parser.add_argument("--run", action="store_true", help="start them, and end all when one ends, or this command")
    arguments, overrides = parse_with_overrides(parser, argv)
    from glm46.operate.launch.rl_servers import serve  # --help needs nothing of it

    return serve(arguments, overrides)
