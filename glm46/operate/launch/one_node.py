"""Train on this node: the checks before ranks start, the start, and what a person is told about both.

A job system or torchrun starts the same on each node of a run; with a hostfile the driver orders it (`take_orders`).
"""

import argparse
import hashlib
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from glm46.compute.distributed.environment import set_variable, set_variables, visible_gpus
from glm46.config.ablation import require_one_run
from glm46.config.check import check_config
from glm46.config.command_line import Start, module_command, replace_overrides, short
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import dump_config, load_config
from glm46.config.optimizer import state_folder_message
from glm46.config.options import SCRIPT_VARIABLE
from glm46.config.profiling import snapshot_fault
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.observe.tracker import tracker_fault
from glm46.engine.reliability.run_lock import refuse_locked, refuse_small_disk, refuse_unwritable
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED
from glm46.files.local_disk import local_disk_fault
from glm46.operate.estimate.machine import Machine, detect_machine, processes_of_node
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.operate.estimate.requirement import describe_requirement
from glm46.operate.launch.config_options import fetched_overrides
from glm46.operate.launch.environment import describe_version
from glm46.operate.launch.exporting import exporting
from glm46.operate.launch.node_client import ANSWER_SECONDS, Driver
from glm46.operate.launch.nodes import VARIABLES, Nodes, detect_nodes, refuse_node
from glm46.operate.launch.process_end import started_ranks
from glm46.operate.launch.rendezvous import (
    refuse_ports,
    rendezvous_options,
    reporting_missing_nodes,
    require_free_port,
    wait_for_first,
)
from glm46.operate.launch.restarts import LONGEST_ABSENCE, SavedSteps, hung_hosts, hung_ranks, keep_running, known_step
from glm46.operate.launch.torchrun import EXIT_USER_ERROR, End, Standby, load_torchrun, run_ranks
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.checkpoint.integrity import published_steps, step_folder

_LONGER = 4
"""Factor on the budget of the longer run that is proposed at the end."""


def launch_here(arguments: argparse.Namespace, overrides: Sequence[str], standby: Standby) -> int:
    """Train on this node, as often as it takes; returns the exit code of the last start."""
    saved = SavedSteps(load_run(arguments, overrides, None), known_step())
    saved.wait(LONGEST_ABSENCE, _report)
    try:
        ready = _check(arguments, overrides, 0)
    except _DoesNotFit as error:
        print(*error.faults, sep="\n", file=sys.stderr)
        return EXIT_USER_ERROR
    nodes = ready.nodes

    def repeat(start: Callable[[int, StartTimes], End]) -> End:
        def start_once(number: int, times: StartTimes) -> End:
            saved.wait(LONGEST_ABSENCE, _report)
            end = start(number, times)
            # Another node may have got a signal that ends it: the job system starts all again.
            return end._replace(is_final=end.is_final or nodes.count > 1 and end.code == EXIT_STOPPED)

        return keep_running(start_once, saved.newest, arguments.max_restarts)

    end = End(EXIT_USER_ERROR)
    try:
        end = _train(ready, arguments, standby, saved, repeat)
        return end.code
    finally:
        if nodes.rank == 0:
            is_hung = end.code == EXIT_HANG and nodes.count > 1
            saved.tell_job(hung_hosts(Path(ready.plan.config.job.dump_folder)) if is_hung else ())


def load_run(arguments: argparse.Namespace, overrides: Sequence[str], world_size: int | None) -> RunConfig:
    """The config of ``launch``, checked with its options; ``world_size``: see `load_config`.

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
    """Of this node."""
    typed: Start
    stated: RunConfig
    """As loaded, with ids of the hub where `plan` has this node's folders."""
    of_ranks: tuple[str, ...]
    """Overrides of the ranks."""


class _DoesNotFit(UserError):
    """The machine cannot train the run; the fault is a screen about why."""


