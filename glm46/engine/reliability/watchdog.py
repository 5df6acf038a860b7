"""Watchdog: finds a hung rank, names it, saves the stacks and flight recorder of every rank, and ends the run.

A hang raises no error: one rank sleeps, spins or is stopped, and all others wait for it in a collective, until the
timeout of the process group or forever. A thread of each rank watches the progress of its training. The first one that
finds no progress sets an alarm in the store of the process group; then every rank reports its state there.
"""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from glm46.compat import clone_store
from glm46.compute.distributed.process import Process
from glm46.engine.reliability.alarm import Alarm
from glm46.engine.reliability.hang_report import collectives_here, describe_hang, find_culprits
from glm46.engine.reliability.stack_frames import innermost_frames
from glm46.engine.reliability.stop import EXIT_HANG
from glm46.engine.reliability.verdict import VERDICT_FILE, write_verdict
from glm46.files.threads import start_daemon

_TICK_SECONDS = 0.25
_ASK_SECONDS = 1.0
"""Time between two checks of the alarm in the store, by a rank that makes progress."""
_STORE_SECONDS = 30.0
"""Time without an answer from the store after which a rank ends: it cannot know whether the others still run."""
_CALL_SECONDS = 2.0
"""Longest wait for one call that may hang: to the store, or to a file on an unreachable network disk."""
_LIMIT_PER_P95 = 5.0
_TIMED_STEPS = 20
"""Number of timed steps before their times set the limit; until then the limit of the start applies."""
_WARM_UP_STEPS = 2
"""Number of first steps that are not timed: they compile and fill caches."""
_ANSWER_SECONDS = 2.0
"""Time for ranks to answer an alarm: a check of the store, some ticks, and delays of a busy machine."""
_LINGER_SECONDS = 0.4
"""Time for which the first rank outlives the others, because its process may serve their store."""
_PATIENCE_SECONDS = 15.0
"""This process ends within this time after an alarm, whatever else hangs."""
_AWAKE_SECONDS = 0.5
"""Time that a stopped rank has to write its stacks before it is killed."""

_Result = TypeVar("_Result")


