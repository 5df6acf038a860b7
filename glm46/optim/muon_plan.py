"""The owner of each matrix, decided once from shapes and placements: the same plan on every rank, never saved.

* local: a matrix that a rank holds whole is updated there, without communication;
* owner: a sharded matrix has one owner among the ranks that hold a part. It collects the parts, orthogonalises the
  matrix and returns the parts of the update.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from glm46.optim.muon_layout import Bounds, Holding, TensorLayout
from glm46.optim.muon_update import Orthogonalizer
from glm46.optim.newton_schulz import stack_limit
from glm46.planner.flops import newton_schulz_flops

BUCKET_BYTES = 256 << 20
"""Bound on the whole matrices that one owner collects at a time, in the type in which they travel."""
WORKSPACE_BYTES = 1 << 30
"""Bound on the memory of one stacked iteration."""


@dataclass(frozen=True)
class Request:
    """One parameter as the plan sees it."""

    name: str
    layout: TensorLayout
    row_blocks: tuple[int, ...]


@dataclass(frozen=True)
class LocalTask:
    """Matrices of one block of rows of one parameter, whole on this rank; ``matrices`` and ``rows`` count locally."""

    parameter: int
    matrices: Bounds
    rows: Bounds
    columns: int


@dataclass(frozen=True)
class Unit:
    """One matrix that is sharded over the ranks of a group.

    ``matrix`` counts in the local batch, ``rows`` in the whole tensor. ``parts[i]`` are the rows (within this matrix)
    and columns that rank i of the group holds, None if nothing.
    """

    parameter: int
    name: str
    matrix: int
    rows: Bounds
    columns: int
    parts: tuple[tuple[Bounds, Bounds] | None, ...]
    flops: int
    owner: int = -1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        return self.rows[1] - self.rows[0], self.columns

    def size(self, member: int) -> int:
        """Entries that a rank of the group holds."""
        part = self.parts[member]
        return 0 if part is None else (part[0][1] - part[0][0]) * (part[1][1] - part[1][0])

    @cached_property
    def senders(self) -> frozenset[int]:
        """The ranks that send their part to the owner: the first of those with equal parts."""
        first = {part: member for member, part in reversed(list(enumerate(self.parts)))}
        return frozenset(first[part] for part in first if part is not None and part != self.parts[self.owner])

    def receives(self, member: int) -> bool:
        """True if this rank gets its part of the update from the owner."""
        return self.parts[member] is not None and member != self.owner


@dataclass(frozen=True)
class Bucket:
    """Units of one group of ranks that travel together."""

    ranks: tuple[int, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class MuonPlan:
    """The static plan of one rank. Buckets are the same on all ranks of their group."""

    local: tuple[LocalTask, ...]
    buckets: tuple[Bucket, ...]


def _part(holding: Holding, rows: Bounds) -> tuple[Bounds, Bounds] | None:
    """The rows within the block ``rows`` and the columns of a holding, None if empty."""
    start, stop = max(holding.rows[0], rows[0]), min(holding.rows[1], rows[1])
    if start >= stop or holding.columns[0] >= holding.columns[1]:
        return None
    return (start - rows[0], stop - rows[0]), holding.columns


def make_plan(requests: Sequence[Request], settings: Orthogonalizer) -> MuonPlan:
    """The plan of this rank.

    Args:
        requests: one per parameter, in the same order on all ranks that share it.
        settings: decide the cost of a matrix and the bytes of an entry on its way.
    """
    local: list[LocalTask] = []
    cut: dict[tuple[int, ...], list[Unit]] = defaultdict(list)
    for index, request in enumerate(requests):
        layout, columns = request.layout, request.layout.shape[2]
        ranks = layout.ranks
        stop = 0
        for height in request.row_blocks:
            rows, stop = (stop, stop + height), stop + height
            whole = ((0, height), (0, columns))
            parts = tuple(_part(layout.holdings[rank], rows) for rank in ranks)
            if not ranks or whole in parts:
                if _part(layout.mine, rows) == whole:
                    first = rows[0] - layout.mine.rows[0]
                    matrices = (0, layout.mine.batch[1] - layout.mine.batch[0])
                    local.append(LocalTask(index, matrices, (first, first + height), columns))
                continue
            flops = newton_schulz_flops(height, columns, settings.steps)
            for matrix in range(layout.mine.batch[1] - layout.mine.batch[0]):
                cut[ranks].append(Unit(index, request.name, matrix, rows, columns, parts, flops))
    buckets: list[Bucket] = []
    # Small groups first, then by rank numbers: with one order for all ranks, no two wait for each other.
    for ranks in sorted(cut, key=lambda ranks: (len(ranks), ranks)):
        owned = _with_owners(cut[ranks], len(ranks))
        packed = _packed(owned, len(ranks), BUCKET_BYTES // settings.dtype.itemsize)
        buckets += [Bucket(ranks, tuple(units)) for units in packed]
    return MuonPlan(tuple(local), tuple(buckets))


def _with_owners(units: Sequence[Unit], members: int) -> list[Unit]:
    """Give each matrix to the least loaded rank that holds a part of it, the most expensive matrices first."""
    loads = [0] * members
    owned = []
    for unit in sorted(units, key=lambda unit: (-unit.flops, unit.name, unit.parameter, unit.matrix, unit.rows)):
        holders = [member for member in range(members) if unit.parts[member] is not None]
        owner = min(holders, key=lambda member: (loads[member], member))
        loads[owner] += unit.flops
        owned.append(replace(unit, owner=owner))
    return owned


def _packed(units: Sequence[Unit], members: int, most: int) -> list[list[Unit]]:
    """Start a new bucket where an owner would hold more than this many entries of whole matrices."""
    buckets: list[list[Unit]] = [[]]
    held = [0] * members
    for unit in units:
        size = unit.shape[0] * unit.shape[1]
        if buckets[-1] and held[unit.owner] + size > most:
            buckets.append([])
            held = [0] * members
        held[unit.owner] += size
        buckets[-1].append(unit)
    return buckets


def stack_tasks(
    tasks: Sequence[LocalTask], settings: Orthogonalizer, devices: Sequence[torch.device]
) -> list[list[LocalTask]]:
    """Tasks of one canonical shape, in chunks whose iteration fits the workspace; ``devices`` of the parameters."""
    alike: dict[tuple, list[LocalTask]] = defaultdict(list)
    for task in tasks:
        rows = task.rows[1] - task.rows[0]
        alike[min(rows, task.columns), max(rows, task.columns), devices[task.parameter]].append(task)
    chunks: list[list[LocalTask]] = []
    for (short, long, device), same in alike.items():
        # The stack, its normalised copy and two results in turn; two short x short products.
        limit = max(1, WORKSPACE_BYTES // (settings.dtype.itemsize * (4 * short * long + 2 * short * short)))
        if device.type == "cpu":
            limit = min(limit, stack_limit(short, long, settings.dtype))
        room = 0
        for task in same:
            first, stop = task.matrices
            while first < stop:
                if not room:
                    chunks.append([])
                    room = limit
                last = min(stop, first + room)
                chunks[-1].append(replace(task, matrices=(first, last)))
                first, room = last, room - (last - first)
    return chunks