def take_orders(arguments: argparse.Namespace, overrides: Sequence[str], standby: Standby) -> int:
    """Start ranks as often and where the driver of a hostfile orders it; returns the exit code of the last start."""
    driver, code = Driver(standby.signals), 0
    if arguments.nproc is not None:  # a spare imports before it is needed
        with suppress(UserError):  # the first answer has its faults
            cores = detect_machine(visible_gpus(), nodes=1).cores
            standby.prepare(load_run(arguments, overrides, None), cores, arguments.nproc)
            load_torchrun()
    while (order := driver.next_order()) is not None:
        for name, value in order["variables"].items():
            set_variable(name, value)
        code = _follow(order, arguments, standby, driver) or code
    return code


def _follow(order: dict[str, Any], arguments: argparse.Namespace, standby: Standby, driver: Driver) -> int | None:
    """Answer an order, and start the ranks once if the driver says so; returns the exit code, None without a start."""
    number, overrides = order["number"], order["overrides"]
    known: dict[str, Any] = {"versions": describe_version()}
    faults: Sequence[str] = ()
    try:
        saved = SavedSteps(load_run(arguments, overrides, None), order["newest_step"])
        saved.wait(ANSWER_SECONDS / 2, _report)
        ready = _check(arguments, overrides, number)
        load_torchrun()  # from a slow disk this stops the thread that answers while ranks train
        digest = hashlib.sha256(dump_config(ready.stated).encode()).hexdigest()
        known |= {"config": digest, "processes": ready.processes}
    except UserError as error:
        faults, known["is_stopped"] = error.faults, error.exit_code == EXIT_STOPPED
    text = driver.answer(faults=faults, **known)
    if text is None:
        return None
    times, end = StartTimes.inherited({START_TIMES: text}), End(EXIT_USER_ERROR)
    try:
        end = _train(ready, arguments, standby, saved, lambda start: start(number, times))
    except UserError as error:
        print(*(f"error: {fault}" for fault in error.faults), sep="\n", file=sys.stderr, flush=True)
    config = ready.plan.config
    hung = hung_ranks(Path(config.job.dump_folder)) if end.code == EXIT_HANG else []
    facts = {"code": end.code, "is_final": end.is_final, "failed_at": end.failed_at, "hung_ranks": hung}
    driver.report(newest_step=saved.newest(), **facts)
    return end.code


def _check(arguments: argparse.Namespace, overrides: Sequence[str], number: int) -> _Ready:
    """Check config, machine and folders, and choose the processes of this node.

    Args:
        number: of this start, counted from 0.

    Raises:
        UserError: something keeps this node from training the run.
    """
    config_file, nproc, max_restarts = arguments.config, arguments.nproc, arguments.max_restarts
    config = load_run(arguments, overrides, None)
    nodes = detect_nodes(set_variables(VARIABLES), socket.gethostname())
    nproc = nproc or nodes.processes
    if nodes.count > 1:
        refuse_ports(nodes, max_restarts, config.metrics.prometheus_port)
    require_free_port(nodes, number)
    machine = detect_machine(visible_gpus(), nodes=nodes.count)
    if arguments.from_hostfile:
        refuse_node(nodes, nproc, len(machine.gpus))
    fault = snapshot_fault(config.profiling, has_gpu=bool(machine.gpus)) or tracker_fault(config.metrics.tracker)
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
    stated, of_ranks = config, (*overrides, *fetched_overrides(config))
    if len(of_ranks) > len(overrides):
        config = load_run(arguments, of_ranks, None)
    plan = resolve_plan(config, world_size)
    _refuse_state_folder(plan, nproc)
    refuse_small_disk(plan, nproc)
    if nodes.rank == 0:
        _refuse_start(config, typed)
    return _Ready(plan, nodes, machine, nproc, typed, stated, of_ranks)


