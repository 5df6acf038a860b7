"""``python -m glm46 setup-cluster``: check the hosts of a cluster, make folders, write hostfile and job script.

All values and hosts are checked before the first change. `scripts/setup_cluster.sh` calls it.
"""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from glm46.compute.distributed.environment import variables_that_are_set
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.options import VERBS, integer, positive, verb_parser
from glm46.engine.reliability.run_lock import refuse_unwritable, writing
from glm46.operate.cluster.setup import (
    ANSWER,
    ON_HOST,
    address_of,
    check_hosts,
    cluster_files,
    find_hosts,
    host_state,
    make_folders,
)
from glm46.operate.launch.hostfile import Host, refuse_hosts
from glm46.operate.launch.nodes import LAST_PORT, VARIABLES

_FIRST_PORT = 1024
"""First port that needs no special rights."""
_RESTART_PORTS = 100
"""Ports after the master's: each restart takes the next one."""


def setup_cluster_command(argv: Sequence[str]) -> int:
    """Set up the hosts of a cluster; returns 0.

    Raises:
        UserError: values are wrong, or hosts cannot train; nothing was changed.
    """
    if len(argv) == 2 and argv[0] == ON_HOST:
        print(ANSWER + json.dumps(host_state(Path(argv[1]))))
        return 0
    arguments = _parser().parse_args(argv)
    hosts = _checked_hosts(arguments)
    connection = "srun" if arguments.type == "slurm" and "SLURM_JOB_ID" in variables_that_are_set(VARIABLES) else "ssh"
    states = check_hosts(hosts, connection, arguments)
    for host, state in zip(hosts, states, strict=True):
        print(f"{host.name}: {state['versions']}, {state['gpus']} GPUs, {state['network']}")
    output = arguments.output
    files = cluster_files(arguments, hosts, states)
    make_folders(hosts, connection, arguments.nvme_path)
    with writing(output, key="--output"):
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text)
            (output / name).chmod(0o644 if name == "hostfile" else 0o755)
    print(f"{arguments.nvme_path} is there on {counted(len(hosts), 'host')}, mode 700")
    print(f"written to {output}: {', '.join(files)}")
    preflight = f"python -m glm46 preflight --hostfile {shlex.quote(str(output / 'hostfile'))}"
    if connection == "srun":
        preflight = "srun --ntasks-per-node=1 python -m glm46 preflight"
    print(f"next: {preflight} --config {shlex.quote(str(arguments.config))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = (
        "python -m glm46 setup-cluster --type slurm|pbs|ssh --nodes N --gpus-per-node N --master-addr HOST "
        "--nvme-path DIR [options]"
    )
    parser = verb_parser("setup-cluster", usage=usage, description=f"{VERBS['setup-cluster'].capitalize()}.")
    add = parser.add_argument
    add("--type", choices=("slurm", "pbs", "ssh"), required=True, help="job system; ssh: none")
    add("--nodes", type=positive, required=True, help="that train: the master, and the first ones of the other hosts")
    add("--gpus-per-node", type=positive, required=True, help="processes of each node")
    add("--master-addr", required=True, help="of the first host, for launch.sh; a job takes its own")
    add("--master-port", type=integer, default=29500, help="on which ranks meet; 29500")
    add("--nvme-path", type=Path, required=True, help="folder on a local disk of each node")
    add("--hostfile", type=Path, help="NAME slots=N on each line; default: the allocation")
    add("--config", type=Path, default=Path("train_configs/debug.toml"), help="of the run")
    add("--output", type=Path, default=Path("outputs/cluster"), help="for all files")
    return parser


def _checked_hosts(arguments: argparse.Namespace) -> list[Host]:
    """Check the options and return the hosts that train, the master first.

    Raises:
        UserError: every fault of the values.
    """
    faults = []
    port = arguments.master_port
    path = arguments.nvme_path
    master = arguments.master_addr
    last_port = LAST_PORT - _RESTART_PORTS
    if not _FIRST_PORT <= port <= last_port:
        faults.append(
            f"--master-port {port}: must be between {_FIRST_PORT} and {last_port}; each restart takes the next"
        )
    if not path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./+-]+", str(path)):
        faults.append(f"--nvme-path {path}: must be absolute, of letters, digits and . _ + - /; state such a folder")
    raise_if(faults)
    refuse_unwritable(arguments.output, "--output")
    source, hosts = find_hosts(arguments)
    refuse_hosts(hosts, arguments.gpus_per_node, {}, source)
    if len(hosts) < arguments.nodes:
        faults.append(
            f"--nodes {arguments.nodes}: {source} has {counted(len(hosts), 'host')}; add hosts, or state at most that"
        )
    addresses = [address_of(host.name) for host in hosts]
    if address_of(master) in addresses:
        hosts.insert(0, hosts.pop(addresses.index(address_of(master))))
    else:
        shown = ", ".join(host.name for host in hosts[:4])
        faults.append(f"--master-addr {master}: names none of the hosts in {source}; state one of {shown}")
    try:
        if not faults:
            load_config(arguments.config, (), world_size=arguments.nodes * arguments.gpus_per_node)
    except UserError as error:
        faults += error.faults
    raise_if(faults)
    return hosts[: arguments.nodes]
