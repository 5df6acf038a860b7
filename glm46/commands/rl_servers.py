"""``python -m glm46 rl-servers``: the commands of the inference servers of a run, host by host."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.options import positive
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.launch.config_options import config_parser, load_fetched, parse_with_overrides
from glm46.operate.launch.host_group import CONNECTIONS, HostGroup
from glm46.operate.launch.hostfile import read_hostfile


def rl_servers_command(argv: Sequence[str]) -> int:
    """Print the commands of the servers of a config, or start them.

    Returns:
        Exit code: 0, or with --run that of the server that has ended first.

    Raises:
        UserError: the config has faults or no servers, or these do not fit on the hosts.
    """
    parser = config_parser("rl-servers")
    parser.add_argument(
        "--hosts", type=Path, metavar="FILE",
        help="hosts of the servers, NAME slots=GPUS on each line; default: those of rollout.urls",
    )  # fmt: skip
    parser.add_argument(
        "--gpus-per-engine", type=positive, metavar="N",
        help="GPUs of one server; default: the fewest that hold the model with one longest sample",
    )  # fmt: skip
    parser.add_argument("--gpu", metavar="NAME", help="as for plan; default: H100, or this machine's CPU")
    parser.add_argument(
        "--folder", metavar="DIR",
        help="model that the servers start with, on their disks; default: checkpoint.initial_load_path",
    )  # fmt: skip
    parser.add_argument("--run", action="store_true", help="start them, and end all when one ends, or this command")
    parser.add_argument(
        "--connect", choices=CONNECTIONS, default="ssh", help="client that starts other hosts; default: ssh"
    )  # fmt: skip
    arguments, overrides = parse_with_overrides(parser, argv)
    from glm46.operate.launch.rl_servers import ServerPlan, cpu_of, folder_of, show  # --help needs none of them
    from glm46.operate.launch.server_processes import run_servers

    try:
        gpu = accelerator_of(arguments.gpu or "H100")
    except ValueError as error:
        raise UserError(f"command line: --gpu {error}") from error
    hosts = read_hostfile(arguments.hosts, "--hosts") if arguments.hosts else []
    config = load_fetched(arguments.config, overrides, world_size=None)
    if not (arguments.gpu or arguments.gpus_per_engine or hosts):
        gpu = cpu_of(config) or gpu
    folder = folder_of(config, arguments.folder)
    servers = ServerPlan(config, hosts, gpu, folder, arguments.gpus_per_engine)
    print(show(servers), flush=True)
    if not arguments.run:
        return 0
    if {*servers.urls} != {*(stated := servers.rollout.urls)}:
        where = f"{list(stated)}, and these servers will be at {servers.urls}"
        raise UserError(f"rollout.urls: {where}; correct rollout.urls, or --hosts")
    return run_servers(servers, HostGroup(arguments.connect))
