"""Saves in the background, one writer thread each: a failed or hung save does not stop training."""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from torch import Tensor

from glm46.compute.distributed.ranks import CheckpointError, RankLostError, Ranks, describe_fault
from glm46.storage.checkpoint.save import SaveOutcome, SaveTarget, Snapshot, save_now
from glm46.storage.checkpoint.staging import Staging

_EXIT_SECONDS = 10.0
"""How long the end of the process waits for a save: a thread that is cut while it holds the interpreter aborts it."""


class _Save(threading.Thread):
    """The thread of one save; ``result`` is set when ``ended`` is."""

    def __init__(self, step: int, rank: int, work: Callable[[], int], stall_seconds: float):
        # A daemon, because the end of the process must not wait without limit for storage that hangs.
        super().__init__(name="checkpoint", daemon=True)
        self._step, self._rank, self._work, self._stall_seconds = step, rank, work, stall_seconds
        self._started_at = time.perf_counter() - stall_seconds
        self.result: SaveOutcome | CheckpointError | RankLostError | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            size = self._work()
            self.result = SaveOutcome(self._step, size, time.perf_counter() - self._started_at, self._stall_seconds)
        except (CheckpointError, RankLostError) as error:
            self.result = error
        except BaseException as error:  # such as SystemExit; the stage of the save has sent it to the other ranks
            self.result = CheckpointError(describe_fault(self._rank, f"saving step {self._step}", error))
            raise  # prints the traceback of a bug; nothing waits for this thread but `ended`
        finally:
            self.ended.set()


@atexit.register
def _wait_for_saves() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for thread in threading.enumerate():
        if isinstance(thread, _Save):
            thread.join(max(end - time.monotonic(), 0.0))


class BackgroundSaver:
    """Saves staged copies in a thread, one save at a time, over a process group of its own.

    The thread makes the same collectives in the same order on all ranks, so a save succeeds or fails on all of them. It
    is a thread because a process would need the tensors in shared memory and a second set of ranks.
    """

    def __init__(self) -> None:
        """Collective."""
        self._ranks = Ranks.of_this_run()
        self._staging = Staging()
        self._staged: dict[str, Tensor] = {}
        self._stage_seconds = 0.0
        self._save: _Save | None = None
        self._outcomes: list[SaveOutcome] = []
        self._errors: list[CheckpointError | RankLostError] = []

    @property
    def is_busy(self) -> bool:
        """True if a save is running on this rank."""
        return self._save is not None and not self._save.ended.is_set()

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the tensors to host memory. Not while a save is running."""
        started = time.perf_counter()
        self._staged = {}
        self._staged = self._staging.copy(tensors)
        self._stage_seconds = time.perf_counter() - started

    def start(self, target: SaveTarget, snapshot: Snapshot, in_use: Collection[int]) -> None:
        """Save the staged copies in a thread. Not while a save is running."""
        self._collect()
        work = partial(save_now, target, snapshot, self._ranks, in_use, self._staged)
        self._save = _Save(snapshot.step, self._ranks.rank, work, self._stage_seconds)
        self._save.start()

    def wait(self, seconds: float) -> None:
        """Wait until no save is running on this rank, at most so long."""
        if self._save is not None:
            self._save.ended.wait(seconds)

    def take_ended(self) -> list[SaveOutcome]:
        """The outcomes of finished saves, each once.

        Raises:
            CheckpointError: a save failed. The outcomes of others stay for the next call.
            RankLostError: a rank has ended or does not answer; training's collectives fail too.
        """
        self._collect()
        if self._errors:
            raise self._errors.pop(0)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def forget_ended(self) -> None:
        """Drop the outcomes that were not taken."""
        self._collect()
        self._outcomes, self._errors = [], []

    def _collect(self) -> None:
        if self._save is not None and self._save.ended.is_set():
            if isinstance(result := self._save.result, SaveOutcome):
                self._outcomes.append(result)
            elif result is not None:
                self._errors.append(result)
            self._save = None
