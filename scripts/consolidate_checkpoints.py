#!/usr/bin/env python3
"""Gather node-local checkpoints on shared storage when no training runs: see --help, and docs/checkpoints.md.

The node that runs the script drives the others over ssh, or srun: each node lists its parts, copies its files to
the shared folder and compares them there; the driver publishes; each node removes its files. Phases can be repeated.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glm46.config.errors import UserError
from glm46.operate.launch.hostfile import Host, read_hostfile
from glm46.operate.launch.ssh_hosts import CLIENTS, HostAnswer, run_on_hosts
from glm46.storage.checkpoint.gathering import (
    NodePart,
    copy_part,
    is_gathered,
    is_superseded,
    parts_in,
    publish_gathered,
    remove_part,
    whole_saves,
)
from glm46.storage.checkpoint.integrity import MANIFEST, step_folder
from glm46.storage.checkpoint.publish import repair

_SCRIPT = Path(__file__).resolve()
"""Every node can run it with the same Python."""
_MARK = "glm46-node: "  # a remote shell may print other lines, such as a greeting
_SECONDS = 86_400.0
"""For the phase of a node: copying may take hours."""
_STEP_FOLDER = re.compile(r"step-(\d+)")  # with leading zeros or without


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 2 when nothing was gathered."""
    arguments = _parser().parse_args(list(argv))
    if arguments.node_phase:
        answer = _on_this_node(arguments)
        print(_MARK + json.dumps(answer), flush=True)
        return 0
    try:
        _take_step_folders(arguments)
        _drive(arguments)
    except UserError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Gather node-local checkpoint files on shared storage, verify them, publish the checkpoint, then "
        "remove the local copies. Can be run again after an interruption.",
        allow_abbrev=False,
    )
    step = "; a step folder in it, such as …/step-10000, also sets --step"
    local = "the checkpoint folder on each node's own disk"
    parser.add_argument("--node-local-dir", type=Path, required=True, help=local + step)
    parser.add_argument("--output-dir", type=Path, required=True, help="the checkpoint folder on shared storage" + step)
    parser.add_argument("--hostfile", type=Path, help="one host a line; absent: this node only")
    parser.add_argument("--step", type=int, help="the step to gather; absent: the newest that is whole")
    parser.add_argument("--keep-local", action="store_true", help="do not remove the local copies")
    parser.add_argument("--connect", choices=CLIENTS, default="ssh", help="client that runs commands on hosts")
    parser.add_argument("--node-phase", choices=["list", "copy", "remove"], help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    return parser


def _take_step_folders(arguments: argparse.Namespace) -> None:
    """Replace step folders by their parent folders, and set ``step`` from them.

    Raises:
        UserError: the options name more than one step.
    """
    named = {} if arguments.step is None else {f"--step {arguments.step}": arguments.step}
    for option in ("node_local_dir", "output_dir"):
        folder = getattr(arguments, option)
        if match := _STEP_FOLDER.fullmatch(folder.name):
            named[f"--{option.replace('_', '-')} {folder}"] = int(match[1])
            setattr(arguments, option, folder.parent)
    if len(set(named.values())) > 1:
        raise UserError(f"{', '.join(named)}: name different steps; give one step")
    arguments.step = next(iter(named.values()), None)


def _on_this_node(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one phase on this node; returns JSON values for the driver."""
    local, output = arguments.node_local_dir, arguments.output_dir
    try:
        if arguments.node_phase == "list":
            if local.is_dir():
                repair(local)
            parts, faults = parts_in(local)
            return {"parts": [asdict(part) for part in parts], "faults": faults}
        save = NodePart(**json.loads(arguments.save))
        if arguments.node_phase == "copy":
            faults = copy_part(local, output, save)
            return {"manifest": (step_folder(local, save.step) / MANIFEST).read_text(), "faults": faults}
        return {"faults": remove_part(local, output, save)}
    except OSError as error:
        return {"faults": [f"{arguments.node_phase}: {error}"]}


def _drive(arguments: argparse.Namespace) -> None:
    hosts: list[Host | None] = [None]
    if arguments.hostfile is not None:
        # PBS lists a host once for each of its processes.
        hosts = list({host.login: host for host in read_hostfile(arguments.hostfile)}.values())
    if not arguments.output_dir.is_dir():
        raise UserError(f"--output-dir {arguments.output_dir}: no such folder on this node; is the storage mounted?")
    repair(arguments.output_dir)

    def ask(phase: str, hosts: list[Host | None], *options: str) -> list[dict[str, Any]]:
        command = [
            sys.executable, str(_SCRIPT), "--node-local-dir", str(arguments.node_local_dir),
            "--output-dir", str(arguments.output_dir), "--node-phase", phase, *options,
        ]  # fmt: skip
        if hosts == [None]:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return [_answer(HostAnswer(done.returncode, done.stdout, done.stderr))]
        commands = [shlex.join(command)] * len(hosts)
        return list(map(_answer, run_on_hosts(hosts, commands, _SECONDS, arguments.connect)))

    listed = ask("list", hosts)
    parts = {host: [NodePart(**part) for part in one.get("parts", [])] for host, one in zip(hosts, listed, strict=True)}
    save = _choose([part for own in parts.values() for part in own], arguments, _faults_of(hosts, listed))
    holders = [host for host, own in parts.items() if any(part.seal == save.seal for part in own)]
    options = ("--save", json.dumps(asdict(save)))
    target = step_folder(arguments.output_dir, save.step)
    if is_superseded(arguments.output_dir, save):
        raise UserError(f"{target}: holds a later save of this step than the node-local one; remove one of them")
    if is_gathered(arguments.output_dir, save):
        print(f"{target}: already published")
    else:
        print(f"step {save.step}: copying from {len(holders)} node(s)", flush=True)
        answers = ask("copy", holders, *options)
        faults = _faults_of(holders, answers)
        faults = faults or publish_gathered(arguments.output_dir, save.step, answers[0]["manifest"].encode())
        if faults:
            raise UserError(*faults)
        print(f"{target}: verified and published", flush=True)
    if not arguments.keep_local:
        if faults := _faults_of(holders, ask("remove", holders, *options)):
            raise UserError(*faults)
        print(f"step {save.step}: local copies removed")


def _choose(parts: list[NodePart], arguments: argparse.Namespace, faults: list[str]) -> NodePart:
    whole = whole_saves(parts)
    saves = [save for save in whole if arguments.step in (None, save.step)]
    if saves:
        return saves[-1]
    seen = ", ".join(str(step) for step in sorted({part.step for part in parts})) or "none"
    asked = "of any step" if arguments.step is None else f"of step {arguments.step}"
    raise UserError(
        *faults,
        f"{arguments.node_local_dir}: files {asked} are missing on the nodes asked (steps found: {seen}; whole: "
        f"{', '.join(str(save.step) for save in whole) or 'none'}); list every host of the run in the hostfile",
    )


def _faults_of(hosts: list[Host | None], answers: list[dict[str, Any]]) -> list[str]:
    names = [host.login if host else "this node" for host in hosts]
    return [f"{name}: {fault}" for name, one in zip(names, answers, strict=True) for fault in one["faults"]]


def _answer(found: HostAnswer) -> dict[str, Any]:
    """The answer of a node; of a node that cannot be reached, an answer with a fault."""
    for line in found.output.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    said = (found.errors or found.output).strip()[-500:]
    return {"faults": [f"no answer, exit code {found.code}: {said}"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
