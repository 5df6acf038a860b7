"""Saves behind the back of training: a thread for each, which may die, hang or be given up while training goes on."""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from glm46.checkpoint.saving import Place, SaveOutcome, save_now
from glm46.checkpoint.snapshot import Snapshot
from glm46.checkpoint.staging import Staging
from glm46.distributed.ranks import CheckpointError, Ranks

_TASKS = Path("/proc/self/task")
_LOOK_SECONDS = 0.05
"""Between two looks at whether a thread that is waited for is still there."""
_EXIT_SECONDS = 10.0
"""How long the end of the process waits for a save: cut while it holds the interpreter, a thread aborts the process."""


class _GivenUp(Exception):
    """The save goes no further on this rank: its ranks have left it. No error of the save: nothing is cleaned up."""


class _Gate:
    """Where a save waits for other ranks. Once shut, nothing of the save goes on behind it, whoever comes late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_shut = False
        self.is_waiting = False
        """Whether the save is inside, where it may wait for ever for a rank that has left."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._pass(True)
        try:
            yield
        finally:
            self._pass(False)

    def shut(self) -> None:
        with self._lock:
            self.is_shut = True

    def _pass(self, is_waiting: bool) -> None:
        with self._lock:
            if self.is_shut:
                raise _GivenUp
            self.is_waiting = is_waiting


@dataclass
class _SaverRanks(Ranks):
    """The ranks of saves in the background, which can be given up while they wait for each other."""

    gate: _Gate = field(default_factory=_Gate)

    def all_gather(self, value: Any) -> list[Any]:
        with self.gate.waiting():
            return super().all_gather(value)

    def from_first(self, value: Any) -> Any:
        with self.gate.waiting():
            return super().from_first(value)


class _Save(threading.Thread):
    """One save. It ends with an outcome or an error, or has died: any other error is death, and shown by the system."""

    def __init__(self, content: Snapshot, gate: _Gate, work: Callable[[], int], stall_seconds: float):
        # A daemon: at the end of the process the interpreter would wait for ever for one that the system has ended.
        super().__init__(name="checkpoint", daemon=True)
        self.step, self.gate = content.step, gate
        self._work, self._stall_seconds = work, stall_seconds
        self._began = time.perf_counter() - stall_seconds
        self.result: SaveOutcome | Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            size = self._work()
            self.result = SaveOutcome(self.step, size, time.perf_counter() - self._began, self._stall_seconds)
        except (CheckpointError, RuntimeError) as error:  # the latter is torch's, when a whole rank has gone
            self.result = error
        except _GivenUp:
            return
        self.ended.set()

    @property
    def is_running(self) -> bool:
        """Python believes in a thread for ever that ended without its knowledge; the system knows better."""
        return self.is_alive() and (not _TASKS.exists() or (_TASKS / str(self.native_id)).exists())

    @property
    def is_working(self) -> bool:
        """Whether it still touches its files and copies; one that was given up does not while it waits for others."""
        return self.is_running and not self.ended.is_set() and not (self.gate.is_shut and self.gate.is_waiting)

    @property
    def has_died(self) -> bool:
        return not self.is_running and not self.ended.is_set()  # in this order: it may end in between


_RUNNING: set[_Save] = set()


@atexit.register
def _let_saves_end() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    while any(save.is_running for save in _RUNNING) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


class BackgroundSaver:
    """Saves from staged copies in a thread of its own, one at a time, over a process group of its own.

    The thread makes the same collectives in the same order on all ranks, so a save ends in the same way for all of
    them. It is a thread because a process would need the tensors in shared memory and a second set of ranks. When the
    thread of one rank dies, those of the others wait for it: then all ranks call ``start_again``.
    """

    def __init__(self) -> None:
        """Collective."""
        self._ranks = _SaverRanks.of_this_run()
        self._staging = Staging()
        self._staged: dict[str, Tensor] = {}
        self._stage_seconds = 0.0
        self._save: _Save | None = None
        self._given_up: list[_Save] = []
        self._untaken: list[SaveOutcome | Exception] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank, or one that was given up still writes."""
        self._given_up = [save for save in self._given_up if save.is_working]
        return bool(self._given_up) or (self._save is not None and self._save.is_working)

    @property
    def has_died(self) -> bool:
        """Whether the save under way has ended on this rank without a word."""
        return self._save is not None and self._save.has_died

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the tensors to host memory. Not while a save is under way."""
        started = time.perf_counter()
        self._staged = {}
        self._staged = self._staging.copy(tensors)
        self._stage_seconds = time.perf_counter() - started

    def start(self, place: Place, content: Snapshot, in_use: Collection[int]) -> None:
        """Save what was staged, in a thread. Not while a save is under way."""
        self._collect()
        work = partial(save_now, place, content, self._ranks, in_use, self._staged)
        self._save = _Save(content, self._ranks.gate, work, self._stage_seconds)
        _RUNNING.add(self._save)
        self._save.start()

    def wait(self, seconds: float) -> None:
        """Wait until no save is under way on this rank, or the time is over."""
        end = time.monotonic() + seconds
        while self.is_busy and time.monotonic() < end:
            if self._save is None:
                time.sleep(_LOOK_SECONDS)
            else:
                self._save.ended.wait(_LOOK_SECONDS)

    def start_again(self, dead: Collection[int]) -> None:
        """Give up the save under way on all ranks, because its thread has died on some. Collective.

        Threads that wait for those ranks are left behind; they do nothing more, whatever wakes them.
        """
        save, self._save = self._save, None
        if save is not None:
            save.gate.shut()
            self._given_up.append(save)
            self._staging, self._staged = Staging(), {}  # it may hold the copies for as long as its ranks' timeout
            _RUNNING.discard(save)
        ranks = ", ".join(map(str, dead))
        lost = f"; the save of step {save.step} is lost" if save is not None else ""
        self._untaken.append(CheckpointError(f"the checkpoint saver of rank {ranks} died and was started again{lost}"))
        self._ranks = self._ranks.renewed()

    def take_ended(self) -> list[SaveOutcome]:
        """The outcomes of saves that ended, each once.

        Raises:
            CheckpointError: a save failed, or was given up. Outcomes of others remain to be taken.
            RuntimeError: a rank has gone; training's own exchanges say so too.
        """
        self._collect()
        for result in self._untaken:
            if isinstance(result, Exception):
                self._untaken.remove(result)
                raise result
        outcomes, self._untaken = self._untaken, []
        return outcomes

    def forget_ended(self) -> None:
        """Drop the outcomes that were not taken."""
        self._collect()
        self._untaken = []

    def _collect(self) -> None:
        if self._save is not None and self._save.ended.is_set():
            _RUNNING.discard(self._save)
            self._untaken.append(self._save.result)
            self._save = None