class Watchdog:
    """Watches this rank; ends the process with `EXIT_HANG` when some rank hangs. Its construction is collective.

    Args:
        folder: folder for stacks and flight recorders, with one file for each rank.
        shortest_seconds: lower bound of the limit; 0 disables the watchdog.
        start_seconds: the limit until enough steps are timed; afterwards the upper bound of the limit.
    """

    def __init__(self, process: Process, folder: Path, *, shortest_seconds: float, start_seconds: float):
        self._process = process
        self._folder = folder
        self._shortest = shortest_seconds
        self._start_limit = start_seconds
        self._operation = "starting"
        self._step = 0
        self._since = time.monotonic()  # of the last progress
        self._is_watched = False
        self._times: deque[float] = deque(maxlen=1000)
        self._size: tuple[int, ...] = ()
        self._steps_seen = 0
        self._step_began = time.monotonic()
        self._main_thread = threading.main_thread().ident or 0
        self._closed = threading.Event()
        self._answered_at = time.monotonic()  # by the store
        self._has_alarm = False
        if not shortest_seconds:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if process.is_main:
            (folder / VERDICT_FILE).unlink(missing_ok=True)  # from an earlier start
        self._stacks_path = folder / f"stacks-rank{process.rank}.txt"
        self._stacks = self._stacks_path.open("w")
        # Runs in C, without the interpreter: works even if a thread never releases the GIL.
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
        self._alarm = Alarm(clone_store(), process.rank, process.world_size) if process.world_size > 1 else None
        if self._alarm is not None:
            start_daemon(partial(self._listen, self._alarm), "alarm")
        self._thread = start_daemon(self._watch, "watchdog")

    def step_begins(self, step: int) -> None:
        """Start a step, and end the timing of the previous one."""
        now = time.monotonic()
        if self._is_watched:
            self._steps_seen += 1
            if self._steps_seen > _WARM_UP_STEPS:
                self._times.append(now - self._step_began)
        self._step_began = now
        self._step = step
        self.operation("reading data")
        self._is_watched = True

    def operation(self, name: str, size: tuple[int, ...] | None = None) -> None:
        """Set the current operation. A step of another size may compile again, so it discards the measured times."""
        self._operation = name
        self._since = time.monotonic()
        if size not in (None, self._size):
            self._size = size
            self._steps_seen = 0
            self._times.clear()

    @contextmanager
    def unwatched(self, name: str) -> Iterator[None]:
        """Suspend the watchdog for work of unknown duration: validation, saves."""
        began = time.monotonic()
        self._is_watched = False
        self._operation = name
        yield
        self._step_began += time.monotonic() - began
        self._since = time.monotonic()
        self._is_watched = True

    def check_store(self) -> None:
        """End this rank if the store does not answer. Call it in the handler of an error.

        Ranks that cannot reach the store end one by one, and each breaks the connections of the others. A rank that
        gets such an error before its own time limit ends with the same code, so that the launcher restarts the run.
        """
        if self._shortest and self._alarm is not None and _within(_CALL_SECONDS, self._alarm.is_set) is None:
            traceback.print_exc()
            self._end_alone(time.monotonic() - self._answered_at)

    def limit_seconds(self) -> float:
        """Return the time without progress that counts as a hang: five times the 95th percentile of the last step
        times.

        A percentile, because one step in twenty may contain an outage that the run survived, which must not raise the
        limit. The limit stays between `shortest_seconds` and `start_seconds`.
        """
        if len(self._times) < _TIMED_STEPS:
            return max(self._start_limit, self._shortest)
        times = sorted(self._times)
        limit = _LIMIT_PER_P95 * times[math.ceil(0.95 * len(times)) - 1]
        return max(min(limit, self._start_limit), self._shortest)

    def close(self) -> None:
        """Stop watching."""
        self._is_watched = False
        if self._shortest and not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()
            with contextlib.suppress(OSError):  # the storage does not answer, or the dump folder was deleted
                if self._stacks_path.stat().st_size == 0:
                    self._stacks_path.unlink()
                self._folder.rmdir()  # unless another rank has stacks in it

    def _listen(self, alarm: Alarm) -> None:
        """Check the store for an alarm, in a separate thread: a call to an unreachable store has no time limit."""
        while not self._closed.wait(self._ask_seconds()):
            with contextlib.suppress(RuntimeError):  # a broken connection counts as no answer
                self._has_alarm = alarm.is_set()
                self._answered_at = time.monotonic()

    def _ask_seconds(self) -> float:
        """Return the time to the next check: shorter if this rank may soon count as hung, as an alarm is likely."""
        is_late = self._is_watched and time.monotonic() - self._since > self._shortest / 2
        return _ASK_SECONDS / 4 if is_late else _ASK_SECONDS

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_TICK_SECONDS):
            now = time.monotonic()
            # Time in which this thread did not run does not count: the machine or the run was suspended.
            pause = max(now - last - 4 * _TICK_SECONDS, 0.0)
            self._since = self._since + pause
            self._answered_at = self._answered_at + pause
            last = now
            is_hung = self._is_watched and now - self._since > self.limit_seconds()
            if self._has_alarm or is_hung:
                self._end_run(now - self._since)
            if self._alarm is not None and now - self._answered_at > _STORE_SECONDS:
                self._end_alone(now - self._answered_at)

    def _end_alone(self, seconds: float) -> None:
        """End this rank, which cannot reach the store."""
        self._end_for_sure()
        rank = self._process.rank
        host = socket.gethostname()
        print(
            f"error: rank {rank} on {host} has had no answer from the store of the run for {seconds:.0f} s, at step "
            f"{self._step}: the first node or the network to it has failed. This rank ends",
            file=sys.stderr,
            flush=True,
        )
        _within(_CALL_SECONDS, self._keep_stacks)
        os._exit(EXIT_HANG)

    def _end_for_sure(self) -> None:
        """Make sure that the process ends, even if a later call hangs, or the interpreter is blocked (second timer)."""

        def give_up() -> None:
            time.sleep(_PATIENCE_SECONDS)
            # os.write instead of print: the report may hold the lock of print, and the reader of the output may be
            # stopped.
            text = f"error: rank {self._process.rank} ends, {_PATIENCE_SECONDS:.0f} s after the alarm\n"
            _within(_CALL_SECONDS, os.write, 2, text.encode())
            os._exit(EXIT_HANG)

        start_daemon(give_up, "end")
        faulthandler.dump_traceback_later(_PATIENCE_SECONDS + 1.0, exit=True, file=self._stacks)

    def _keep_stacks(self) -> None:
        # Faulthandler blocks the interpreter while it writes, and the disk of the folder may not answer: write to a
        # local file first.
        with tempfile.TemporaryFile() as local:
            faulthandler.dump_traceback(local, all_threads=True)
            local.seek(0)
            stacks = local.read()
        os.write(self._stacks.fileno(), stacks)

    def _end_run(self, stalled_seconds: float) -> None:
        self._end_for_sure()
        rank = self._process.rank
        size = self._process.world_size
        alarm = self._alarm
        if alarm is not None and _within(_CALL_SECONDS, alarm.is_reported):
            time.sleep(2 * _AWAKE_SECONDS)  # this rank was the hung one; its peers have reported it and kill it
            os._exit(EXIT_HANG)
        recorded, recorders = _within(_CALL_SECONDS, collectives_here) or ({"collectives": {}}, "")
        answer = {
            "operation": self._operation,
            "step": self._step,
            "stack": innermost_frames(sys._current_frames().get(self._main_thread)),
            **recorded,
        }
        local_answer = {rank: answer}, {rank: (socket.gethostname(), os.getpid())}
        end_of_answers = time.monotonic() + _ANSWER_SECONDS
        # Answer before writing files to a disk that may be slow: the other ranks wait for the answer.
        num_answers = _within(_CALL_SECONDS, alarm.answer, answer) if alarm is not None else None
        _within(_CALL_SECONDS, self._keep_stacks)
        if recorders:
            _within(_CALL_SECONDS, (self._folder / f"flight-rank{rank}.json").write_text, recorders)
        answers_of_all = None
        hung = None
        if alarm is not None and num_answers == 1:  # the first rank that answers reports
            answers_of_all = _within(_ANSWER_SECONDS + _CALL_SECONDS, alarm.answers, end_of_answers)
        elif alarm is not None and num_answers:  # the reporter may first wait for its disk
            extra_seconds = 2 * _CALL_SECONDS
            hung = _within(
                _ANSWER_SECONDS + extra_seconds + _CALL_SECONDS, alarm.hung_here, end_of_answers + extra_seconds
            )
        if hung is None:
            answers, processes = answers_of_all or local_answer
            hosts = {member: host for member, (host, _) in processes.items()}
            culprits = find_culprits(answers, size)
            text = describe_hang(answers, culprits, hosts, stalled_seconds, str(self._folder))
            print(f"error: {text}", file=sys.stderr, flush=True)
            silent = [processes[silent_rank] for silent_rank in processes.keys() - answers.keys()]
            if alarm is not None and answers_of_all:
                _within(_CALL_SECONDS, alarm.report, silent)
                hung = _within(_CALL_SECONDS, alarm.hung_here, end_of_answers)
            _within(_CALL_SECONDS, (self._folder / "hang.txt").write_text, text + "\n")
            if answers_of_all or size == 1:  # without the store, a rank cannot know which other rank hung
                # If most ranks are culprits, no host is named: the cause is then rather outside, such as a switch.
                named = culprits if 2 * len(culprits) <= size or size == 1 else []
                _within(_CALL_SECONDS, write_verdict, self._folder, named, hosts, self._step)
        _kill(hung or [])
        if self._alarm is not None:
            time.sleep(0.1 if rank else _LINGER_SECONDS)  # the first rank may hold the store: it ends last
        os._exit(EXIT_HANG)


def _within(seconds: float, call: Callable[..., _Result], *arguments: object) -> _Result | None:
    """Return the result of a call that may hang, made in a separate thread; None after the time limit, or if the store
    or the disk fails."""
    results = []

    def work() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            results.append(call(*arguments))

    start_daemon(work, "call").join(seconds)
    return results[0] if results else None


def _kill(hung: Collection[int]) -> None:
    """Let hung ranks on this host write their stacks, and kill them: SIGTERM does not end a stopped rank, for which
    torchrun would wait."""
    for number in (signal.SIGUSR2, signal.SIGCONT, signal.SIGKILL) if hung else ():
        for process_id in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)
        if number == signal.SIGCONT:
            time.sleep(_AWAKE_SECONDS)
