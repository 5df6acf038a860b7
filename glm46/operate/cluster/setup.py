"""A new cluster: the check of its hosts, and the files that start runs on them."""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import glm46
from glm46.compute.distributed.environment import variables_that_are_set, variables_that_begin, visible_gpus
from glm46.config.errors import UserError, raise_if
from glm46.files.local_disk import local_disk_fault
from glm46.operate.estimate.machine import detect_machine, driver_version
from glm46.operate.launch.environment import describe_version
from glm46.operate.launch.hostfile import Host, read_hostfile
from glm46.operate.launch.nodes import VARIABLES, pbs_hosts
from glm46.operate.launch.ssh_hosts import in_this_folder, module_words, reach_command, run_on_hosts

_ROOT = Path(glm46.__path__[0]).parent
_HOST_SECONDS = 60.0
"""Time for the answer of a host."""
ON_HOST = "--on-host"
"""First word of the command on each host, before the folder on its local disk."""
ANSWER = "glm46-host: "
"""Start of the line with a host's answer; a login may print other lines."""
_ENVIRONMENT = """\
# Sourced by launch.sh and the job script. NCCL finds everything else by itself: docs/nccl.md.
{sockets}# launch.sh adds MASTER_ADDR. A job gets other nodes each time, and takes the first of them.
export MASTER_PORT={port}
export CONFIG_FILE={config}
export NGPU={gpus}
# States of the optimizer that do not fit: --optimizer.state_offload_folder $GLM46_NVME
export GLM46_NVME={nvme}
"""
_SOCKETS = """\
# No InfiniBand; all hosts have their default route on {interface}.
export NCCL_SOCKET_IFNAME=={interface}
export GLOO_SOCKET_IFNAME={interface}
"""
_LAUNCH = """#!/usr/bin/env bash
# Trains on all hosts of the hostfile from here, over ssh.
cd {root} || exit 2
. {output}/setup_env.sh
export MASTER_ADDR={master}
HOSTFILE={output}/hostfile exec ./run_train.sh --max-restarts 100 "$@"
"""


def find_hosts(arguments: argparse.Namespace) -> tuple[Path, list[Host]]:
    """Return the hosts of --hostfile or of the allocation, and the file or variable that lists them."""
    variables = variables_that_are_set(VARIABLES)
    if arguments.hostfile is not None:
        return arguments.hostfile, read_hostfile(arguments.hostfile)
    if arguments.type == "slurm" and "SLURM_JOB_NODELIST" in variables:
        source = Path("SLURM_JOB_NODELIST")
        command = ["scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"]]
        try:
            names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            message = f"environment: SLURM_JOB_NODELIST: {shlex.join(command)}: {error}; give --hostfile"
            raise UserError(message) from error
    elif arguments.type == "pbs" and "PBS_NODEFILE" in variables:
        source = Path(variables["PBS_NODEFILE"])
        names = pbs_hosts(variables["PBS_NODEFILE"], "give --hostfile")
    else:
        remedy = "state a file, NAME slots=N on each line, or start it in a job: salloc, qsub -I"
        raise UserError(f"--hostfile: not given, so no host is known; {remedy}")
    return source, [Host(line, name) for line, name in enumerate(names, 1)]


def address_of(name: str) -> str:
    """Return the address of a host; its name if it is unknown."""
    with suppress(OSError):
        return socket.gethostbyname(name)
    return name


