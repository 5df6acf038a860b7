"""Preflight: checks of each host, then checks by all ranks, which torchrun starts, and the verdict on all hosts."""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from glm46.compute.distributed.environment import (
    share_cores,
    variables_that_are_set,
    variables_that_begin,
    visible_gpus,
)
from glm46.config.check import check_config
from glm46.config.loader import dump_config
from glm46.config.parallelism import ParallelismConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import code_before_training
from glm46.operate.cluster.equal_hosts import host_facts
from glm46.operate.cluster.gpu import GPU_CHECKS
from glm46.operate.cluster.host import HOST_CHECKS
from glm46.operate.cluster.network import NETWORK_CHECKS
from glm46.operate.cluster.recovery import RECOVERY_CHECKS
from glm46.operate.cluster.report import as_json, from_json, print_table
from glm46.operate.cluster.results import FAIL, SKIP, Result, Subject, run_checks, worst
from glm46.operate.cluster.storage import STORAGE_CHECKS
from glm46.operate.estimate.machine import Machine, detect_machine, processes_of_node
from glm46.operate.estimate.requirement import judge_config
from glm46.operate.launch.hostfile import read_hostfile, refuse_hosts
from glm46.operate.launch.launch_hosts import unreachable
from glm46.operate.launch.nodes import LAST_PORT, VARIABLES, Nodes
from glm46.operate.launch.rendezvous import refuse_ports, rendezvous_options
from glm46.operate.launch.ssh_hosts import PASSED_VARIABLES, in_this_folder, module_words, place_variables, run_on_hosts
from glm46.operate.launch.torchrun import End, LauncherSignals, run_ranks
from glm46.run.plan import Plan, resolve_plan

EXIT_FAIL = 1
"""Exit code of a preflight with a FAIL."""
STANDARD_OUTPUT = Path("-")
HOST_FILE = "host.json"
"""Results and facts of a host, which its first rank reads."""
RESULTS_FILE = "results.jsonl"
"""Results of the other hosts and of the group, which rank 0 writes after each check."""
RANK_SECONDS = {False: 120, True: 600}
"""Time for all checks by the ranks, after which the system ends them; the key is True for a full preflight."""
_CHECK_SECONDS = {False: 15.0, True: 300.0}
"""Time for each check of a host."""
_MEET_SECONDS = {False: 60, True: 900}
"""Time for the slowest host after the first one is ready."""
_END_SECONDS = 60
"""Time for the ranks to exit after they were killed."""
_HOSTS_SECONDS = {False: 360.0, True: 3600.0}
"""Time for a preflight over ssh. Its checks end earlier; this is for lost hosts."""
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_")
_LOG_COLUMNS = 150
_RESTARTS = 10
"""Number of restarts whose ports are checked; each restart takes the next port."""


@dataclass
class Preflight:
    """A preflight on one host, which starts the ranks of this host; the first host shows the results of all."""

    arguments: argparse.Namespace
    overrides: tuple[str, ...]
    config: RunConfig | None
    nodes: Nodes

    def run(self) -> int:
        """Check this host, then all hosts by their ranks; return the exit code."""
        began = time.monotonic()
        subject = self._subject()
        name = socket.gethostname()
        host = f"{name} (node {self.nodes.rank})" if self.nodes.count > 1 else name
        results = [result._replace(host=host) for result in self._host_results(subject)]
        if self.arguments.local:
            results.append(Result("ranks", SKIP, "--local starts none"))
            return show_results(self.arguments, results, time.monotonic() - began)
        facts = host_facts(subject, dump_config(self.config) if self.config is not None else "")
        with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
            content = {"host": host, "facts": facts, "results": [result._asdict() for result in results]}
            (Path(folder) / HOST_FILE).write_text(json.dumps(content))

            def give_up(*_: object) -> None:
                """Show what is known and exit at once: ranks that cannot be killed must not hold this process."""
                fault = _rank_fault(f"the ranks did not end within {self._rank_seconds()} s")
                show_results(self.arguments, [*results, *_group_results(folder), fault], time.monotonic() - began)
                sys.stdout.flush()
                os._exit(EXIT_FAIL)

            signal.signal(signal.SIGALRM, give_up)
            with closing(LauncherSignals()) as signals:
                end = self._run_ranks(subject, folder, signals)
            if signals.number is not None:
                return end.code or code_before_training(signals.number)
            results += _group_results(folder)
        if end.code:
            results.append(_rank_fault(end.cause or f"exit code {end.code}"))
        if self.nodes.rank == 0 or end.code:
            return show_results(self.arguments, results, time.monotonic() - began)
        return EXIT_FAIL if worst(results) == FAIL else 0

    def _subject(self) -> Subject:
        machine = detect_machine(visible_gpus(), nodes=self.nodes.count)
        processes = self.processes(machine)
        exporter = self.config.metrics.prometheus_port if self.config is not None else None
        ports: dict[str, int] = {}
        if self.nodes.count > 1:
            first = self.nodes.port
            refuse_ports(self.nodes, 0, exporter)
            last = min(first + _RESTARTS, LAST_PORT)
            ports = {f"MASTER_PORT + {port - first}": port for port in range(first + 1, last + 1)}
            ports = {"MASTER_PORT": first} | ports
        if exporter is not None:
            ports["metrics.prometheus_port"] = exporter
        return Subject(
            machine=machine,
            processes=processes,
            plan=None if self.config is None else plan_for(self.config, processes * self.nodes.count),
            node=self.nodes.rank,
            nodes=self.nodes.count,
            address=self.nodes.host,
            ports=ports,
            variables=variables_that_begin(*_VARIABLES),
            is_full=self.arguments.full,
        )

    def processes(self, machine: Machine) -> int:
        """Return the number of ranks of each host.

        If this machine cannot train the run, which `launch` refuses, it is the number of ranks for its devices.
        """
        requested = self.arguments.nproc or self.nodes.processes
        parallelism = ParallelismConfig()
        if self.config is not None and requested is None and judge_config(self.config, machine, None).fits:
            parallelism = self.config.parallelism
        return requested or processes_of_node(parallelism, machine)

    def _host_results(self, subject: Subject) -> list[Result]:
        # Imported here: it loads torch, which a config with faults does not need.
        from glm46.operate.cluster.run_files import RUN_CHECKS

        plan_checks = RUN_CHECKS if subject.plan is not None else {}
        checks = HOST_CHECKS | GPU_CHECKS | NETWORK_CHECKS | STORAGE_CHECKS | plan_checks | RECOVERY_CHECKS
        return run_checks(subject, checks, _CHECK_SECONDS[self.arguments.full])

    def _run_ranks(self, subject: Subject, folder: str, signals: LauncherSignals) -> End:
        is_full = self.arguments.full
        share_cores(subject.machine.cores, subject.processes)
        options = ["--ranks-folder", folder]
        options += ["--full"] if is_full else []
        options += ["--config", str(self.arguments.config), *self.overrides] if self.config is not None else []
        rendezvous = rendezvous_options(self.nodes, subject.processes, 0)
        # A run waits longer, for nodes that prepare data; all nodes of a preflight are ready.
        rendezvous += [f"--rdzv-conf=timeout={_MEET_SECONDS[is_full]}"] if self.nodes.count > 1 else []
        signal.alarm(self._rank_seconds())
        try:
            return run_ranks(rendezvous, ["preflight", *options], signals, StartTimes("the command"))
        finally:
            signal.alarm(0)

    def _rank_seconds(self) -> int:
        """Return the time after which this process no longer waits for its ranks."""
        is_full = self.arguments.full
        return _MEET_SECONDS[is_full] + RANK_SECONDS[is_full] + _END_SECONDS


