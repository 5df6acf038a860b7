"""Finds a rank that has gone silent, names it, keeps every rank's stacks and the flight recorder, and ends the run.

A hang has no error: one rank sleeps, spins or is stopped, and all others wait in a collective for it, which ends at the
timeout of the process group or never. A thread of each rank watches that its own training goes on. The first whose
training does not raises an alarm in the store of the process group; then all tell where they are.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm46.compat import clone_store
from glm46.distributed.process import Process
from glm46.reliability.hang_report import collectives_here, describe_silence, find_culprits, place_of
from glm46.reliability.stop import EXIT_HANG

_TICK_SECONDS = 0.25
_ALARM_TICKS = 4
"""Ticks between two looks at the alarm in the store."""
_LIMIT_PER_P99 = 5.0
_TIMED_STEPS = 20
"""Steps that are timed before their times decide; until then the timeout of the start does."""
_WARM_UP_STEPS = 2
"""First steps whose time says nothing: they compile and fill caches."""
_ANSWER_SECONDS = 3.0
"""How long ranks may take to answer an alarm: some ticks, and a busy machine."""
_PATIENCE_SECONDS = 15.0
"""After an alarm this process ends within this time, whatever else hangs."""
_ALARM = "glm46/hang/alarm"
_TOLD = "glm46/hang/told"
_AWAKE_SECONDS = 0.5
"""How long a stopped rank is woken to show its stacks before it is killed."""


class Watchdog:
    """Watches this rank; ends the process with `EXIT_HANG` when some rank has gone silent. Making it is collective.

    Args:
        folder: where stacks and flight recorders go, one file for each rank.
        shortest_seconds: no silence below this is a hang; 0 watches nothing.
        start_seconds: the limit until enough steps were timed.
    """

    def __init__(self, process: Process, folder: Path, *, shortest_seconds: float, start_seconds: float):
        self._process, self._folder = process, folder
        self._shortest, self._start_limit = shortest_seconds, start_seconds
        self._operation, self._step, self._since = "starting", 0, time.monotonic()
        self._is_watched = False
        self._times: deque[float] = deque(maxlen=1000)
        self._size: tuple[int, ...] = ()
        self._steps_seen, self._step_began = 0, time.monotonic()
        self._main = threading.main_thread().ident
        self._end = threading.Event()
        if not shortest_seconds:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (folder / f"stacks-rank{process.rank}.txt").open("w")
        # In C, without the interpreter: shows even a thread that never gives the interpreter back.
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
        self._store = clone_store() if process.world_size > 1 else None
        if self._store is not None:
            self._store.set(f"glm46/hang/process/{process.rank}", json.dumps([socket.gethostname(), os.getpid()]))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def step_begins(self, step: int) -> None:
        """A new step, and with it the end of the one before."""
        now = time.monotonic()
        if self._is_watched:
            self._steps_seen += 1
            if self._steps_seen > _WARM_UP_STEPS:
                self._times.append(now - self._step_began)
        self._step_began, self._step = now, step
        self.operation("reading data")
        self._is_watched = True

    def operation(self, name: str, size: tuple[int, ...] | None = None) -> None:
        """What training does from now on. A step of another size may compile again: the times of those before say
        nothing about it."""
        self._operation, self._since = name, time.monotonic()
        if size not in (None, self._size):
            self._size, self._steps_seen = size, 0
            self._times.clear()

    @contextmanager
    def unwatched(self, name: str) -> Iterator[None]:
        """Around work that takes as long as it takes: validation, saves."""
        began = time.monotonic()
        self._is_watched = False
        self._operation = name
        yield
        self._step_began += time.monotonic() - began
        self._since = time.monotonic()
        self._is_watched = True

    def limit_seconds(self) -> float:
        """Silence that is a hang: five times the 99th percentile of the last step times, and not less than allowed."""
        if len(self._times) < _TIMED_STEPS:
            return max(self._start_limit, self._shortest)
        times = sorted(self._times)
        return max(_LIMIT_PER_P99 * times[math.ceil(0.99 * len(times)) - 1], self._shortest)

    def close(self) -> None:
        """Stop watching."""
        self._is_watched = False
        if self._shortest and not self._end.is_set():
            self._end.set()
            self._thread.join()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()
            stacks = self._folder / f"stacks-rank{self._process.rank}.txt"
            if stacks.stat().st_size == 0:
                stacks.unlink()
            with contextlib.suppress(OSError):  # not empty, or another rank was faster
                self._folder.rmdir()

    def _watch(self) -> None:
        last, ticks = time.monotonic(), 0
        while not self._end.wait(_TICK_SECONDS):
            now = time.monotonic()
            # Time in which this thread did not run either is no silence of training: the machine, or the whole run,
            # was suspended.
            self._since += max(now - last - 4 * _TICK_SECONDS, 0.0)
            last, ticks = now, ticks + 1
            if self._is_watched and now - self._since > self.limit_seconds():
                self._end_run(now - self._since)
            if self._store is not None and ticks % _ALARM_TICKS == 0 and self._store.check([_ALARM]):
                self._end_run(now - self._since)

    def _end_run(self, silent_seconds: float) -> None:
        rank, size = self._process.rank, self._process.world_size
        if self._store is not None and self._store.check([_TOLD]):
            time.sleep(2 * _AWAKE_SECONDS)  # it was this rank, now woken, and the others are killing it
            os._exit(EXIT_HANG)
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._stacks.flush()
        collectives, recorder = collectives_here()
        if recorder:
            (self._folder / f"flight-rank{rank}.json").write_text(recorder)
        answer = {
            "operation": self._operation,
            "step": self._step,
            "place": place_of(sys._current_frames().get(self._main)),
            "collectives": collectives,
        }
        # The store may hang too: then the process ends after this time, without an exit code of its own.
        faulthandler.dump_traceback_later(_PATIENCE_SECONDS, exit=True, file=self._stacks)
        answers = {rank: answer} if self._store is None else self._exchange(answer)
        speaker = min(answers)
        if rank == speaker:
            text = describe_silence(answers, find_culprits(answers, size), silent_seconds, str(self._folder))
            (self._folder / "hang.txt").write_text(text + "\n")
            print(f"error: {text}", file=sys.stderr, flush=True)
        if self._store is not None:
            self._store.set(_TOLD, "1")
            self._kill_silent(answers)
            time.sleep(1.0 if rank == speaker else 0.2)  # the store may live in the first rank: it goes last
        os._exit(EXIT_HANG)

    def _exchange(self, answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The answers of all ranks that give one."""
        self._store.set(_ALARM, "1")
        self._store.set(f"glm46/hang/answer/{self._process.rank}", json.dumps(answer))
        keys = {rank: f"glm46/hang/answer/{rank}" for rank in range(self._process.world_size)}
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end and not self._store.check(list(keys.values())):
            time.sleep(0.1)
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _kill_silent(self, answers: dict[int, Any]) -> None:
        """A stopped rank hears no SIGTERM, and torchrun would wait for it: get its stacks, and end it."""
        silent = []
        for rank in set(range(self._process.world_size)) - answers.keys():
            host, process_id = json.loads(self._store.get(f"glm46/hang/process/{rank}"))
            if host == socket.gethostname():
                silent.append(process_id)
        for number in (signal.SIGUSR2, signal.SIGCONT, signal.SIGKILL) if silent else ():
            for process_id in silent:
                try:
                    os.kill(process_id, number)
                except ProcessLookupError:
                    continue
            time.sleep(_AWAKE_SECONDS if number == signal.SIGCONT else 0.0)
