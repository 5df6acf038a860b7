"""The files that ``setup-cluster`` writes: hostfile, variables, launch script, job script."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import glm46
from glm46.compute.distributed.hostfile import Host
from glm46.config.errors import UserError

_ROOT = Path(glm46.__path__[0]).parent


def cluster_files(
    arguments: argparse.Namespace, hosts: Sequence[Host], answers: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Names and texts of all files.

    Args:
        arguments: of the verb.
        answers: of `examine_host`, one for each host.

    Raises:
        UserError: glm46 does not run from a checkout, which has the job scripts that these files start from.
    """
    files = {
        "hostfile": "".join(f"{host.login} slots={host.slots}\n" for host in hosts),
        "setup_env.sh": _variables(arguments, answers),
        "launch.sh": _launch(arguments),
    }
    if arguments.type == "slurm":
        files["submit_job.slurm"] = _slurm(arguments, len(hosts) > arguments.nodes, len(hosts))
    if arguments.type == "pbs":
        files["submit_job.pbs"] = _pbs(arguments, len(hosts), min(answer["cores"] for answer in answers))
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
# Trains on {arguments.nodes} hosts of the hostfile from here, over ssh; the others are spares.
cd {shlex.quote(str(_ROOT))} || exit 2
. {output}/setup_env.sh
export MASTER_ADDR={arguments.master_addr}
HOSTFILE={output}/hostfile exec ./run_train.sh --nodes {arguments.nodes} --max-restarts 100 "$@"
"""


def _slurm(arguments: argparse.Namespace, has_spares: bool, hosts: int) -> str:
    text = _shipped("slurm/spares.sbatch" if has_spares else "slurm/train.sbatch")
    text = _replaced(text, r"(#SBATCH --nodes=)\d+", hosts)
    text = _replaced(text, r"(#SBATCH --gpus-per-node=)\d+", arguments.gpus_per_node)
    return _with_variables(text, arguments, f"NODES={arguments.nodes}" if has_spares else "")


def _pbs(arguments: argparse.Namespace, hosts: int, cores: int) -> str:
    text = _replaced(_shipped("pbs/train.pbs"), r"(#PBS -l select=)\d+", hosts)
    text = _replaced(text, r"(#PBS -l select=.*:ncpus=)\d+", cores)
    text = _replaced(text, r"(#PBS -l select=.*:ngpus=)\d+", arguments.gpus_per_node)
    return _with_variables(text, arguments, f"NODES={arguments.nodes}")


def _shipped(name: str) -> str:
    file = _ROOT / "deploy" / name
    if not file.is_file():
        raise UserError(f"setup-cluster: {file}: not there; start it in a checkout of glm46")
    return file.read_text(encoding="utf-8")


def _replaced(text: str, pattern: str, value: int) -> str:
    changed, count = re.subn(f"^{pattern}", rf"\g<1>{value}", text, flags=re.MULTILINE)
    assert count == 1, pattern
    return changed


def _with_variables(text: str, arguments: argparse.Namespace, more: str) -> str:
    """The script with its variables before its first command."""
    head = re.match(r"(?:#.*\n|\n)+", text)[0]
    own = f". {shlex.quote(str(arguments.output.absolute()))}/setup_env.sh\n"
    return f"{head}{own}{f'export {more}' if more else ''}\n{text[len(head) :]}"
