"""Who orthogonalises which matrix, decided once from shapes and placements: the same plan on every rank, never saved.

* local: a matrix that a rank holds whole is updated there, without communication;
* owner: of a matrix that is cut, one rank that holds a part collects the rest, orthogonalises it once and returns parts;
* gram: a matrix so large that one owner would keep all others waiting is never collected: its ranks sum their Gram
  matrices instead (glm46/optim/muon_gram.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm46.optim.muon_layout import Holding, Interval, Layout
from glm46.optim.newton_schulz import newton_schulz_flops

# The Gram form pays when the long side is cut and is at least this many times the short side; below that its extra
# short^3 products and the sum over ranks cost more than they save.
GRAM_ASPECT = 8


@dataclass(frozen=True)
class Request:
    """What the plan needs to know of one parameter."""

    name: str
    layout: Layout
    row_blocks: tuple[int, ...]
    wire: torch.dtype
    steps: int
    settings: object
    owner_of_replicas: bool


@dataclass(frozen=True)
class LocalTask:
    """All matrices of one block of rows of one parameter, whole on this rank; ``rows`` count in the local tensor."""

    parameter: int
    name: str
    matrices: int
    rows: Interval
    columns: int


@dataclass(frozen=True)
class Unit:
    """One matrix that is cut over the ranks of a group.

    ``matrix`` counts in the local batch, ``rows`` in the whole tensor. ``parts[i]`` are the rows (within this matrix)
    and columns that rank i of the group holds, None if nothing. ``owner`` is -1 for the gram class.
    """

    parameter: int
    name: str
    matrix: int
    rows: Interval
    columns: int
    parts: tuple[tuple[Interval, Interval] | None, ...]
    owner: int = -1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        return self.rows[1] - self.rows[0], self.columns

    def size(self, member: int) -> int:
        """Entries that a rank of the group holds."""
        part = self.parts[member]
        return 0 if part is None else (part[0][1] - part[0][0]) * (part[1][1] - part[1][0])

    def sends(self, member: int) -> bool:
        """Whether this rank is the one that sends its part to the owner: the first of those with equal parts."""
        part = self.parts[member]
        return part is not None and part != self.parts[self.owner] and self.parts.index(part) == member

    def receives(self, member: int) -> bool:
        """Whether this rank gets its part of the update from the owner."""
        return self.parts[member] is not None and member != self.owner


@dataclass(frozen=True)
class Bucket:
    """Units of one group of ranks and one wire type that travel together."""

    ranks: tuple[int, ...]
    wire: torch.dtype
    units: tuple[Unit, ...]

    def gather_sizes(self, source: int, target: int) -> int:
        """Entries that ``source`` sends to ``target`` before the iteration."""
        return sum(unit.size(source) for unit in self.units if unit.owner == target and unit.sends(source))

    def return_sizes(self, source: int, target: int) -> int:
        """Entries that ``source`` sends to ``target`` after the iteration."""
        return sum(unit.size(target) for unit in self.units if unit.owner == source and unit.receives(target))

    def bytes_received(self, member: int) -> int:
        """Bytes that a rank receives in one step, both ways; what it keeps for itself does not travel."""
        others = [other for other in range(len(self.ranks)) if other != member]
        entries = sum(self.gather_sizes(other, member) + self.return_sizes(other, member) for other in others)
        return entries * self.wire.itemsize


@dataclass(frozen=True)
class Plan:
    """The static plan of one rank. Buckets and gram units are the same on all ranks of their group."""

    local: tuple[LocalTask, ...]
    buckets: tuple[Bucket, ...]
    gram: tuple[tuple[tuple[int, ...], Unit], ...]
    steps: dict[int, int]

    def bytes_per_rank(self) -> dict[int, int]:
        """Bytes received per step by every rank that this one exchanges matrices with (global rank numbers)."""
        totals: dict[int, int] = defaultdict(int)
        for bucket in self.buckets:
            for member, rank in enumerate(bucket.ranks):
                totals[rank] += bucket.bytes_received(member)
        return dict(totals)

    def exchange_flops_per_rank(self) -> dict[int, int]:
        """Newton-Schulz operations per step of owned matrices, for every rank that this one exchanges matrices with."""
        totals: dict[int, int] = defaultdict(int)
        for bucket in self.buckets:
            for rank in bucket.ranks:
                totals[rank] += 0
            for unit in bucket.units:
                totals[bucket.ranks[unit.owner]] += newton_schulz_flops(*unit.shape, self.steps[unit.parameter])
        return dict(totals)

    def local_flops(self) -> int:
        """Newton-Schulz operations per step of the matrices that this rank holds whole."""
        return sum(
            task.matrices * newton_schulz_flops(task.rows[1] - task.rows[0], task.columns, self.steps[task.parameter])
            for task in self.local
        )

    def __str__(self) -> str:
        lines = [f"local: {sum(task.matrices for task in self.local)} matrices, {self.local_flops():.3e} FLOPs"]
        owned = sum(len(bucket.units) for bucket in self.buckets)
        lines.append(f"owner: {owned} matrices in {len(self.buckets)} buckets; gram: {len(self.gram)} matrices")
        flops = self.exchange_flops_per_rank()
        for rank, received in sorted(self.bytes_per_rank().items()):
            lines.append(f"rank {rank}: receives {received:,} bytes, {flops[rank]:.3e} FLOPs of owned matrices")
        for bucket in self.buckets:
            for unit in bucket.units:
                shape = "x".join(map(str, unit.shape))
                lines.append(f"{unit.name}[{unit.matrix}] {shape} -> rank {bucket.ranks[unit.owner]}")
        lines += [f"{unit.name}[{unit.matrix}] -> gram over ranks {ranks}" for ranks, unit in self.gram]
        return "\n".join(lines)


def _intersect(left: Interval, right: Interval) -> Interval:
    start = max(left[0], right[0])
    return start, max(start, min(left[1], right[1]))


def _part(holding: Holding, rows: Interval) -> tuple[Interval, Interval] | None:
    """The rows within the block ``rows`` and the columns of a holding, None if empty."""
    start, stop = _intersect(holding.rows, rows)
    if start >= stop or holding.columns[0] >= holding.columns[1]:
        return None
    return (start - rows[0], stop - rows[0]), holding.columns


def _blocks(row_blocks: Sequence[int]) -> list[Interval]:
    stops = [sum(row_blocks[: index + 1]) for index in range(len(row_blocks))]
    return [(stop - size, stop) for stop, size in zip(stops, row_blocks, strict=True)]


def make_plan(requests: Sequence[Request], *, bucket_bytes: int, gram_load: float) -> Plan:
    """The plan of this rank.

    Args:
        requests: one per parameter, in the same order on all ranks that share it.
        bucket_bytes: bound on the whole matrices that one owner collects at a time, in wire bytes.
        gram_load: a cut matrix goes to the gram class if it costs more than this times the mean load of its group.
    """
    local: list[LocalTask] = []
    cut: dict[tuple[tuple[int, ...], torch.dtype], list[Unit]] = defaultdict(list)
    for index, request in enumerate(requests):
        layout = request.layout
        ranks = layout.replicas if request.owner_of_replicas else layout.peers
        matrices = layout.mine.batch[1] - layout.mine.batch[0]
        for rows in _blocks(request.row_blocks):
            height, columns = rows[1] - rows[0], layout.shape[2]
            whole = ((0, height), (0, columns))
            parts = tuple(_part(layout.holdings[rank], rows) for rank in ranks)
            if not ranks or whole in parts:
                if matrices and _part(layout.mine, rows) == whole:
                    first = rows[0] - layout.mine.rows[0]
                    local.append(LocalTask(index, request.name, matrices, (first, first + height), columns))
                continue
            for matrix in range(matrices):
                cut[ranks, request.wire].append(Unit(index, request.name, matrix, rows, columns, parts))
    steps = {index: request.steps for index, request in enumerate(requests)}
    gram = _take_gram_units(cut, requests, steps, gram_load)
    buckets: list[Bucket] = []
    # Small groups first, then by rank numbers and type: one order for all ranks, so that no two ever wait crosswise.
    for ranks, wire in sorted(cut, key=lambda key: (len(key[0]), key[0], str(key[1]))):
        owned = _with_owners(cut[ranks, wire], len(ranks), steps)
        buckets += [Bucket(ranks, wire, tuple(units)) for units in _packed(owned, len(ranks), wire, bucket_bytes)]
    return Plan(tuple(local), tuple(buckets), tuple(gram), steps)


def _take_gram_units(cut: dict, requests: Sequence[Request], steps: dict[int, int], gram_load: float) -> list:
    """Remove from ``cut`` the matrices that would overload one owner and can be summed instead."""
    taken = []
    for (ranks, _), units in cut.items():
        costs = [newton_schulz_flops(*unit.shape, steps[unit.parameter]) for unit in units]
        limit = gram_load * sum(costs) / len(ranks)
        kept = []
        for unit, cost in zip(units, costs, strict=True):
            peers = requests[unit.parameter].layout.peers
            long_side = int(unit.shape[1] > unit.shape[0])
            short, long = min(unit.shape), max(unit.shape)
            parts = [part for part in unit.parts if part is not None]
            short_is_whole = all(part[1 - long_side] == (0, short) for part in parts)
            if cost > limit and long >= GRAM_ASPECT * short and short_is_whole:
                mine = tuple(part for rank, part in zip(ranks, unit.parts, strict=True) if rank in peers)
                taken.append((peers, Unit(unit.parameter, unit.name, unit.matrix, unit.rows, unit.columns, mine)))
            else:
                kept.append(unit)
        units[:] = kept
    for key in [key for key, units in cut.items() if not units]:
        del cut[key]
    return sorted(taken, key=lambda entry: (len(entry[0]), entry[0], entry[1].parameter, entry[1].matrix))


def _with_owners(units: Sequence[Unit], members: int, steps: dict[int, int]) -> list[Unit]:
    """Give each matrix to the least loaded rank that holds a part of it, the costliest matrices first."""
    loads = [0] * members
    owned = []
    costs = {id(unit): newton_schulz_flops(*unit.shape, steps[unit.parameter]) for unit in units}
    for unit in sorted(units, key=lambda u: (-costs[id(u)], u.name, u.parameter, u.matrix, u.rows)):
        holders = [member for member in range(members) if unit.parts[member] is not None]
        owner = min(holders, key=lambda member: (loads[member], member))
        loads[owner] += costs[id(unit)]
        owned.append(
            Unit(unit.parameter, unit.name, unit.matrix, unit.rows, unit.columns, unit.parts, owner)
        )
    return owned


def _packed(units: Sequence[Unit], members: int, wire: torch.dtype, bucket_bytes: int) -> list[list[Unit]]:
    """Cut the list where an owner would hold more than ``bucket_bytes`` of whole matrices."""
    buckets: list[list[Unit]] = [[]]
    held = [0] * members
    for unit in units:
        size = unit.shape[0] * unit.shape[1] * wire.itemsize
        if buckets[-1] and held[unit.owner] + size > bucket_bytes:
            buckets.append([])
            held = [0] * members
        held[unit.owner] += size
        buckets[-1].append(unit)
    return buckets
