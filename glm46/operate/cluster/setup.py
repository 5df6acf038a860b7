"""Hosts of a new cluster: their names, facts and faults, and the files for them."""

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
from glm46.compute.distributed.environment import set_variables, variables_that_begin, visible_gpus
from glm46.config.errors import UserError, raise_if
from glm46.files.local_disk import local_disk_fault
from glm46.operate.estimate.machine import detect_machine, driver_version
from glm46.operate.launch.environment import describe_version
from glm46.operate.launch.hostfile import Host, read_hostfile
from glm46.operate.launch.nodes import VARIABLES, pbs_hosts
from glm46.operate.launch.ssh_hosts import HostAnswer, in_this_folder, module_words, reach_command, run_on_hosts

_HOST_SECONDS = 60.0
"""Time for the answer of a host."""
ANSWER = "glm46-host: "
"""Start of the line with a host's answer; a login may print other lines."""


def find_hosts(arguments: argparse.Namespace) -> tuple[Path, list[Host]]:
    """Return the hosts of --hostfile or of the allocation, and the file or variable that lists them."""
    variables = set_variables(VARIABLES)
    if arguments.hostfile is not None:
        return arguments.hostfile, read_hostfile(arguments.hostfile)
    if arguments.type == "slurm" and "SLURM_JOB_NODELIST" in variables:
        listed = ["scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"]]
        try:
            names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"environment: SLURM_JOB_NODELIST: {shlex.join(listed)}: {error}; give --hostfile"
            ) from error
        return Path("SLURM_JOB_NODELIST"), [Host(line, name) for line, name in enumerate(names, 1)]
    if arguments.type == "pbs" and "PBS_NODEFILE" in variables:
        names = pbs_hosts(variables["PBS_NODEFILE"], "give --hostfile")
        return Path(variables["PBS_NODEFILE"]), [Host(line, name) for line, name in enumerate(names, 1)]
    inside = {"slurm": ", or start it in an allocation: salloc", "pbs": ", or start it in a job: qsub -I", "ssh": ""}
    raise UserError(
        f"--hostfile: not given, so no host is known; state a file, NAME slots=N on each line{inside[arguments.type]}"
    )


def place_of_address(master: str, names: Sequence[str]) -> int | None:
    """Return the index of the host that has the address of the master; None if no host has it."""

    def address(name: str) -> str | None:
        with suppress(OSError):
            return socket.gethostbyname(name)
        return None

    master_address = address(master)
    if master_address is None:
        return None
    return next((place for place, name in enumerate(names) if address(name) == master_address), None)


def ask_hosts(hosts: Sequence[Host], connection: str, argv: Sequence[str]) -> list[dict[str, Any] | str]:
    """Return the answer of each host, requested from all at once; a text with the reason if a host did not answer."""
    command = in_this_folder(module_words(variables_that_begin("PYTHONPATH"), ["setup-cluster", *argv]))

    def read(answer: HostAnswer) -> dict[str, Any] | str:
        for line in answer.output.splitlines():
            if ANSWER in line:
                return json.loads(line.partition(ANSWER)[2])
        return answer.reason()

    return [read(answer) for answer in run_on_hosts(hosts, [command] * len(hosts), _HOST_SECONDS, connection)]


def refuse_answers(
    hosts: Sequence[Host], answers: Sequence[Any], arguments: argparse.Namespace, connection: str
) -> None:
    """Raise a UserError with all faults that keep hosts from training."""
    faults = []
    first = next((answer for answer in answers if isinstance(answer, dict)), {})
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            remedy = f"`{reach_command(host, connection)}` must succeed without a question"
            if "ermission denied" in answer:
                remedy += f": ssh-keygen -t ed25519, if you have no key, then ssh-copy-id {host.login}"
            faults.append(f"{host.name}: {answer}; {remedy}, and this folder and {sys.executable} must be there")
            continue
        for name in ("versions", "driver"):
            if answer[name] != first[name]:
                faults.append(f"{host.name}: has {answer[name]}, the first host {first[name]}; install the same on all")
        if answer["driver"] != "none" and answer["gpus"] != arguments.gpus_per_node:
            expected = arguments.gpus_per_node
            faults.append(
                f"--gpus-per-node {expected}: {host.name} has {answer['gpus']}; state that, or look at its dmesg"
            )
        if answer["nvme"]:
            faults.append(f"--nvme-path {arguments.nvme_path}: {host.name}: {answer['nvme']}")
    raise_if(faults)


def examine_host(folder: Path, *, makes: bool = False, root: Path = Path("/")) -> dict[str, Any]:
    """Return the facts of one host: versions, driver, GPUs, network, and the fault of the folder.

    Args:
        makes: make the folder, for this user alone, if it has no fault.
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
    """Return the reason why this user cannot make or use a folder; empty if the user can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if nearest.is_symlink():
        return f"{nearest} is a symbolic link; state the folder itself"
    if not nearest.is_dir():
        return f"{nearest} is a file; remove it, or state another folder"
    if nearest == folder and folder.stat().st_uid != os.geteuid():
        return f"belongs to another user; chown it to {os.geteuid()}, mode 700, or state a folder of yours"
    fault = local_disk_fault(nearest)
    return f"{nearest}: {fault}; state a folder on a local disk that you can write" if fault else ""


