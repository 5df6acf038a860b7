"""The launcher of a preflight: checks of this host, then checks by all ranks, which torchrun starts, and one table."""

import argparse
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from glm46.compute.distributed.environment import share_cores, variables_that_are_set, visible_gpus
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import load_config
from glm46.config.parallelism import ParallelismConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import code_before_training
from glm46.operate.cluster.gpu import gpus
from glm46.operate.cluster.host import clock, infiniband, limits, nccl_variables, ports
from glm46.operate.cluster.rank import RESULTS_FILE, run_rank
from glm46.operate.cluster.recovery import recovery
from glm46.operate.cluster.results import (
    EXIT_FAIL,
    FAIL,
    Defect,
    Result,
    from_json,
    judge,
    run_check,
    show_results,
    worst,
    write_results,
)
from glm46.operate.estimate.machine import Machine, detect_machine, processes_of_node
from glm46.operate.estimate.requirement import judge_config
from glm46.operate.launch.nodes import LAST_PORT, VARIABLES, Nodes, detect_nodes
from glm46.operate.launch.rendezvous import refuse_ports, rendezvous_options
from glm46.operate.launch.torchrun import LauncherSignals, run_ranks

_MEET_SECONDS = {False: 60, True: 900}
"""Time for the slowest host after the first one is ready; the key is True for a full preflight."""
_RECOVERY_RANKS = 2
_RESTARTS = 10
"""Number of restarts whose ports are checked; each restart takes the next port."""


def preflight(arguments: argparse.Namespace, overrides: tuple[str, ...], config: RunConfig | None) -> int:
    """Check this host, then all hosts by their ranks; the first host shows the results of all. Return the exit code.

    Raises:
        UserError: the exporter has a port at which ranks meet.
    """
    if arguments.ranks_folder is not None:
        return run_rank(arguments, config)
    began = time.monotonic()
    nodes = Nodes() if arguments.local else detect_nodes(variables_that_are_set(VARIABLES), socket.gethostname())
    machine = detect_machine(visible_gpus(), nodes=nodes.count)
    processes = host_processes(arguments.nproc or nodes.processes, config, machine)
    host = socket.gethostname() + (f" (node {nodes.rank})" if nodes.count > 1 else "")
    checks: dict[str, Callable[[], Result]] = {
        "limits": partial(limits, machine, processes),
        "clock": clock,
        "ports": partial(ports, run_ports(config, nodes)),
        "GPUs": partial(gpus, processes),
        "InfiniBand": infiniband,
        "NCCL variables": nccl_variables,
    }
    if config is not None:
        checks["layout"] = partial(layout, arguments.config, overrides, machine, processes * nodes.count)
    if arguments.full and nodes.rank == 0:
        checks["recovery"] = partial(recovery, min(processes, _RECOVERY_RANKS), has_gpu=bool(machine.gpus))
    results = [run_check(name, check)._replace(host=host) for name, check in checks.items()]
    if arguments.local:
        return show_results(results, time.monotonic() - began, arguments.json)
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        file = Path(folder) / RESULTS_FILE
        write_results(file, results)
        share_cores(machine.cores, processes)
        command = ["preflight", "--ranks-folder", folder]
        command += ["--full"] if arguments.full else []
        command += ["--config", str(arguments.config), *overrides] if config is not None else []
        rendezvous = rendezvous_options(nodes, processes, 0)
        # A run waits longer, for nodes that prepare data; all nodes of a preflight are ready.
        rendezvous += [f"--rdzv-conf=timeout={_MEET_SECONDS[arguments.full]}"] if nodes.count > 1 else []
        with closing(LauncherSignals()) as signals:
            end = run_ranks(rendezvous, command, signals, StartTimes("the command"))
        if signals.number is not None:
            return end.code or code_before_training(signals.number)
        results = from_json(file.read_text())
    if end.code:
        remedy = "look at the output above, then at the host: dmesg, GPU, network; preflight it alone"
        results.append(Result("ranks", FAIL, end.cause or f"exit code {end.code}", "all end well", remedy, host))
    if nodes.rank == 0 or end.code:
        return show_results(results, time.monotonic() - began, arguments.json)
    return EXIT_FAIL if worst(results) == FAIL else 0


def layout(file: Path, overrides: tuple[str, ...], machine: Machine, ranks: int) -> Result:
    """Check that the degrees of the run fit this number of ranks, and its memory this machine; `launch` refuses a run
    that does not fit."""
    requirement = f"the run fits {counted(ranks, 'rank')}"
    try:
        verdict = judge_config(load_config(file, overrides, world_size=ranks), machine, ranks)
    except UserError as error:
        faults = list(error.faults)
        value = ""
    else:
        faults = verdict.faults
        value = verdict.margin
    remedy = "see plan, and change the keys, --nproc or the number of hosts"
    return judge("layout", [Defect(FAIL, fault, remedy) for fault in faults], value, requirement)


def run_ports(config: RunConfig | None, nodes: Nodes) -> dict[str, int]:
    """Return the ports that the run opens on this node, by the variable or key that sets them."""
    exporter = config.metrics.prometheus_port if config is not None else None
    if nodes.count > 1:
        refuse_ports(nodes, 0, exporter)
    if nodes.rank != 0:
        return {}
    opened = {"metrics.prometheus_port": exporter} if exporter is not None else {}
    if nodes.count > 1:
        last = min(nodes.port + _RESTARTS, LAST_PORT)
        opened["MASTER_PORT"] = nodes.port
        opened |= {f"MASTER_PORT + {port - nodes.port}": port for port in range(nodes.port + 1, last + 1)}
    return opened


def host_processes(requested: int | None, config: RunConfig | None, machine: Machine) -> int:
    """Return the number of ranks of each host.

    If this machine cannot train the run, which `launch` refuses, it is the number of ranks for its devices.
    """
    parallelism = ParallelismConfig()
    if config is not None and requested is None and judge_config(config, machine, None).fits:
        parallelism = config.parallelism
    return requested or processes_of_node(parallelism, machine)
