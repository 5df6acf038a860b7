"""Checks of a run on this node, before its ranks start."""

import argparse
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.compute.distributed.environment import variables_that_are_set, visible_gpus
from glm46.config.ablation import require_one_run
from glm46.config.check import check_config
from glm46.config.command_line import Start, module_command
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.optimizer import state_folder_message
from glm46.config.options import SCRIPT_VARIABLE
from glm46.config.profiling import snapshot_fault
from glm46.config.run_config import RunConfig
from glm46.engine.observe.tracker import wandb_fault
from glm46.engine.reliability.run_lock import refuse_small_disk
from glm46.files.local_disk import local_disk_fault
from glm46.operate.estimate.machine import Machine, detect_machine, processes_of_node
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.operate.estimate.requirement import describe_requirement
from glm46.operate.launch.fetched_config import fetched_overrides
from glm46.operate.launch.nodes import VARIABLES, Nodes, detect_nodes, refuse_node
from glm46.operate.launch.rendezvous import (
    refuse_ports,
    require_free_port,
)
from glm46.operate.launch.start_checks import refuse_start
from glm46.run.plan import Plan, resolve_plan


def load_run(arguments: argparse.Namespace, overrides: Sequence[str], world_size: int | None) -> RunConfig:
    """Load the config of ``launch`` and check it with the options; ``world_size``: see `load_config`.

    Raises:
        UserError: the config has faults, or is an ablation, or restarts would lose all steps.
    """
    config = load_config(arguments.config, overrides, world_size=world_size)
    require_one_run(config.ablation, arguments.config, module_command())
    if arguments.max_restarts and not config.checkpoint.enable:
        raise UserError(
            f"command line: --max-restarts {arguments.max_restarts} with checkpoint.enable = false: every start would "
            "begin at step 0; enable checkpoints, or remove --max-restarts"
        )
    return config


@dataclass(frozen=True)
class ReadyNode:
    """A run that this node can train."""

    plan: Plan
    nodes: Nodes
    machine: Machine
    processes: int
    """Number of processes of this node."""
    typed: Start
    rank_overrides: tuple[str, ...]
    """Overrides that the ranks get."""


class DoesNotFit(UserError):
    """Raised if the machine cannot train the run; the fault is a screen with the reason."""


def check_node(arguments: argparse.Namespace, overrides: Sequence[str], number: int) -> ReadyNode:
    """Check config, machine and folders, and choose the processes of this node.

    Args:
        number: number of this start, counted from 0.

    Raises:
        UserError: this node cannot train the run.
    """
    config_file = arguments.config
    nproc = arguments.nproc
    max_restarts = arguments.max_restarts
    config = load_run(arguments, overrides, None)
    nodes = detect_nodes(variables_that_are_set(VARIABLES), socket.gethostname())
    nproc = nproc or nodes.processes
    if nodes.count > 1:
        refuse_ports(nodes, max_restarts, config.metrics.prometheus_port)
    require_free_port(nodes, number)
    machine = detect_machine(visible_gpus(), nodes=nodes.count)
    if arguments.from_hostfile is not None:
        refuse_node(nodes, nproc, len(machine.gpus))
    package_fault = wandb_fault() if config.metrics.enable_wandb else None
    fault = snapshot_fault(config.profiling, has_gpu=bool(machine.gpus)) or package_fault
    if fault:
        raise UserError(f"{config_file}: {fault}")
    options = ["--max-restarts", str(max_restarts)] if max_restarts else []
    script = variables_that_are_set([SCRIPT_VARIABLE]).get(SCRIPT_VARIABLE)
    if arguments.hostfile is not None and script is None:
        options += ["--hostfile", str(arguments.hostfile)]
    typed = Start(config_file, tuple(overrides), options=tuple(options), processes=nproc, script=script)
    remedies = (
        f"see what it needs in detail:  {typed.plan_command(nodes.count)}",
        f"train something that fits:    {typed.small_command()}",
    )
    refusal = describe_refusal(config, machine, nproc and nproc * nodes.count, remedies)
    if refusal:
        raise DoesNotFit(refusal)
    nproc = nproc or processes_of_node(config.parallelism, machine)
    world_size = nproc * nodes.count
    if check_config(config, world_size=world_size):
        load_run(arguments, overrides, world_size)  # raises the faults, with their origin
    rank_overrides = (*overrides, *fetched_overrides(config))
    if len(rank_overrides) > len(overrides):
        config = load_run(arguments, rank_overrides, None)
    plan = resolve_plan(config, world_size)
    _refuse_state_folder(plan, nproc)
    refuse_small_disk(plan, nproc)
    if nodes.rank == 0:
        refuse_start(config, typed)
    return ReadyNode(plan, nodes, machine, nproc, typed, rank_overrides)


def _refuse_state_folder(plan: Plan, processes: int) -> None:
    """Raise the faults of the folder of optimizer states on this node, which every rank would raise at its start."""
    optimizer = plan.config.optimizer
    if optimizer.state_offload != "nvme":
        return
    folder = Path(str(optimizer.state_offload_folder))
    fault = local_disk_fault(folder)
    needed = largest_stage(stage_memory(plan)).disk * processes
    if fault is None:
        free = shutil.disk_usage(folder).free
        if needed > free:
            states = f"optimizer states of {counted(processes, 'process')} need {needed / 2**30:,.2f} GiB"
            fault = f"{states}, and {free / 2**30:,.2f} GiB of {folder} are free"
    if fault is not None:
        raise UserError(state_folder_message(folder, fault))


def describe_refusal(
    config: RunConfig, machine: Machine, processes: int | None, remedies: Sequence[str] = ()
) -> str | None:
    """Return one screen with the reason why this machine cannot train the config, and remedies; None if it can."""
    fits, screen = describe_requirement(config, machine, remedies=remedies)
    # If the degrees do not allow the number of processes, `load_config` refuses it after this.
    if fits and processes is not None and not check_config(config, world_size=processes):
        fits, screen = describe_requirement(config, machine, world_size=processes, remedies=remedies)
    return None if fits else screen
