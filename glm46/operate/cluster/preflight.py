"""Preflight: checks of each host, checks by the ranks, and the verdict on all hosts."""

import argparse
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from glm46.compute.distributed.environment import share_cores, variables_that_begin, visible_gpus
from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.config.parallelism import ParallelismConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.operate.cluster.compare import as_json, compare_hosts, host_facts, worst
from glm46.operate.cluster.gpu import GPU_CHECKS
from glm46.operate.cluster.host import HOST_CHECKS
from glm46.operate.cluster.network import NETWORK_CHECKS
from glm46.operate.cluster.rank_files import Rows, failed_ranks, read_rows, read_stages
from glm46.operate.cluster.recovery import RECOVERY_CHECKS
from glm46.operate.cluster.results import FAIL, SKIP, HostReport, Result, Subject, run_checks, within
from glm46.operate.cluster.storage import STORAGE_CHECKS
from glm46.operate.estimate.machine import Machine, detect_machine, processes_of_node
from glm46.operate.estimate.requirement import judge_config
from glm46.operate.launch.nodes import LAST_PORT, Nodes
from glm46.operate.launch.rendezvous import refuse_ports, rendezvous_options
from glm46.operate.launch.torchrun import End, LauncherSignals, run_ranks
from glm46.run.plan import Plan, resolve_plan

EXIT_FAIL = 1
"""Exit code of a preflight with a FAIL."""
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_")
_CHECK_SECONDS = {False: 15.0, True: 300.0}
RANK_SECONDS = {False: 45, True: 300}
"""Deadlines of each check, and of all checks by the ranks; the key is True for a full preflight."""
_LOG_COLUMNS = 150
_RESTARTS = 10
"""Number of restarts whose ports are checked; each restart takes the next port."""
RESULTS_FILE = "preflight.json"
"""Name of the results in the dump folder."""
STANDARD_OUTPUT = Path("-")
_LEAVE_SECONDS = 5.0
_MEET_SECONDS = 60.0
"""Time for the slowest host after the first one is ready."""


