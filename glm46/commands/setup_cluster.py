"""``python -m glm46 setup-cluster``: check the hosts of a cluster, make folders, write hostfile and job script.

All values and hosts are checked before the first change. `scripts/setup_cluster.sh` calls it.
"""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from glm46.compute.distributed.environment import set_variables
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.options import VERBS, integer, positive, verb_parser
from glm46.engine.reliability.run_lock import refuse_unwritable, writing
from glm46.operate.cluster.setup import (
    ANSWER,
    ask_hosts,
    cluster_files,
    examine_host,
    find_hosts,
    place_of_address,
    refuse_answers,
)
from glm46.operate.launch.hostfile import Host, refuse_hosts
from glm46.operate.launch.nodes import LAST_PORT, VARIABLES

_FIRST_PORT = 1024
"""First port that needs no special rights."""


def setup_cluster_command(argv: Sequence[str]) -> int:
    """Set up the hosts of a cluster, or print what would be done; returns 0.

    Raises:
        UserError: values are wrong, or hosts cannot train; nothing was changed.
    """
    arguments = _parser().parse_args(argv)
    if arguments.on_host is not None:
        print(ANSWER + json.dumps(examine_host(arguments.nvme_path, makes=arguments.on_host == "make")))
        return 0
    hosts = _checked(arguments)
    connection = "srun" if arguments.type == "slurm" and "SLURM_JOB_ID" in set_variables(VARIABLES) else "ssh"
    answers: list[Any] = [*ask_hosts(hosts, connection, [*argv, "--on-host", "look"])]
    refuse_answers(hosts, answers, arguments, connection)
    for host, answer in zip(hosts, answers, strict=True):
        print(
            f"{host.name}: {answer['versions']}, driver {answer['driver']}, {answer['gpus']} GPUs, {answer['network']}"
        )
    output = arguments.output
    files = cluster_files(arguments, hosts, answers)
    if arguments.dry_run:
        print(f"--- on each host: mkdir -m 700 {arguments.nvme_path}")
        print("".join(f"--- {output / name}\n{text}" for name, text in files.items()), end="")
        return 0
    refuse_answers(hosts, ask_hosts(hosts, connection, [*argv, "--on-host", "make"]), arguments, connection)
    with writing(output, key="--output"):
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text)
            (output / name).chmod(0o644 if name == "hostfile" else 0o755)
    print(f"{arguments.nvme_path} is there on {counted(len(hosts), 'host')}, mode 700")
    print(f"written to {output}: {', '.join(files)}")
    preflight = "python -m glm46 preflight"
    if connection == "srun":
        preflight = f"srun --ntasks-per-node=1 {preflight}"
    else:
        preflight += f" --hostfile {shlex.quote(str(output / 'hostfile'))}"
    print(f"next: {preflight} --config {shlex.quote(str(arguments.config))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = (
        "python -m glm46 setup-cluster --type slurm|pbs|ssh --nodes N --gpus-per-node N --master-addr HOST "
        "--nvme-path DIR [options]"
    )
    parser = verb_parser("setup-cluster", usage=usage, description=f"{VERBS['setup-cluster'].capitalize()}.")
    add_option = partial(parser.add_argument, action=_Once)
    add_required = partial(add_option, required=True)
    add_required("--type", choices=("slurm", "pbs", "ssh"), help="job system; ssh: none")
    add_required("--nodes", type=positive, help="that train: the master, and the first ones of the other hosts")
    add_required("--gpus-per-node", type=positive, help="processes of each node")
    add_required("--master-addr", help="of the first host, for launch.sh; a job takes its own")
    add_option("--master-port", type=integer, default=29500, help="on which ranks meet; 29500")
    add_required("--nvme-path", type=Path, help="folder on a local disk of each node")
    add_option("--hostfile", type=Path, help="NAME slots=N on each line; default: the allocation")
    add_option("--config", type=Path, default=Path("train_configs/debug.toml"), help="of the run")
    add_option("--output", type=Path, default=Path("outputs/cluster"), help="for all files")
    parser.add_argument("--dry-run", action="store_true", help="check and print, change nothing")
    parser.add_argument("--on-host", choices=("look", "make"), help=argparse.SUPPRESS)
    return parser


class _Once(argparse.Action):
    """Action that stores a value, and refuses an option that stands twice on the command line."""

    def __call__(self, parser, namespace, values, option_string=None):
        options_seen = namespace.__dict__.setdefault("options_seen", set())
        if option_string in options_seen:
            parser.error(f"{option_string}: given twice; state it once")
        options_seen.add(option_string)
        setattr(namespace, self.dest, values)


def _checked(arguments: argparse.Namespace) -> list[Host]:
    """Check the options and return the hosts that train, the master first.

    Raises:
        UserError: every fault of the values.
    """
    faults = []
    port = arguments.master_port
    path = arguments.nvme_path
    master = arguments.master_addr
    if not _FIRST_PORT <= port <= LAST_PORT - 100:
        faults.append(
            f"--master-port {port}: must be between {_FIRST_PORT} and {LAST_PORT - 100}; each restart takes the next"
        )
    if not path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./+-]+", str(path)):
        faults.append(f"--nvme-path {path}: must be absolute, of letters, digits and . _ + - /; state such a folder")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", master):
        faults.append(
            f"--master-addr {master}: must be a host name or an IPv4 address; state the address of the first node"
        )
    raise_if(faults)
    refuse_unwritable(arguments.output, "--output")
    file, hosts = find_hosts(arguments)
    refuse_hosts(hosts, arguments.gpus_per_node, {}, file)
    if len(hosts) < arguments.nodes:
        faults.append(
            f"--nodes {arguments.nodes}: {file} has {counted(len(hosts), 'host')}; add hosts, or state at most that"
        )
    names = [host.name for host in hosts]
    place = names.index(master) if master in names else place_of_address(master, names)
    if place is None:
        faults.append(f"--master-addr {master}: names none of the hosts in {file}; state one of {', '.join(names[:4])}")
    try:
        if not faults:
            load_config(arguments.config, (), world_size=arguments.nodes * arguments.gpus_per_node)
    except UserError as error:
        faults += error.faults
    raise_if(faults)
    hosts.insert(0, hosts.pop(cast(int, place)))
    return [replace(host, slots=arguments.gpus_per_node) for host in hosts[: arguments.nodes]]
