"""The work of ``python -m glm46 launch``: training on this node, or on all hosts of a hostfile.

A job system starts ``launch`` on each node of a run. With a hostfile, `launch_hosts` does so, once for each start.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from glm46.files.standard_output import print_line
from glm46.operate.launch.launch_hosts import launch_hosts
from glm46.operate.launch.one_node import DoesNotFit, check_node, load_run
from glm46.operate.launch.restarts import MAX_ABSENCE_SECONDS, SavedSteps, known_step
from glm46.operate.launch.torchrun import EXIT_USER_ERROR, LauncherSignals


def launch(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train a config; returns the exit code of `launch_command`."""
    if arguments.hostfile is not None and arguments.from_hostfile is None:
        return launch_hosts(arguments, overrides)
    with closing(LauncherSignals()) as signals:
        return _launch_here(arguments, overrides, signals)


def _launch_here(arguments: argparse.Namespace, overrides: Sequence[str], signals: LauncherSignals) -> int:
    saved = SavedSteps(load_run(arguments, overrides, None), max(arguments.known_step, known_step()))
    saved.wait_for_storage(MAX_ABSENCE_SECONDS, print_line)
    try:
        ready = check_node(arguments, overrides, arguments.from_hostfile or 0)
    except DoesNotFit as error:
        print(*error.faults, sep="\n", file=sys.stderr)
        return EXIT_USER_ERROR
    from glm46.operate.launch.node_run import run_node  # numpy and the readers of text: no refusal needs them

    return run_node(ready, arguments, signals, saved)