@dataclass
class HostExamination:
    """The examination of one host, and on the first host the verdict on all."""

    arguments: argparse.Namespace
    overrides: tuple[str, ...]
    config: RunConfig | None
    nodes: Nodes

    def run(self) -> int:
        """Examine this host, meet the others, start the ranks; return the exit code."""
        began = time.monotonic()
        subject = self._subject()
        report = self._examine(subject)
        if self.arguments.local:
            return self._finish([report], [Result("ranks", SKIP, "--local starts none")], began)
        if self.nodes.count == 1:
            return self._finish([report], _judged([report], *self._start_ranks(subject), subject.processes), began)
        return self._meet(report, subject, began)

    def _meet(self, report: HostReport, subject: Subject, began: float) -> int:
        """Do `run` on several hosts, which all return the exit code of the first."""
        meeting = Meeting(self.nodes.rank, self.nodes.count, self.nodes.host, self.nodes.port)
        contents = meeting.collect("report", report.as_dict(), _MEET_SECONDS)
        reports = [self._report_of(node, content) for node, content in enumerate(contents)]
        obstacle = meeting.decide("obstacle", _obstacle(reports, contents), self.nodes.count * _MEET_SECONDS)
        end = End(EXIT_FAIL, "no answer from the first host")
        rows = dict[int, Any]()
        stages = dict[int, str]()
        if obstacle == "":
            end, rows, stages = self._start_ranks(subject)
        stages_by_host = meeting.collect("stages", stages, _MEET_SECONDS)
        code = EXIT_FAIL
        if self.nodes.rank == 0:
            stages = {int(rank): stage for host_stages in stages_by_host for rank, stage in (host_stages or {}).items()}
            if obstacle:
                group = [Result("ranks", SKIP, obstacle)]
            else:
                group = _judged(reports, end, rows, stages, subject.processes)
            code = self._finish(reports, group, began)
        code = meeting.decide("code", code, RANK_SECONDS[True])
        meeting.collect("end", True, _LEAVE_SECONDS)
        return EXIT_FAIL if code is None else code

    def _report_of(self, node: int, content: dict[str, Any] | None) -> HostReport:
        if content is not None:
            return HostReport.of(content)
        value = f"no report within {_MEET_SECONDS:.0f} s"
        remedy = f"look at its output, and whether it reaches port {self.nodes.port} of {self.nodes.host}"
        return HostReport(f"node {node}", [Result("host", FAIL, value, "answers", remedy)])

    def _subject(self) -> Subject:
        machine = detect_machine(visible_gpus(), nodes=self.nodes.count)
        processes = self._processes(machine)
        first = self.nodes.port
        exporter = self.config.metrics.prometheus_port if self.config is not None else None
        ports: dict[str, int] = {}
        if self.nodes.count > 1:
            refuse_ports(self.nodes, 1, exporter)  # the ranks of this program meet at the next port
            last = min(first + _RESTARTS, LAST_PORT)
            ports = {f"MASTER_PORT + {port - first}": port for port in range(first + 1, last + 1)}
            ports = {"MASTER_PORT": first} | ports
        if exporter is not None:
            ports["metrics.prometheus_port"] = exporter
        return Subject(
            machine=machine,
            processes=processes,
            plan=_plan_for(self.config, processes * self.nodes.count),
            node=self.nodes.rank,
            nodes=self.nodes.count,
            address=self.nodes.host,
            ports=ports,
            variables=variables_that_begin(*_VARIABLES),
            is_full=self.arguments.full,
        )

    def _processes(self, machine: Machine) -> int:
        """Return the number of ranks of each host.

        If this machine cannot train the run, which `launch` refuses, it is the number of ranks for its devices.
        """
        requested = self.arguments.nproc or self.nodes.processes
        parallelism = ParallelismConfig()
        if self.config is not None and requested is None and judge_config(self.config, machine, None).fits:
            parallelism = self.config.parallelism
        return requested or processes_of_node(parallelism, machine)

    def _examine(self, subject: Subject) -> HostReport:
        # Imported here: it loads torch, which a config with faults does not need.
        from glm46.operate.cluster.run_files import RUN_CHECKS

        plan_checks = RUN_CHECKS if subject.plan is not None else {}
        checks = HOST_CHECKS | GPU_CHECKS | NETWORK_CHECKS | STORAGE_CHECKS | plan_checks | RECOVERY_CHECKS
        results = run_checks(subject, checks, _CHECK_SECONDS[self.arguments.full])
        text = dump_config(self.config) if self.config is not None else ""
        return HostReport(socket.gethostname(), results, host_facts(subject, text))

    def _start_ranks(self, subject: Subject) -> tuple[End, Rows, dict[int, str]]:
        """Run the ranks of this host; return their end, their results, and the last stage of each rank."""
        share_cores(subject.machine.cores, subject.processes)
        with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
            options = ["--ranks-folder", folder, "--ranks-per-host", str(subject.processes)]
            options += ["--full"] if self.arguments.full else []
            options += ["--config", str(self.arguments.config), *self.overrides] if self.config is not None else []
            nodes = replace(self.nodes, port=self.nodes.port + 1)  # the meeting has the first port
            rendezvous = rendezvous_options(nodes, subject.processes, 0)
            # A run waits longer, for nodes that prepare data; all nodes of a preflight are ready.
            rendezvous += [f"--rdzv-conf=timeout={_MEET_SECONDS:.0f}"] if nodes.count > 1 else []
            signals = LauncherSignals()
            try:
                end = run_ranks(rendezvous, ["preflight", *options], signals, StartTimes("the command"))
            finally:
                signals.close()
            return end, read_rows(Path(folder)), read_stages(Path(folder))

    def _finish(self, reports: list[HostReport], group: list[Result], began: float) -> int:
        """Compare the hosts, show all results, and keep them in the dump folder; return the exit code."""
        names = Counter(report.host for report in reports)
        for node, report in enumerate(reports):
            report.host = f"{report.host} (node {node})" if names[report.host] > 1 else report.host
        compare_hosts(reports)
        seconds = time.monotonic() - began
        code = show_results(self.arguments, reports, group, seconds)
        if self.config is not None and not self.arguments.local:
            folder = Path(self.config.job.dump_folder)

            def keep() -> None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / RESULTS_FILE).write_text(as_json(reports, group, seconds) + "\n")

            with suppress(OSError):  # storage that fails or hangs is a result of its own
                within(_LEAVE_SECONDS, keep)
        return code


