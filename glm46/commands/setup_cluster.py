"""``python -m glm46 setup-cluster``: check the hosts of a cluster, make their folders, write hostfile and job script.

All values and hosts are checked before the first change. `scripts/setup_cluster.sh` calls it.
"""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm46.compute.distributed.environment import set_variables, variables_that_begin, visible_gpus
from glm46.compute.distributed.hostfile import Host, read_hostfile
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.options import VERBS, integer, positive, verb_parser
from glm46.engine.reliability.run_lock import refuse_unwritable, writing
from glm46.files.local_disk import local_disk_fault
from glm46.operate.cluster.cluster_files import cluster_files
from glm46.operate.estimate.machine import detect_machine, driver_version
from glm46.operate.launch.environment import describe_version
from glm46.operate.launch.node_client import CONNECTIONS
from glm46.operate.launch.nodes import LAST_PORT, VARIABLES, pbs_hosts, refuse_hosts

_HOST_SECONDS = 60.0
"""For the answer of a host."""
_ANSWER = "glm46-host: "
"""Begins the line of a host; a login may print other lines."""
_FIRST_PORT = 1024
"""Lower ports need rights that a run does not have."""


def setup_cluster_command(argv: Sequence[str]) -> int:
    """Set up the hosts of a cluster, or print what would be done; returns 0.

    Raises:
        UserError: values are wrong, or hosts cannot train; nothing was changed.
    """
    arguments = _parser().parse_args(argv)
    if arguments.on_host is not None:
        print(_ANSWER + json.dumps(examine_host(arguments.nvme_path, makes=arguments.on_host == "make")))
        return 0
    hosts = _checked(arguments)
    connection = "srun" if arguments.type == "slurm" and "SLURM_JOB_ID" in set_variables(VARIABLES) else "ssh"
    answers = _ask(hosts, connection, [*argv, "--on-host", "look"])
    _refuse_answers(hosts, answers, arguments, connection)
    for host, answer in zip(hosts, answers, strict=True):
        print(
            f"{host.name}: {answer['versions']}, driver {answer['driver']}, {answer['gpus']} GPUs, {answer['network']}"
        )
    output, files = arguments.output, cluster_files(arguments, hosts, answers)
    if arguments.dry_run:
        print(f"--- on each host: mkdir -m 700 {arguments.nvme_path}")
        print("".join(f"--- {output / name}\n{text}" for name, text in files.items()), end="")
        return 0
    _refuse_answers(hosts, _ask(hosts, connection, [*argv, "--on-host", "make"]), arguments, connection)
    with writing(output, key="--output"):
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text)
            (output / name).chmod(0o644 if name == "hostfile" else 0o755)
    print(f"{arguments.nvme_path} is there on {counted(len(hosts), 'host')}, mode 700")
    print(f"written to {output}: {', '.join(files)}")
    preflight, config = "python -m glm46 preflight", f"--config {shlex.quote(str(arguments.config))}"
    by_srun, by_ssh = (
        f"srun --ntasks-per-node=1 {preflight}",
        f"{preflight} --hostfile {shlex.quote(str(output / 'hostfile'))}",
    )
    print(f"next: {by_srun if connection == 'srun' else by_ssh} {config}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = (
        "python -m glm46 setup-cluster --type slurm|pbs|ssh --nodes N --gpus-per-node N --master-addr HOST "
        "--nvme-path DIR [options]"
    )
    parser = verb_parser("setup-cluster", usage=usage, description=f"{VERBS['setup-cluster'].capitalize()}.")
    parser.add_argument(
        "--type", choices=("slurm", "pbs", "ssh"), required=True, action=_Once, help="job system; ssh: none"
    )
    parser.add_argument("--nodes", type=positive, required=True, action=_Once, help="that train; more hosts are spares")
    parser.add_argument("--gpus-per-node", type=positive, required=True, action=_Once, help="processes of each node")
    parser.add_argument(
        "--master-addr",
        required=True,
        action=_Once,
        help="name or IPv4 address of the first host, for launch.sh; a job takes its own first node",
    )
    parser.add_argument("--master-port", type=integer, default=29500, action=_Once, help="on which ranks meet; 29500")
    parser.add_argument(
        "--nvme-path", type=Path, required=True, action=_Once, help="folder on a local disk of each node"
    )
    parser.add_argument(
        "--hostfile", type=Path, action=_Once, help="NAME slots=N on each line; default: the allocation"
    )
    parser.add_argument(
        "--config", type=Path, default=Path("train_configs/debug.toml"), action=_Once, help="of the run"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/cluster"), action=_Once, help="for all files")
    parser.add_argument("--dry-run", action="store_true", help="check and print, change nothing")
    parser.add_argument("--on-host", choices=("look", "make"), help=argparse.SUPPRESS)
    return parser


class _Once(argparse.Action):
    """Keeps a value; an option that is given twice is an error."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = namespace.__dict__.setdefault("given", set())
        if option_string in given:
            parser.error(f"{option_string}: given twice; state it once")
        given.add(option_string)
        setattr(namespace, self.dest, values)


def _checked(arguments: argparse.Namespace) -> list[Host]:
    """The hosts, the master first.

    Raises:
        UserError: every fault of the values.
    """
    faults, port, path, master = [], arguments.master_port, arguments.nvme_path, arguments.master_addr
    if not _FIRST_PORT <= port <= LAST_PORT - 100:
        faults.append(
            f"--master-port {port}: must be between {_FIRST_PORT} and {LAST_PORT - 100}; each restart takes the next"
        )
    if not path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./+-]+", str(path)):
        faults.append(f"--nvme-path {path}: must be absolute, of letters, digits and . _ + - /; state such a folder")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", master):
        faults.append(f"--master-addr {master}: must be a host name or an IPv4 address; state that of the first node")
    if faults:
        raise UserError(*faults)
    refuse_unwritable(arguments.output, "--output")
    file, hosts = _hosts(arguments)
    refuse_hosts(hosts, arguments.gpus_per_node, {}, file)
    if len(hosts) < arguments.nodes:
        faults.append(
            f"--nodes {arguments.nodes}: {file} has {counted(len(hosts), 'host')}; "
            f"add hosts, or state at most that number"
        )
    names = [host.name for host in hosts]
    place = names.index(master) if master in names else _place_of_address(master, names)
    if place is None:
        faults.append(f"--master-addr {master}: names none of the hosts in {file}; state one of {', '.join(names[:4])}")
    try:
        if not faults:
            load_config(arguments.config, (), world_size=arguments.nodes * arguments.gpus_per_node)
    except UserError as error:
        faults += error.faults
    if faults:
        raise UserError(*faults)
    hosts.insert(0, hosts.pop(place))
    return [replace(host, slots=arguments.gpus_per_node) for host in hosts]


def _hosts(arguments: argparse.Namespace) -> tuple[Path, list[Host]]:
    """The hosts of --hostfile or of the allocation, and what names them."""
    known = set_variables(VARIABLES)
    if arguments.hostfile is not None:
        return arguments.hostfile, read_hostfile(arguments.hostfile)
    if arguments.type == "slurm" and "SLURM_JOB_NODELIST" in known:
        listed = ["scontrol", "show", "hostnames", known["SLURM_JOB_NODELIST"]]
        try:
            names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"environment: SLURM_JOB_NODELIST: {shlex.join(listed)}: {error}; give --hostfile"
            ) from error
        return Path("SLURM_JOB_NODELIST"), [Host(line, name) for line, name in enumerate(names, 1)]
    if arguments.type == "pbs" and "PBS_NODEFILE" in known:
        names = pbs_hosts(known["PBS_NODEFILE"], "give --hostfile")
        return Path(known["PBS_NODEFILE"]), [Host(line, name) for line, name in enumerate(names, 1)]
    inside = {"slurm": ", or start it in an allocation: salloc", "pbs": ", or start it in a job: qsub -I", "ssh": ""}
    raise UserError(
        f"--hostfile: not given, so no host is known; state a file, NAME slots=N on each line{inside[arguments.type]}"
    )


def _place_of_address(master: str, names: Sequence[str]) -> int | None:
    """The place of the host that has the address of the master."""

    def address(name: str) -> str | None:
        with suppress(OSError):
            return socket.gethostbyname(name)
        return None

    wanted = address(master)
    return next((place for place, name in enumerate(names) if wanted is not None and address(name) == wanted), None)


def _ask(hosts: Sequence[Host], connection: str, argv: Sequence[str]) -> list[dict[str, Any] | str]:
    """The answer of each host, all asked at once; a text with the reason for a host that did not answer."""
    settings = [f"{name}={value}" for name, value in variables_that_begin("PYTHONPATH").items()]
    own = shlex.join(["env", *settings, sys.executable, "-m", "glm46", "setup-cluster", *argv])
    command = f"cd {shlex.quote(str(Path.cwd()))} && exec {own}"

    def ask(host: Host) -> dict[str, Any] | str:
        words = CONNECTIONS[connection](host, command)
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_HOST_SECONDS
            )
        except FileNotFoundError:
            return f"{connection} is not on PATH; install it"
        except subprocess.TimeoutExpired:
            return f"no answer within {_HOST_SECONDS:.0f} s"
        for line in done.stdout.splitlines():
            if _ANSWER in line:
                return json.loads(line.partition(_ANSWER)[2])
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return said[0]

    with ThreadPoolExecutor(max_workers=64) as pool:
        return list(pool.map(ask, hosts))


def _refuse_answers(
    hosts: Sequence[Host], answers: Sequence[Any], arguments: argparse.Namespace, connection: str
) -> None:
    """Raise what keeps hosts from training, for all of them."""
    faults, first = [], next((answer for answer in answers if isinstance(answer, dict)), {})
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            test = (
                shlex.join(CONNECTIONS[connection](host, "true")) if connection == "srun" else f"ssh {host.login} true"
            )
            remedy = f"`{test}` must succeed without a question"
            if "ermission denied" in answer:
                remedy += f": ssh-keygen -t ed25519, if you have no key, then ssh-copy-id {host.login}"
            faults.append(f"{host.name}: {answer}; {remedy}, and this folder and {sys.executable} must be there")
            continue
        for name in ("versions", "driver"):
            if answer[name] != first[name]:
                faults.append(f"{host.name}: has {answer[name]}, the first host {first[name]}; install the same on all")
        if answer["driver"] != "none" and answer["gpus"] != arguments.gpus_per_node:
            wanted = arguments.gpus_per_node
            faults.append(
                f"--gpus-per-node {wanted}: {host.name} has {answer['gpus']}; state that, or look at its dmesg"
            )
        if answer["nvme"]:
            faults.append(f"--nvme-path {arguments.nvme_path}: {host.name}: {answer['nvme']}")
    if faults:
        raise UserError(*faults)


def examine_host(folder: Path, *, makes: bool = False, root: Path = Path("/")) -> dict[str, Any]:
    """What one host says about itself: versions, driver, GPUs, network, and why the folder cannot be used.

    Args:
        makes: make the folder, for this user alone, if nothing is against it.
        root: folder of /proc and /sys; tests pass their own.
    """
    fault = _folder_fault(folder)
    if makes and not fault:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    machine = detect_machine(visible_gpus(), root=root)
    ports = list((root / "sys/class/infiniband").glob("*/ports/*/state"))
    active = sum("ACTIVE" in port.read_text() for port in ports)
    return {
        "versions": describe_version(),
        "driver": driver_version(root),
        "gpus": len(machine.gpus),
        "cores": machine.cores,
        "network": f"InfiniBand, {active} of {len(ports)} ports active" if active else "TCP",
        "interface": _interface(root),
        "nvme": fault,
    }


def _folder_fault(folder: Path) -> str:
    """Why a folder cannot be made or used by this user; '' if it can."""
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if there.is_symlink():
        return f"{there} is a symbolic link; state the folder itself"
    if not there.is_dir():
        return f"{there} is a file; remove it, or state another folder"
    if there == folder and folder.stat().st_uid != os.geteuid():
        return f"belongs to another user; chown it to {os.geteuid()}, mode 700, or state a folder of yours"
    fault = local_disk_fault(there)
    return f"{there}: {fault}; state a folder on a local disk that you can write" if fault else ""


def _interface(root: Path) -> str:
    """The interface of the default route; '' without one."""
    with suppress(OSError):
        rows = [line.split() for line in (root / "proc/net/route").read_text().splitlines()[1:]]
        return next((row[0] for row in rows if row[1] == "00000000"), "")
    return ""
