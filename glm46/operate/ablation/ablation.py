"""The work of ``python -m glm46 ablate``: plan all runs, train them, write the report."""

import argparse
from collections.abc import Sequence

from glm46.compute.distributed.environment import variables_that_are_set, visible_gpus
from glm46.config.errors import UserError
from glm46.engine.reliability.run_lock import lock_run, writing
from glm46.operate.ablation.ablation_runs import plan_ablation
from glm46.operate.ablation.ablation_training import train_all
from glm46.operate.ablation.report import write_report
from glm46.operate.estimate.machine import detect_machine
from glm46.operate.launch.nodes import VARIABLES, detect_nodes
from glm46.operate.launch.torchrun import LauncherSignals


def run_ablation(arguments: argparse.Namespace, overrides: Sequence[str], command: str) -> int:
    """Train the runs of an ablation and compare them; returns the exit code of `ablate_command`.

    Args:
        command: the command that the report names.
    """
    nodes = detect_nodes(variables_that_are_set(VARIABLES), "")
    if nodes.count > 1:
        raise UserError(f"environment: {nodes.count} nodes: ablate trains on one node; unset NNODES, or start it once")
    machine = detect_machine(visible_gpus())
    plan = plan_ablation(arguments.config, overrides, arguments.vary, arguments.nproc, machine, seeds=arguments.seeds)
    locks = lock_run(plan.folder)
    signals = LauncherSignals()
    try:
        code = train_all(plan, signals)
        with writing(plan.folder):
            write_report(plan, command, machine)
    finally:
        signals.close()
        locks.close()
    return code