def _interface(root: Path) -> str:
    """Return the interface of the default route; empty if the host has no default route."""
    with suppress(OSError):
        rows = [line.split() for line in (root / "proc/net/route").read_text().splitlines()[1:]]
        return next((row[0] for row in rows if row[1] == "00000000"), "")
    return ""


_ROOT = Path(glm46.__path__[0]).parent


def cluster_files(
    arguments: argparse.Namespace, hosts: Sequence[Host], answers: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Return the texts of all files by name.

    Args:
        arguments: arguments of the verb.
        answers: facts from `examine_host`, one for each host.

    Raises:
        UserError: glm46 does not run from a checkout, which has the job scripts that these files start from.
    """
    files = {
        "hostfile": "".join(f"{host.login} slots={host.slots}\n" for host in hosts),
        "setup_env.sh": _variables(arguments, answers),
        "launch.sh": _launch(arguments),
    }
    if arguments.type == "slurm":
        files["submit_job.slurm"] = _slurm(arguments)
    if arguments.type == "pbs":
        files["submit_job.pbs"] = _pbs(arguments, min(answer["cores"] for answer in answers))
    return files


def _variables(arguments: argparse.Namespace, answers: Sequence[dict[str, Any]]) -> str:
    lines = ["# Sourced by launch.sh and the job script. NCCL finds everything else by itself: docs/nccl.md."]
    interfaces = {answer["interface"] for answer in answers}
    if all(answer["network"] == "TCP" for answer in answers) and len(interfaces) == 1 and "" not in interfaces:
        (name,) = interfaces
        lines += [
            f"# No InfiniBand; all hosts have their default route on {name}.",
            f"export NCCL_SOCKET_IFNAME=={name}",
        ]
        lines += [f"export GLOO_SOCKET_IFNAME={name}"]
    lines += ["# launch.sh adds MASTER_ADDR. A job gets other nodes each time, and takes the first of them."]
    config = shlex.quote(str(arguments.config.absolute()))  # launch.sh starts in another folder
    lines += [f"export MASTER_PORT={arguments.master_port}", f"export CONFIG_FILE={config}"]
    lines += [f"export NGPU={arguments.gpus_per_node}"]
    lines += ["# States of the optimizer that do not fit: --optimizer.state_offload_folder $GLM46_NVME"]
    return "\n".join([*lines, f"export GLM46_NVME={arguments.nvme_path}", ""])


def _launch(arguments: argparse.Namespace) -> str:
    output = shlex.quote(str(arguments.output.absolute()))
    return f"""#!/usr/bin/env bash
# Trains on all hosts of the hostfile from here, over ssh.
cd {shlex.quote(str(_ROOT))} || exit 2
. {output}/setup_env.sh
export MASTER_ADDR={arguments.master_addr}
HOSTFILE={output}/hostfile exec ./run_train.sh --max-restarts 100 "$@"
"""


def _slurm(arguments: argparse.Namespace) -> str:
    text = _replaced(_shipped("slurm/train.sbatch"), r"(#SBATCH --nodes=)\d+", arguments.nodes)
    text = _replaced(text, r"(#SBATCH --gpus-per-node=)\d+", arguments.gpus_per_node)
    return _with_variables(text, arguments)


def _pbs(arguments: argparse.Namespace, cores: int) -> str:
    text = _replaced(_shipped("pbs/train.pbs"), r"(#PBS -l select=)\d+", arguments.nodes)
    text = _replaced(text, r"(#PBS -l select=.*:ncpus=)\d+", cores)
    text = _replaced(text, r"(#PBS -l select=.*:ngpus=)\d+", arguments.gpus_per_node)
    return _with_variables(text, arguments)


def _shipped(name: str) -> str:
    file = _ROOT / "deploy" / name
    if not file.is_file():
        raise UserError(f"setup-cluster: {file}: not there; start it in a checkout of glm46")
    return file.read_text(encoding="utf-8")


def _replaced(text: str, pattern: str, value: int) -> str:
    changed, count = re.subn(f"^{pattern}", rf"\g<1>{value}", text, flags=re.MULTILINE)
    assert count == 1, pattern
    return changed


def _with_variables(text: str, arguments: argparse.Namespace) -> str:
    """Return the script with its variables before its first command."""
    head = re.findall(r"^(?:#.*\n|\n)+", text)[0]
    variables = f". {shlex.quote(str(arguments.output.absolute()))}/setup_env.sh\n"
    return f"{head}{variables}\n{text[len(head) :]}"