def _train(
    ready: _Ready,
    arguments: argparse.Namespace,
    standby: Standby,
    saved: SavedSteps,
    repeat: Callable[[Callable[[int, StartTimes], End]], End],
) -> End:
    """Train on this node.

    Args:
        saved: is kept up to date.
        repeat: calls the function that it gets, which starts the ranks and waits for their end, once or more.
    """
    plan, nodes = ready.plan, ready.nodes
    server = standby.prepare(plan.config, ready.machine.cores, ready.processes)

    def start(number: int, times: StartTimes) -> End:
        require_free_port(nodes, number)
        wait_for_first(nodes, number, _report)
        with reporting_missing_nodes(nodes, lambda: bool(started_ranks()), _report):
            options = rendezvous_options(nodes, ready.processes, number)
            exporter.starts(number)
            command = ["train", "--exported", "--config", str(arguments.config), *ready.of_ranks]
            return run_ranks(options, command, standby.signals, server, times)

    with exporting(plan.config if nodes.rank == 0 else None) as exporter, saved.watched():
        if nodes.rank == 0:
            _prepare(plan)
        end = repeat(start)
        exporter.ends(end.code)
    if end.code == 0 and nodes.rank == 0:
        print(describe_next(plan, ready.typed))
    return end


def _refuse_start(config: RunConfig, typed: Start) -> None:
    """Raise the faults of the run's folders that every rank would raise at its start. Weights that another shipped run
    makes are named with its command."""
    from glm46.engine.training.origin import refuse_origin

    try:
        refuse_origin(config)
    except UserError as error:
        path = config.checkpoint.initial_load_path
        maker = None if path is None or Path(path).exists() else typed.command_that_makes(Path(path))
        hint = f"; this one is made by: {maker}" if maker else ""
        raise UserError(*(fault + hint for fault in error.faults)) from error
    for key, folder in {"job.dump_folder": Path(config.job.dump_folder), **config.folders_apart}.items():
        refuse_unwritable(folder, key)
    refuse_locked(Path(config.job.dump_folder), config.folders_apart)
    if config.rl is not None:
        from glm46.operate.launch.rl_start import refuse_rl

        refuse_rl(config.rl.resolved())


def _refuse_state_folder(plan: Plan, processes: int) -> None:
    """Raise the faults of the folder of optimizer states on this node, which every rank would raise at its start."""
    optimizer = plan.config.optimizer
    if optimizer.state_offload != "nvme":
        return
    folder = Path(str(optimizer.state_offload_folder))
    fault, needed = local_disk_fault(folder), largest_stage(stage_memory(plan)).disk * processes
    if fault is None and needed > (free := shutil.disk_usage(folder).free):
        has = f"{free / 2**30:,.2f} GiB of {folder}"
        fault = (
            f"optimizer states of {counted(processes, 'process')} need {needed / 2**30:,.2f} GiB, and {has} are free"
        )
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
    """Commands to type after a finished run: a longer run, if its config has no faults, and the help."""
    # Imported here: they load the libraries of the data.
    from glm46.storage.data.corpus import check_epochs
    from glm46.storage.data.manifest import load_manifest

    world_size = plan.layout.world_size
    values = {
        "training.tokens": str(_LONGER * plan.budget_tokens),
        "job.dump_folder": f"{plan.config.job.dump_folder}_longer",
        **{key: f"{folder}_longer" for key, folder in plan.config.folders_apart.items()},
    }
    lines, folder = [f"all keys      {module_command()} train --help"], plan.config.checkpoint_folder
    ask, is_chat = f"ask it        {module_command()} generate", plan.config.finetune or plan.config.rl
    prompt = f"{'--chat ' if is_chat else ''}--prompt '...'"
    if plan.config.adapter is not None:
        base = plan.config.checkpoint.initial_load_path
        if base and (
            exported := sorted(Path(plan.config.job.dump_folder).glob("huggingface/step-*/adapter_config.json"))
        ):
            lines.insert(0, f"{ask} --model {quote(base)} --adapter {quote(short(exported[-1].parent))} {prompt}")
    elif plan.config.head == "lm" and (saved := published_steps(folder)):
        step = step_folder(folder, saved[-1])
        lines.insert(0, f"{ask} --checkpoint {quote(short(step))} {prompt}")
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
    """One screen about why this machine cannot train the config, and what to do; None if it can."""
    fits, screen = describe_requirement(config, machine, remedies=remedies)
    # If the degrees do not allow the number of processes, `load_config` refuses it after this.
    if fits and processes is not None and not check_config(config, world_size=processes):
        fits, screen = describe_requirement(config, machine, world_size=processes, remedies=remedies)
    return None if fits else screen
