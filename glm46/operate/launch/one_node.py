"""Training on this node: the checks before ranks start, the start, and the messages about both.

A job system starts ``launch`` on each node of a run. With a hostfile, `launch_hosts` does so, once for each start.
"""

import argparse
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from glm46.compute.distributed.environment import set_variables, share_cores, visible_gpus
from glm46.config.ablation import require_one_run
from glm46.config.check import check_config
from glm46.config.command_line import Start, module_command, replace_overrides, short
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.optimizer import state_folder_message
from glm46.config.options import SCRIPT_VARIABLE
from glm46.config.profiling import snapshot_fault
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.observe.tracker import wandb_fault
from glm46.engine.reliability.run_lock import refuse_small_disk
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED
from glm46.files.local_disk import local_disk_fault
from glm46.operate.estimate.machine import Machine, detect_machine, processes_of_node
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.operate.estimate.requirement import describe_requirement
from glm46.operate.launch.config_options import fetched_overrides
from glm46.operate.launch.nodes import VARIABLES, Nodes, detect_nodes, refuse_node
from glm46.operate.launch.process_end import started_ranks
from glm46.operate.launch.rendezvous import (
    refuse_ports,
    rendezvous_options,
    reporting_missing_nodes,
    require_free_port,
    wait_for_first,
)
from glm46.operate.launch.restarts import LONGEST_ABSENCE, SavedSteps, hung_hosts, keep_running, known_step
from glm46.operate.launch.start_checks import refuse_start
from glm46.operate.launch.torchrun import EXIT_USER_ERROR, End, LauncherSignals, run_ranks
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.checkpoint.integrity import published_steps, step_folder

_LONGER = 4
"""Factor on the budget of the longer run that is suggested at the end."""


def launch_here(arguments: argparse.Namespace, overrides: Sequence[str], signals: LauncherSignals) -> int:
    """Train on this node, with restarts; returns the exit code of the last start."""
    is_started_from_hostfile = arguments.from_hostfile is not None
    first_number = arguments.from_hostfile or 0
    saved = SavedSteps(load_run(arguments, overrides, None), max(arguments.known_step, known_step()))
    saved.wait(LONGEST_ABSENCE, _report)
    try:
        ready = _check(arguments, overrides, first_number)
    except _DoesNotFit as error:
        print(*error.faults, sep="\n", file=sys.stderr)
        return EXIT_USER_ERROR
    nodes = ready.nodes

    def start(number: int, times: StartTimes) -> End:
        saved.wait(LONGEST_ABSENCE, _report)
        end = _start_ranks(ready, arguments, signals, number, times)
        # Another node may have received the signal: the job system starts all nodes again.
        return end._replace(is_final=end.is_final or nodes.count > 1 and end.code == EXIT_STOPPED)

    end = End(EXIT_USER_ERROR)
    try:
        with saved.watched():
            if nodes.rank == 0:
                _prepare(ready.plan)
            if is_started_from_hostfile:  # the command that started this launcher starts it again
                end = start(first_number, StartTimes.inherited(set_variables([START_TIMES])))
            else:
                end = keep_running(start, saved.newest, arguments.max_restarts)
        if end.code == 0 and nodes.rank == 0:
            print(describe_next(ready.plan, ready.typed))
        return end.code
    finally:
        if nodes.rank == 0:
            is_hung = end.code == EXIT_HANG and nodes.count > 1
            saved.tell_job(hung_hosts(Path(ready.plan.config.job.dump_folder)) if is_hung else ())


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
class _Ready:
    """A run that this node can train."""

    plan: Plan
    nodes: Nodes
    machine: Machine
    processes: int
    """Number of processes of this node."""
    typed: Start
    rank_overrides: tuple[str, ...]
    """Overrides that the ranks get."""


class _DoesNotFit(UserError):
    """Raised if the machine cannot train the run; the fault is a screen with the reason."""


def _check(arguments: argparse.Namespace, overrides: Sequence[str], number: int) -> _Ready:
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
    nodes = detect_nodes(set_variables(VARIABLES), socket.gethostname())
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
    script = set_variables([SCRIPT_VARIABLE]).get(SCRIPT_VARIABLE)
    if arguments.hostfile is not None and script is None:
        options += ["--hostfile", str(arguments.hostfile)]
    typed = Start(config_file, tuple(overrides), options=tuple(options), processes=nproc, script=script)
    remedies = (
        f"see what it needs in detail:  {typed.plan_command(nodes.count)}",
        f"train something that fits:    {typed.small_command()}",
    )
    refusal = describe_refusal(config, machine, nproc and nproc * nodes.count, remedies)
    if refusal:
        raise _DoesNotFit(refusal)
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
    return _Ready(plan, nodes, machine, nproc, typed, rank_overrides)


