"""``launch --hostfile``: the command ``launch`` on each host of a file, through ssh, and again after a failure.

The launchers of the hosts meet as if a job system had started them. When one launcher ends, all end.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from glm46.compute.distributed.environment import variables_that_are_set, variables_that_begin
from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import (
    EXIT_HANG,
    EXIT_STOPPED,
    REPEAT_SECONDS,
    SIGNALS,
    SignalListener,
    code_before_training,
)
from glm46.operate.launch.hostfile import Host, read_hostfile, refuse_hosts
from glm46.operate.launch.nodes import VARIABLES
from glm46.operate.launch.one_node import load_run
from glm46.operate.launch.process_end import EXIT_BROKEN_PIPE
from glm46.operate.launch.restarts import MAX_ABSENCE_SECONDS, SavedSteps, hung_hosts, keep_running, known_step
from glm46.operate.launch.ssh_hosts import (
    NOT_CONNECTED,
    PASSED_VARIABLES,
    HostEnd,
    HostProcesses,
    client_words,
    in_this_folder,
    module_words,
    place_variables,
    reach_command,
    run_on_hosts,
    stoppable,
)
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK, SAVE_SECONDS, End

_PROBE_SECONDS = 20.0
"""Time for the answer of each host before a start."""
_FOLLOW_SECONDS = 30.0
"""Time for the other hosts to end by themselves after one has failed; after a signal, in addition to the save."""
_POLL_SECONDS = 0.5
_KILL_SECONDS = 10.0
"""Time for the clients to end after their launchers and ranks were sent SIGKILL."""


def launch_hosts(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train on all hosts of a hostfile. Faults that show without the hosts are raised before any host is reached.

    Returns:
        0, or the exit code of the host that failed first in the last start.

    Raises:
        UserError: hostfile or config have faults, or hosts cannot be reached.
    """
    hosts = read_hostfile(arguments.hostfile)
    refuse_hosts(hosts, arguments.nproc, variables_that_are_set(VARIABLES), arguments.hostfile)
    processes = hosts[0].slots or arguments.nproc
    config = load_run(arguments, overrides, None)
    if processes is not None and check_config(config, world_size=processes * len(hosts)):
        load_run(arguments, overrides, processes * len(hosts))  # raises the faults, with their origin
    if faults := unreachable(hosts):
        raise UserError(*faults.values())
    saved = SavedSteps(config, known_step())
    options = ["--config", str(arguments.config), "--nproc", str(processes or "auto")]
    options += ["--hostfile", str(arguments.hostfile), "--max-restarts", str(arguments.max_restarts)]
    lost = list[str]()

    def start(number: int, times: StartTimes) -> End:
        saved.wait_for_storage(MAX_ABSENCE_SECONDS, lambda line: print(line, flush=True))
        faults = unreachable(hosts) if number > 0 else {}
        if faults:
            print(*(f"error: {fault}" for fault in faults.values()), sep="\n", file=sys.stderr, flush=True)
            lost[:] = list(faults)  # their names
            return End(EXIT_FAILED_RANK, is_final=True)
        place_options = ["--from-hostfile", str(number), "--known-step", str(saved.newest())]
        run = HostRun(hosts, ["launch", *options, *overrides, *place_options], times)
        end = run.wait()
        lost[:] = run.lost
        return end

    end = End(EXIT_FAILED_RANK)
    try:
        with saved.watched():
            end = keep_running(start, saved.newest, arguments.max_restarts)
        return end.code
    finally:
        is_hang = end.code == EXIT_HANG
        saved.write_job_state(hung_hosts(Path(config.job.dump_folder)) if is_hang and not lost else lost)


def unreachable(hosts: Sequence[Host]) -> dict[str, str]:
    """Find hosts that ssh does not reach, or that lack this folder or this Python; returns their names and faults."""
    command = in_this_folder(f"test -x {shlex.quote(sys.executable)}")
    answers = run_on_hosts(hosts, [command] * len(hosts), _PROBE_SECONDS, at_once=len(hosts))
    faults = {}
    for host, answer in zip(hosts, answers, strict=True):
        if answer.code in (None, NOT_CONNECTED):
            remedy = f"`{reach_command(host)}` must succeed"
            faults[host.name] = f"{host.name}: cannot be reached: {answer.reason()}; {remedy}"
        elif answer.code != 0:
            needed = f"the folder {Path.cwd()}, this checkout and {sys.executable}"
            remedy = f"{needed} must be at the same places on all nodes"
            faults[host.name] = f"{host.name}: the launcher cannot run there: {answer.reason()}; {remedy}"
    return faults


