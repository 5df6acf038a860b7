"""Makes the missing data shards of a run, starts the ranks of this node, and starts them again after a failure.
`one_node.check_node` has passed before."""

import argparse
from pathlib import Path

from glm46.compute.distributed.environment import share_cores, variables_that_are_set
from glm46.config.errors import UserError
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED
from glm46.files.standard_output import print_line
from glm46.operate.launch.next_commands import describe_next
from glm46.operate.launch.one_node import ReadyNode
from glm46.operate.launch.process_end import started_ranks
from glm46.operate.launch.rendezvous import (
    rendezvous_options,
    reporting_missing_nodes,
    require_free_port,
    wait_for_first,
)
from glm46.operate.launch.restarts import MAX_ABSENCE_SECONDS, SavedSteps, hung_hosts, keep_running
from glm46.operate.launch.torchrun import EXIT_USER_ERROR, End, LauncherSignals, run_ranks
from glm46.run.plan import Plan
from glm46.storage.data.corpus import check_epochs, describe_sources
from glm46.storage.huggingface.hub import local_inputs
from glm46.storage.prepare.pipeline import prepare_run


def run_node(ready: ReadyNode, arguments: argparse.Namespace, signals: LauncherSignals, saved: SavedSteps) -> int:
    """Train on this node, with restarts; returns the exit code of the last start."""
    nodes = ready.nodes

    def start(number: int, times: StartTimes) -> End:
        saved.wait_for_storage(MAX_ABSENCE_SECONDS, print_line)
        end = _start_ranks(ready, arguments, signals, number, times)
        # Of several nodes another one may have received the signal. This one alone would wait for it; the job system
        # starts all nodes again.
        is_stopped = nodes.count > 1 and end.code == EXIT_STOPPED
        return end._replace(is_final=end.is_final or is_stopped)

    end = End(EXIT_USER_ERROR)
    try:
        with saved.watched():
            if nodes.rank == 0:
                _prepare(ready.plan)
            number_of_start = arguments.from_hostfile
            if number_of_start is not None:  # `launch_hosts` counts the starts, and repeats this command
                end = start(number_of_start, StartTimes.inherited(variables_that_are_set([START_TIMES])))
            else:
                end = keep_running(start, saved.newest, arguments.max_restarts)
        if end.code == 0 and nodes.rank == 0:
            print(describe_next(ready.plan, ready.typed))
        return end.code
    finally:
        if nodes.rank == 0:
            is_hung = end.code == EXIT_HANG and nodes.count > 1
            saved.write_job_state(hung_hosts(Path(ready.plan.config.job.dump_folder)) if is_hung else ())


def _start_ranks(
    ready: ReadyNode, arguments: argparse.Namespace, signals: LauncherSignals, number: int, times: StartTimes
) -> End:
    """Start the ranks of this node for the n-th time, counted from 0, and wait for their end."""
    nodes = ready.nodes
    share_cores(ready.machine.cores, ready.processes)
    require_free_port(nodes, number)
    wait_for_first(nodes, number, print_line)
    with reporting_missing_nodes(nodes, lambda: bool(started_ranks()), print_line):
        options = rendezvous_options(nodes, ready.processes, number)
        command = ["train", "--config", str(arguments.config), *ready.rank_overrides]
        return run_ranks(options, command, signals, times)


def _prepare(plan: Plan) -> None:
    """Make the missing shards, and refuse a config that would read a source too often, after printing how often each
    is read. The other nodes wait at the rendezvous and then find the shards in the same place."""
    manifests = prepare_run(plan, report=print_line, local_inputs=local_inputs)
    try:
        check_epochs(plan, manifests)
    except UserError:
        print("\n".join(describe_sources(plan, manifests)), flush=True)
        raise