def check_hosts(hosts: Sequence[Host], connection: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the state of each host (see `host_state`), requested from all at once.

    Args:
        connection: "ssh", or "srun" in an allocation of Slurm.

    Raises:
        UserError: all faults that keep hosts from training.
    """
    words = module_words(variables_that_begin("PYTHONPATH"), ["setup-cluster", ON_HOST, str(arguments.nvme_path)])
    commands = [in_this_folder(words)] * len(hosts)
    states: list[dict[str, Any]] = []
    faults = []
    for host, answer in zip(hosts, run_on_hosts(hosts, commands, _HOST_SECONDS, connection), strict=True):
        lines = [line.partition(ANSWER)[2] for line in answer.output.splitlines() if ANSWER in line]
        if not lines:
            remedy = f"`{reach_command(host, connection)}` must succeed without a question (ssh-keygen, ssh-copy-id)"
            remedy += f", and this folder and {sys.executable} must be there"
            faults.append(f"{host.name}: {answer.reason()}; {remedy}")
            continue
        state = json.loads(lines[-1])
        states.append(state)
        if state["versions"] != states[0]["versions"]:
            versions = f"has {state['versions']}, the first host {states[0]['versions']}"
            faults.append(f"{host.name}: {versions}; install the same on all")
        if state["has_driver"] and state["gpus"] != arguments.gpus_per_node:
            remedy = "state that, or look at its dmesg"
            faults.append(f"--gpus-per-node {arguments.gpus_per_node}: {host.name} has {state['gpus']}; {remedy}")
        if state["nvme"]:
            faults.append(f"--nvme-path {arguments.nvme_path}: {host.name}: {state['nvme']}")
    raise_if(faults)
    return states


def make_folders(hosts: Sequence[Host], connection: str, folder: Path) -> None:
    """Make a folder on each host, for this user alone.

    Raises:
        UserError: hosts on which it cannot be made.
    """
    command = f"mkdir -p -m 700 -- {shlex.quote(str(folder))}"
    answers = run_on_hosts(hosts, [command] * len(hosts), _HOST_SECONDS, connection)
    reasons = {host.name: answer.reason() for host, answer in zip(hosts, answers, strict=True) if answer.code != 0}
    raise_if([f"--nvme-path {folder}: {host}: {reason}; make it there" for host, reason in reasons.items()])


def host_state(folder: Path, root: Path = Path("/")) -> dict[str, str | int]:
    """Return the versions, devices and network of this host.

    ``interface`` is the interface of the default route, empty with InfiniBand; ``nvme`` the reason why this user cannot
    make or use the folder, empty if the user can.

    Args:
        folder: folder on a local disk, which need not exist.
        root: folder of /proc and /sys; tests pass their own.
    """
    machine = detect_machine(visible_gpus(), root=root)
    driver = driver_version(root)
    ports = list((root / "sys/class/infiniband").glob("*/ports/*/state"))
    active = sum("ACTIVE" in port.read_text() for port in ports)
    route_file = root / "proc/net/route"
    routes = [line.split() for line in route_file.read_text().splitlines()] if route_file.is_file() else []
    return {
        "versions": f"{describe_version()}, driver {driver}",
        "has_driver": driver != "none",
        "gpus": len(machine.gpus),
        "cores": machine.cores,
        "network": f"InfiniBand, {active} of {len(ports)} ports active" if active else "TCP",
        "interface": "" if active else next((route[0] for route in routes if route[1] == "00000000"), ""),
        "nvme": _folder_fault(folder),
    }


def _folder_fault(folder: Path) -> str:
    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if nearest.is_symlink():
        return f"{nearest} is a symbolic link; state the folder itself"
    if not nearest.is_dir():
        return f"{nearest} is a file; remove it, or state another folder"
    if nearest == folder and folder.stat().st_uid != os.geteuid():
        return f"belongs to another user; chown it to {os.geteuid()}, mode 700, or state a folder of yours"
    fault = local_disk_fault(nearest)
    return f"{nearest}: {fault}; state a folder on a local disk that you can write" if fault else ""


def cluster_files(
    arguments: argparse.Namespace, hosts: Sequence[Host], states: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Return the texts of all files by name.

    Args:
        states: see `check_hosts`.

    Raises:
        UserError: glm46 does not run from a checkout, which has the job scripts that these files start from.
    """
    output = shlex.quote(str(arguments.output.absolute()))
    interfaces = {state["interface"] for state in states}
    environment = _ENVIRONMENT.format(
        sockets=_SOCKETS.format(interface=min(interfaces)) if len(interfaces) == 1 and "" not in interfaces else "",
        port=arguments.master_port,
        config=shlex.quote(str(arguments.config.absolute())),
        gpus=arguments.gpus_per_node,
        nvme=arguments.nvme_path,
    )
    files = {
        "hostfile": "".join(f"{host.login} slots={arguments.gpus_per_node}\n" for host in hosts),
        "setup_env.sh": environment,
        "launch.sh": _LAUNCH.format(root=shlex.quote(str(_ROOT)), output=output, master=arguments.master_addr),
    }
    nodes = arguments.nodes
    gpus = arguments.gpus_per_node
    variables = f". {output}/setup_env.sh\n"
    if arguments.type == "slurm":
        values = {"#SBATCH --nodes=": nodes, "#SBATCH --gpus-per-node=": gpus}
        files["submit_job.slurm"] = _job_script("slurm/train.sbatch", values, variables)
    if arguments.type == "pbs":
        cores = min(state["cores"] for state in states)
        values = {"#PBS -l select=": nodes, "#PBS -l select=.*:ncpus=": cores, "#PBS -l select=.*:ngpus=": gpus}
        files["submit_job.pbs"] = _job_script("pbs/train.pbs", values, variables)
    return files


def _job_script(name: str, values: dict[str, int], variables: str) -> str:
    """Return a script of deploy/ with these numbers, and with its variables before its first command.

    Args:
        values: numbers by the pattern of the text before them.
    """
    file = _ROOT / "deploy" / name
    if not file.is_file():
        raise UserError(f"setup-cluster: {file}: not there; start it in a checkout of glm46")
    text = file.read_text(encoding="utf-8")
    for pattern, value in values.items():
        text, count = re.subn(rf"^({pattern})\d+", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert count == 1, pattern
    head = re.findall(r"^(?:#.*\n|\n)+", text)[0]
    return f"{head}{variables}\n{text[len(head) :]}"