class Meeting:
    """An exchange between the hosts of a run, by a store on the first host, which collects reports and sends decisions.

    Raises:
        UserError: the first host does not answer, or its port is taken.
    """

    def __init__(self, node: int, nodes: int, address: str, port: int):
        import torch.distributed as dist  # a config with faults does not need it

        self.node = node
        self.nodes = nodes
        try:
            timeout = timedelta(seconds=_MEET_SECONDS)
            self._store = dist.TCPStore(address, port, is_master=node == 0, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            problem = f"port {port} of this host cannot be opened" if node == 0 else f"no answer from {address}:{port}"
            raise UserError(
                f"environment: MASTER_ADDR = {address!r}, MASTER_PORT = {port}: {problem}; start preflight on all "
                "hosts with one free port of the first"
            ) from error

    def collect(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Send a value under a name.

        Returns:
            On the first host the values of all hosts, None for a host that sent no value in time; elsewhere nothing.
        """
        self._store.set(f"{name}/{self.node}", json.dumps(value))
        if self.node:
            return []
        return [self._get(f"{name}/{node}", seconds) for node in range(self.nodes)]

    def decide(self, name: str, value: Any, seconds: float) -> Any:
        """Return the value of the first host on all hosts; None if it sends no value in time."""
        if self.node == 0:
            self._store.set(name, json.dumps(value))
            return value
        return self._get(name, seconds)

    def _get(self, key: str, seconds: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return json.loads(self._store.get(key))
        except RuntimeError:  # DistStoreError after the time, DistNetworkError without the store
            return None


def show_results(arguments: argparse.Namespace, reports: list[HostReport], group: list[Result], seconds: float) -> int:
    """Print and write all results; return the exit code."""
    from rich.console import Console

    from glm46.operate.cluster.compare import print_table

    line = as_json(reports, group, seconds)
    if arguments.json is not None and arguments.json != STANDARD_OUTPUT:
        arguments.json.write_text(line + "\n")
    width = None if sys.stdout.isatty() else _LOG_COLUMNS
    if arguments.json == STANDARD_OUTPUT:
        print(line, flush=True)
    else:
        print_table(reports, group, seconds, Console(highlight=False, width=width))
    results = [*group, *(result for report in reports for result in report.results)]
    return EXIT_FAIL if worst(results) == FAIL else 0


def _obstacle(reports: list[HostReport], contents: list[dict[str, Any] | None]) -> str:
    """Return the reason why the ranks cannot begin; empty if they can."""
    missing = [report.host for report, content in zip(reports, contents, strict=True) if content is None]
    counts = sorted({report.facts["ranks"] for report in reports if report.facts})
    if missing:
        return f"not started without {', '.join(missing)}"
    return f"not started: {' and '.join(counts)} of them on different hosts" if len(counts) > 1 else ""


def _judged(reports: list[HostReport], end: End, rows: Rows, stages: dict[int, str], processes: int) -> list[Result]:
    """Return the results of the ranks for the whole group, and add the results for one host to its report.

    Args:
        processes: ranks of each host.
    """
    failed = failed_ranks(stages, end.cause or f"exit code {end.code}", processes) if end.code else {}
    for host, report in enumerate(reports):
        report.results += [*rows.get(host, []), *failed.get(host, [])]
    return [*rows.get(-1, []), *failed.get(-1, [])]


def _plan_for(config: RunConfig | None, world_size: int) -> Plan | None:
    """Return the plan of a config on these ranks; if they do not fit, on the fewest ranks that its degrees allow."""
    if config is None:
        return None
    faults = check_config(config, world_size=world_size)
    return resolve_plan(config, None if faults else world_size)
