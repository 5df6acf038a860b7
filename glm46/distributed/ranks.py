"""How the ranks of a save or load agree: each step ends for all of them together, and a fault of one is known to all.

A rank that raised alone would leave the others in their next collective until the timeout of the process group. So
every step that can fail runs inside ``Ranks.stage``: leaving it is a collective that carries each result or fault.
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


@dataclass
class Ranks:
    """The processes that share a checkpoint: who I am, how many we are, and a group of our own to talk over."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of_this_run(cls) -> "Ranks":
        """All processes of the run, or this process alone. Collective, because it makes a gloo group.

        The group is separate from training's, so a save never queues behind gradients, and it works on the CPU whatever
        the backend of training is.
        """
        if not dist.is_initialized():
            return cls(rank=0, size=1, group=None)
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=group)

    def renewed(self) -> "Ranks":
        """The same ranks with a new group, because some rank left an exchange of this one. Collective.

        Letting go of the old group closes this rank's connections; that wakes whoever waits for it there.
        """
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
        return type(self).of_this_run()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def stage(self, name: str) -> "CollectiveStage":
        """``with ranks.stage("writing") as stage:`` runs a step that all ranks leave together."""
        return CollectiveStage(self, name)


class CollectiveStage:
    """A step that all ranks leave together. Set ``value`` inside; ``values`` holds everyone's afterwards.

    Raises:
        CheckpointError: on every rank, when the step failed on any of them.
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
        fault = None if error is None else f"rank {self._ranks.rank}, {self._name}: {_root_of(error)}"
        results = self._ranks.all_gather((fault, self.value))
        faults = [fault for fault, _ in results if fault is not None]
        if error is not None and not isinstance(error, Exception):
            return False  # an interrupt goes its own way; the others have been told
        if faults:
            raise CheckpointError(*faults) from error
        self.values = [value for _, value in results]
        return False


def _root_of(error: BaseException) -> str:
    """The error in words. A full disk shows as "unexpected pos" of torch's file writer: then what the system said."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    shown = cause or error
    return f"{type(shown).__name__}: {shown}"