def _start_ranks(
    ready: _Ready, arguments: argparse.Namespace, signals: LauncherSignals, number: int, times: StartTimes
) -> End:
    """Start the ranks of this node for the n-th time, counted from 0, and wait for their end."""
    nodes = ready.nodes
    share_cores(ready.machine.cores, ready.processes)
    require_free_port(nodes, number)
    wait_for_first(nodes, number, _report)
    with reporting_missing_nodes(nodes, lambda: bool(started_ranks()), _report):
        options = rendezvous_options(nodes, ready.processes, number)
        command = ["train", "--config", str(arguments.config), *ready.rank_overrides]
        return run_ranks(options, command, signals, times)


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


def _prepare(plan: Plan) -> None:
    """Make the missing shards, and refuse a config that would read a source too often, after printing how often each
    is read. The other nodes wait at the rendezvous and then find the shards in the same place."""
    # Imported here: a refusal before this does not need the libraries of the data.
    from glm46.storage.data.corpus import check_epochs, describe_sources
    from glm46.storage.huggingface.hub import local_inputs
    from glm46.storage.prepare.pipeline import prepare_run

    manifests = prepare_run(plan, report=_report, local_inputs=local_inputs)
    try:
        check_epochs(plan, manifests)
    except UserError:
        print("\n".join(describe_sources(plan, manifests)), flush=True)
        raise


def describe_next(plan: Plan, start: Start) -> str:
    """Return commands to type after a finished run: a longer run, if its config has no faults, and the help."""
    # Imported here: they load the libraries of the data.
    from glm46.storage.data.corpus import check_epochs
    from glm46.storage.data.manifest import load_manifest

    world_size = plan.layout.world_size
    values = {
        "training.tokens": str(_LONGER * plan.budget_tokens),
        "job.dump_folder": f"{plan.config.job.dump_folder}_longer",
        **{key: f"{folder}_longer" for key, folder in plan.config.folders_apart.items()},
    }
    lines = [f"all keys      {module_command()} train --help keys"]
    folder = plan.config.checkpoint_folder
    ask_command = f"ask it        {module_command()} generate"
    is_chat = plan.config.finetune or plan.config.rl
    prompt = f"{'--chat ' if is_chat else ''}--prompt '...'"
    if plan.config.adapter is not None:
        base = plan.config.checkpoint.initial_load_path
        exports = Path(plan.config.job.dump_folder).glob("huggingface/step-*/adapter_config.json")
        exported = sorted(exports) if base else []
        if base and exported:
            adapter = exported[-1].parent
            lines.insert(0, f"{ask_command} --model {quote(base)} --adapter {quote(short(adapter))} {prompt}")
    elif plan.config.head == "lm":
        steps = published_steps(folder)
        if steps:
            newest = step_folder(folder, steps[-1])
            lines.insert(0, f"{ask_command} --checkpoint {quote(short(newest))} {prompt}")
    try:
        config = load_config(start.config, replace_overrides(start.overrides, values), world_size=world_size)
        manifests = {source.name: load_manifest(Path(source.path), full=False) for source in config.data.sources}
        check_epochs(resolve_plan(config, world_size), manifests)
        lines.insert(0, f"train longer  {start.command(values)}")
    except UserError:
        pass
    return "\n".join(f"{'      ' if number else 'Next: '}{line}" for number, line in enumerate(lines))


def _report(line: str) -> None:
    print(line, flush=True)


def describe_refusal(
    config: RunConfig, machine: Machine, processes: int | None, remedies: Sequence[str] = ()
) -> str | None:
    """Return one screen with the reason why this machine cannot train the config, and remedies; None if it can."""
    fits, screen = describe_requirement(config, machine, remedies=remedies)
    # If the degrees do not allow the number of processes, `load_config` refuses it after this.
    if fits and processes is not None and not check_config(config, world_size=processes):
        fits, screen = describe_requirement(config, machine, world_size=processes, remedies=remedies)
    return None if fits else screen