class HostRun:
    """One start of a command on all hosts.

    Args:
        arguments: words after ``python -m glm46``.
        times: times of this start, which the ranks report.

    Attributes:
        lost: names of hosts whose connection was lost.
    """

    def __init__(self, hosts: Sequence[Host], arguments: Sequence[str], times: StartTimes):
        self.lost = list[str]()
        self._hosts = hosts
        variables = variables_that_begin(*PASSED_VARIABLES)
        commands = []
        for host, place in zip(hosts, place_variables(hosts, variables), strict=True):
            command = module_words({**variables, **place, START_TIMES: times.to_text()}, arguments)
            commands.append((host.name, client_words(host, stoppable(command, SAVE_SECONDS))))
        self._signal_number: int | None = None
        self._signalled_at = 0.0
        self._failed_at: float | None = None
        self._deadline = float("inf")
        self._is_killed = False
        self._is_cut_off = False
        self._has_started = False
        self._listener = SignalListener(self._on_signal, (*SIGNALS, signal.SIGQUIT))
        try:
            self._processes = HostProcesses(commands, SAVE_SECONDS)
        except BaseException:
            self._listener.restore()
            raise
        self._has_started = True
        if self._signal_number is not None:  # it came while the clients started
            self._processes.send(self._signal_number)

    def wait(self) -> End:
        """Wait until the command has ended on all hosts, and return the end of the start."""
        codes = list[int]()
        try:
            with closing(self._processes):
                while len(codes) < len(self._hosts):
                    end = self._next_end()
                    if end is not None:
                        codes.append(self._code_of(end, is_first=not codes))
                    elif time.monotonic() >= self._deadline:
                        self._take_measure()
        finally:
            self._listener.restore()
        failed = [code for code in codes if code not in (0, EXIT_STOPPED)]
        code = failed[0] if failed else max(codes)
        if self._is_cut_off:
            return End(EXIT_BROKEN_PIPE, is_final=True)
        if self._signal_number is not None:
            is_lost_by_signal = code in (EXIT_FAILED_RANK, EXIT_HANG)
            return End(code_before_training(self._signal_number) if is_lost_by_signal else code, is_final=True)
        return End(code, f"a node ended with exit code {code}", failed_at=self._failed_at)

    def _next_end(self) -> HostEnd | None:
        try:
            return self._processes.next_end(time.monotonic() + _POLL_SECONDS)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._is_cut_off = True
            self._deadline = min(self._deadline, time.monotonic() + _FOLLOW_SECONDS + SAVE_SECONDS)
            self._processes.send(signal.SIGTERM)
            return None

    def _code_of(self, end: HostEnd, *, is_first: bool) -> int:
        """Return the exit code of a host. The first host that ends decides how long the others may run."""
        is_lost = end.code < 0 or end.code == NOT_CONNECTED
        name = self._hosts[end.command_index].name
        if is_lost and not self._is_killed:
            self.lost.append(name)
        if is_first and self._signal_number is None and not self._is_cut_off:
            if end.code in (0, EXIT_STOPPED):
                self._deadline = time.monotonic() + SAVE_SECONDS
            else:
                reason = "the connection was lost" if is_lost else f"ended with exit code {end.code}"
                print(f"error: {name}: {reason}; all nodes are stopped", file=sys.stderr, flush=True)
                self._failed_at = time.time()
                self._deadline = time.monotonic() + _FOLLOW_SECONDS
                self._processes.send(signal.SIGTERM)
        is_killed_there = end.code > 128 and self._signal_number is None
        return EXIT_FAILED_RANK if is_lost or is_killed_there else end.code

    def _take_measure(self) -> None:
        """Kill the launchers and ranks of the hosts that have not ended; at the second call, their clients."""
        if self._is_killed:
            self._processes.disconnect()
            self._deadline = float("inf")
            return
        self._is_killed = True
        self._processes.send(signal.SIGKILL)
        self._deadline = time.monotonic() + _KILL_SECONDS

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        is_repeated = self._signal_number is not None
        if is_repeated and now - self._signalled_at <= REPEAT_SECONDS:
            return
        # The launchers distinguish a first signal from a second, and kill ranks that do not end in time.
        self._signal_number = number
        self._signalled_at = now
        self._deadline = min(self._deadline, now + _FOLLOW_SECONDS + (0 if is_repeated else SAVE_SECONDS))
        if self._has_started:
            self._processes.send(number)
