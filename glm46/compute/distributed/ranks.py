"""Processes that share a checkpoint, and stages of work that succeed or fail on all of them.

A rank that raises alone leaves the others in their next collective until the timeout of the process group. So work that
can fail runs inside ``Ranks.stage``: leaving a stage is a collective that carries the result or the fault of each rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)
_Value = TypeVar("_Value")


class CheckpointError(Exception):
    """A save or load failed on some rank. All ranks raise it with the same ``faults``, one line per failed rank."""

    def __init__(self, *faults: str):
        self.faults = faults
        super().__init__("\n".join(faults))


class RankLostError(RuntimeError):
    """An exchange failed because a rank has ended or does not answer; no further exchange is possible."""


@dataclass
class Ranks:
    """Processes that share a checkpoint, with their own process group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    interrupt: BaseException | None = None
    """Last SystemExit or KeyboardInterrupt that this rank has reported to the others."""

    @classmethod
    def of_this_run(cls) -> "Ranks":
        """Create the ranks of this run, or of this process alone. Collective, because it creates a gloo group.

        The group is separate from training's: a save never queues behind gradients, and works on the CPU whatever the
        backend of training is.
        """
        if not dist.is_initialized():
            return cls(rank=0, size=1, group=None)
        group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in rank order. Collective.

        Raises:
            RankLostError: a rank has ended or does not answer.
        """
        values = [value] * self.size
        self._call(dist.all_gather_object, values, value)
        return values

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. All ranks pass the same number of flags. Collective;
        raises like `all_gather`."""
        tensor = torch.tensor(flags, dtype=torch.uint8)
        self._call(dist.all_reduce, tensor, dist.ReduceOp.MAX)
        return tensor.bool().tolist()

    def of_first(self, value: _Value) -> _Value:
        """Return the value of rank 0. Collective; raises like `all_gather`."""
        box = [value]
        self._call(dist.broadcast_object_list, box, src=0)
        return box[0]

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks on rank 0, an empty list on the others. Collective; raises like
        `all_gather`."""
        values = [value] * self.size if self.is_first else []
        self._call(dist.gather_object, value, values or None, dst=0)
        return values

    def scatter(self, values: list[Any] | None) -> Any:
        """Return this rank's value from the list of rank 0. Collective; raises like `all_gather`."""
        box = [None] if values is None else values[:1]
        self._call(dist.scatter_object_list, box, values, src=0)
        return box[0]

    def _call(self, collective: Callable[..., object], *arguments: object, **options: object) -> None:
        if self.group is not None:  # a rank alone already has its own value as the result
            try:
                collective(*arguments, group=self.group, **options)
            except RuntimeError as error:
                raise RankLostError(*error.args) from error

    def stage(self, name: str, to: Literal["all", "first", "each"] = "all") -> "CollectiveStage":
        """Create a stage: ``with ranks.stage("writing") as stage:`` runs work that succeeds or fails on all ranks.

        Args:
            to: receivers. "all": all ranks get the values of all ranks; "first": only the first rank gets them, where
                they are too large for thousands of ranks; "each": each rank gets one value of the first rank's list.
        """
        return CollectiveStage(self, name, to)


ALONE = Ranks(rank=0, size=1, group=None)
"""This process alone, even if other ranks run."""


class CollectiveStage:
    """Work that succeeds or fails on all ranks. Set ``value`` inside; afterwards ``values`` holds the values of all
    ranks, or with "each", ``value`` is this rank's value.

    Entering is local, leaving is collective. A stage may enclose others: a rank that fails between inner stages then
    meets the other ranks where they leave an inner stage.

    Raises:
        CheckpointError: on every rank, when the stage failed on any of them.
    """

    def __init__(self, ranks: Ranks, name: str, to: str):
        self._ranks = ranks
        self._name = name
        self._to = to
        self.value: Any = None
        self.values: list[Any] = []

    def __enter__(self) -> "CollectiveStage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (CheckpointError, RankLostError)):  # all ranks raise the former; the latter ends exchanges
            return
        if error is not None and error is self._ranks.interrupt:  # an inner stage has reported it
            return
        fault = None if error is None else describe_fault(self._ranks.rank, self._name, error)
        states = self._ranks.all_gather((fault, self.value is not None))
        faults = [fault for fault, _ in states if fault is not None]
        first_has_value, *others_have_value = [has_value for _, has_value in states]
        if error is not None and not isinstance(error, Exception):
            self._ranks.interrupt = error  # it propagates; the other ranks have the fault
            return
        if faults:
            raise CheckpointError(*faults) from error
        if self._to == "each":
            self.value = self._ranks.scatter(self.value)
        elif self._to == "first":
            self.values = self._ranks.gather(self.value)
        elif any(others_have_value):
            self.values = self._ranks.all_gather(self.value)
        else:  # only rank 0 has a value; an all-gather would pad every rank's entry to the size of the largest
            first = self._ranks.of_first(self.value) if first_has_value else None
            self.values = [first, *[None] * (self._ranks.size - 1)]


def describe_fault(rank: int, stage: str, error: BaseException) -> str:
    """Describe an error in one line with rank and stage.

    If the operating system caused the error, its message is shown: torch's file writer reports a full disk as
    "unexpected pos".
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    shown = cause or error
    return f"rank {rank}, {stage}: {type(shown).__name__}: {shown}"
