"""The processes that share a checkpoint, and stages of work that succeed or fail on all of them.

A rank that raises alone leaves the others in their next collective until the timeout of the process group. So work that
can fail runs inside ``Ranks.stage``: leaving a stage is a collective that carries the result or the fault of each rank.
"""

from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)


class CheckpointError(Exception):
    """A save or load failed on some rank. All ranks raise it with the same ``faults``, one line per failed rank."""

    def __init__(self, *faults: str):
        self.faults = faults
        super().__init__("\n".join(faults))


class RankLostError(RuntimeError):
    """An exchange failed because a rank has ended or does not answer; no further exchange is possible."""


@dataclass
class Ranks:
    """The processes that share a checkpoint, with a process group of their own."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    interrupt: BaseException | None = None
    """The SystemExit or KeyboardInterrupt that this rank has sent to the others last."""

    @classmethod
    def of_this_run(cls) -> "Ranks":
        """All processes of the run, or this process alone. Collective, because it makes a gloo group.

        The group is separate from training's: a save never queues behind gradients, and works on the CPU whatever the
        backend of training is.
        """
        if not dist.is_initialized():
            return cls(rank=0, size=1, group=None)
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Collective.

        Raises:
            RankLostError: a rank has ended or does not answer.
        """
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise RankLostError(*error.args) from error
        return values

    def stage(self, name: str) -> "CollectiveStage":
        """``with ranks.stage("writing") as stage:`` runs work that succeeds or fails on all ranks."""
        return CollectiveStage(self, name)


ALONE = Ranks(rank=0, size=1, group=None)
"""One process by itself, even while others run."""


class CollectiveStage:
    """Work that succeeds or fails on all ranks. Set ``value`` inside; ``values`` holds those of all ranks afterwards.

    Entering is local, leaving is collective. A stage may enclose others: a rank that fails between the inner ones then
    meets the other ranks where they leave an inner one.

    Raises:
        CheckpointError: on every rank, when the stage failed on any of them.
    """

    def __init__(self, ranks: Ranks, name: str):
        self._ranks = ranks
        self._name = name
        self.value: Any = None
        self.values: list[Any] = []

    def __enter__(self) -> "CollectiveStage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, (CheckpointError, RankLostError)):  # all ranks have raised the former already
            return False
        if error is not None and error is self._ranks.interrupt:
            return False
        fault = None if error is None else describe_fault(self._ranks.rank, self._name, error)
        results = self._ranks.all_gather((fault, self.value))
        faults = [fault for fault, _ in results if fault is not None]
        if error is not None and not isinstance(error, Exception):
            self._ranks.interrupt = error  # it propagates; the other ranks have the fault
            return False
        if faults:
            raise CheckpointError(*faults) from error
        self.values = [value for _, value in results]
        return False


def describe_fault(rank: int, stage: str, error: BaseException) -> str:
    """One line that names rank, stage and error.

    If the operating system caused the error, its message is shown: torch's file writer reports a full disk as
    "unexpected pos".
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    shown = cause or error
    return f"rank {rank}, {stage}: {type(shown).__name__}: {shown}"
