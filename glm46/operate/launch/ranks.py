"""Starts the ranks of verbs that run a model, on this machine."""

import argparse
from collections.abc import Sequence

from glm46.compute.distributed.environment import launched_world_size, share_cores, variables_that_are_set, visible_gpus
from glm46.config.errors import UserError
from glm46.config.generation_degrees import Degrees, degree_faults
from glm46.config.model import ModelShape
from glm46.engine.observe.start_times import StartTimes
from glm46.operate.estimate.machine import detect_machine
from glm46.operate.launch.model_options import PROCESSES, add_nproc
from glm46.operate.launch.nodes import Nodes
from glm46.operate.launch.rendezvous import rendezvous_options
from glm46.operate.launch.torchrun import LauncherSignals, run_ranks


def processes(arguments: argparse.Namespace) -> int:
    """Return the number of processes of a verb: the number that a launcher started, or that its options request.

    Raises:
        UserError: it is not a number.
    """
    ngpu = variables_that_are_set([PROCESSES]).get(PROCESSES, "1")
    if arguments.nproc is None and not (ngpu.isdecimal() and int(ngpu)):
        raise UserError(f"{PROCESSES} = {ngpu}: expected a number of processes; correct it, or give --nproc")
    return launched_world_size() or arguments.nproc or int(ngpu)


def degrees_of(arguments: argparse.Namespace, shape: ModelShape, size: int) -> Degrees:
    """Return the degrees of parallelism of these options.

    Raises:
        UserError: a degree does not split the model evenly, or does not divide the number of processes.
    """
    degrees = Degrees(*(getattr(arguments, f"{name}_degree") for name in Degrees._fields))
    faults = degree_faults(degrees, shape, size, lambda name, degree: f"--{name.replace('_', '-')}-degree {degree}")
    if faults:
        raise UserError(*dict(reversed(faults)).values())  # the first fault of each degree
    return degrees


def start_ranks(verb: str, argv: Sequence[str], arguments: argparse.Namespace) -> int | None:
    """Start the processes that the options request, and wait for them.

    Returns:
        Exit code; None in a process that is to do the work itself.

    Raises:
        UserError: the number of processes is not a number, or an option has no effect with several.
    """
    if launched_world_size() is not None:
        return None
    count = processes(arguments)
    if count == 1:
        return None
    if arguments.device is not None:
        raise UserError(f"--device {arguments.device}: {count} processes take one GPU each, or the CPU; remove it")
    share_cores(detect_machine(visible_gpus(), nodes=1).cores, count)
    # Torchrun would read --nproc as an abbreviation of its own options.
    nproc_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_nproc(nproc_parser)
    _, rank_arguments = nproc_parser.parse_known_args(argv)
    signals = LauncherSignals()
    times = StartTimes("the command")
    try:
        return run_ranks(rendezvous_options(Nodes(), count, 0), [verb, *rank_arguments], signals, times).code
    finally:
        signals.close()