def _rank_fault(cause: str) -> Result:
    remedy = "look at the output above, then at the host: dmesg, GPU, network; preflight it alone"
    return Result("ranks", FAIL, cause, "all come to their end", remedy)


def _group_results(folder: str) -> list[Result]:
    """Return the results that rank 0 has written so far; on the other hosts there are none."""
    file = Path(folder) / RESULTS_FILE
    if not file.is_file():
        return []
    # The last line is cut off if rank 0 was killed while it wrote.
    return [Result(**json.loads(line)) for line in file.read_text().splitlines() if line.endswith("}")]


def over_ssh(arguments: argparse.Namespace, overrides: tuple[str, ...]) -> int:
    """Run a preflight on the hosts of a hostfile from this host; return the exit code. Hosts that cannot be reached are
    results, and the others are checked without them."""
    began = time.monotonic()
    hosts = read_hostfile(arguments.hostfile)
    refuse_hosts(hosts, arguments.nproc, variables_that_are_set(VARIABLES), arguments.hostfile)
    faults = unreachable(hosts)
    remedy = "correct it, or take the host out of the hostfile"
    results = [Result("ssh", FAIL, fault, "an answer", remedy, host) for host, fault in faults.items()]
    reached = [host for host in hosts if host.name not in faults]
    if reached:
        options = ["preflight", "--json", "-", "--nproc", str(hosts[0].slots or arguments.nproc or "auto")]
        options += ["--full"] if arguments.full else []
        options += ["--config", str(arguments.config), *overrides] if arguments.config is not None else []
        variables = variables_that_begin(*PASSED_VARIABLES)
        node_places = place_variables(reached, variables)
        commands = [in_this_folder(module_words({**variables, **place}, options)) for place in node_places]
        answers = run_on_hosts(reached, commands, _HOSTS_SECONDS[arguments.full], at_once=len(reached))
        for number, (host, answer) in enumerate(zip(reached, answers, strict=True)):
            # The first host has the results of all. The others print theirs if their ranks failed: then they may have
            # never met the first host.
            shown = {result.host for result in results}
            lines = (answer.output + answer.errors).strip().splitlines()
            reports = [line for line in lines if line.startswith('{"preflight"')]
            if reports:
                results += [result for result in from_json(reports[-1]) if number == 0 or result.host not in shown]
            has_results = any(result.host.endswith(f"(node {number})") for result in results)
            if not has_results and not (number == 0 and reports):
                value = "; ".join(lines[-3:]) or "no output"
                results.append(Result("preflight", FAIL, value, "results", "look at this host", host.name))
    return show_results(arguments, results, time.monotonic() - began)


def show_results(arguments: argparse.Namespace, results: Sequence[Result], seconds: float) -> int:
    """Print and write all results; return the exit code."""
    line = as_json(results, seconds)
    if arguments.json == STANDARD_OUTPUT:
        print(line, flush=True)
    else:
        if arguments.json is not None:
            arguments.json.write_text(line + "\n")
        width = None if sys.stdout.isatty() else _LOG_COLUMNS
        print_table(results, seconds, Console(highlight=False, width=width))
    return EXIT_FAIL if worst(results) == FAIL else 0


def plan_for(config: RunConfig, world_size: int) -> Plan:
    """Return the plan of a config on these ranks; if they do not fit, on the fewest ranks that its degrees allow."""
    faults = check_config(config, world_size=world_size)
    return resolve_plan(config, None if faults else world_size)
