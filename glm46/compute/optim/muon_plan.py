"""Plan of Muon: the owner of each matrix, decided once from shapes and placements. The plan is the same on every rank
and never saved.

* local: a matrix that a rank holds entirely is updated there, without communication;
* owner: a sharded matrix has one owner among the ranks that hold a part. It collects the parts, orthogonalises the
  matrix and returns the parts of the update.

Training builds the layouts from DTensors (`compute/optim/muon_layout.py`), the estimate from the degrees of a layout
(`operate/estimate/muon_cost.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import product

from glm46.run.flops import newton_schulz_flops

BUCKET_BYTES = 256 << 20
"""Maximum bytes of full matrices that one owner collects at a time, in the dtype of the exchange."""

Bounds = tuple[int, int]
"""Start and stop of consecutive indices."""
Cut = tuple[int, int]
"""Axis of a mesh and the dimension (of first, rows, columns) that it divides, in torch's uneven chunks: the last chunks
are shorter, or empty."""


@dataclass(frozen=True)
class Holding:
    """Part of a tensor [matrices, rows, columns] that one rank holds: consecutive indices of each dimension."""

    batch: Bounds
    rows: Bounds
    columns: Bounds


@dataclass(frozen=True)
class TensorLayout:
    """Part of one parameter that each rank of its mesh holds.

    ``ranks`` are the ranks, ascending, that hold parts of the same matrices as this rank, including replicas; empty for
    a plain tensor.
    """

    shape: tuple[int, int, int]
    mine: Holding
    holdings: dict[int, Holding]
    ranks: tuple[int, ...]


def mesh_layout(
    sizes: tuple[int, int, int], inner: int, mesh: Sequence[int], ranks: Sequence[int], cuts: Sequence[Cut], me: int
) -> TensorLayout:
    """Compute the layout of a tensor on a mesh.

    Args:
        sizes: sizes of the first dimension (1 for a matrix), rows and columns.
        inner: number of matrices for each index of the first dimension.
        mesh: number of ranks on each axis of the mesh.
        ranks: ranks of the mesh, the last axis fastest.
        cuts: cuts in the order in which they apply.
        me: this rank.
    """
    holdings = {}
    for rank, coordinate in zip(ranks, product(*map(range, mesh)), strict=True):
        bounds = [(0, size) for size in sizes]
        for axis, dim in cuts:
            bounds[dim] = _chunk(bounds[dim], mesh[axis], coordinate[axis])
        first, rows, columns = bounds
        holdings[rank] = Holding((first[0] * inner, first[1] * inner), rows, columns)
    mine = holdings[me]
    sharing_ranks = tuple(sorted(rank for rank, holding in holdings.items() if holding.batch == mine.batch))
    return TensorLayout((sizes[0] * inner, *sizes[1:]), mine, holdings, sharing_ranks)


def _chunk(bounds: Bounds, ranks: int, rank: int) -> Bounds:
    start, stop = bounds
    chunk_size = -(-(stop - start) // ranks)
    first = start + rank * chunk_size
    return (first, min(first + chunk_size, stop)) if first < stop else (0, 0)


@dataclass(frozen=True)
class PlannedParameter:
    """Parameter as input of the plan."""

    name: str
    layout: TensorLayout
    row_blocks: tuple[int, ...]


@dataclass(frozen=True)
class LocalTask:
    """Matrices of one block of rows of one parameter, entirely on this rank; ``matrices`` and ``rows`` are local
    indices."""

    parameter: int
    matrices: Bounds
    rows: Bounds
    columns: int

    @property
    def matrix_count(self) -> int:
        return self.matrices[1] - self.matrices[0]

    @property
    def row_count(self) -> int:
        """Rows of each matrix."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Unit:
    """Matrix that is sharded over the ranks of a group.

    ``matrix`` is an index in the local batch, ``rows`` are indices of the full tensor. ``parts[i]`` are the rows
    (within this matrix) and columns that rank i of the group holds, None without a part.
    """

    parameter: int
    name: str
    matrix: int
    rows: Bounds
    columns: int
    parts: tuple[tuple[Bounds, Bounds] | None, ...]
    flops: int
    owner: int = -1
    """Index of the owner in the group; -1 before `_with_owners`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the full matrix."""
        return self.rows[1] - self.rows[0], self.columns

    def size(self, member: int) -> int:
        """Count the entries that a rank of the group holds."""
        part = self.parts[member]
        return 0 if part is None else (part[0][1] - part[0][0]) * (part[1][1] - part[1][0])

    @cached_property
    def senders(self) -> frozenset[int]:
        """Ranks that send their part to the owner: the first rank with each part."""
        first = {part: member for member, part in reversed(list(enumerate(self.parts)))}
        return frozenset(first[part] for part in first if part is not None and part != self.parts[self.owner])

    def sends(self, member: int) -> bool:
        """Return whether this rank is among the `senders`, without computing all of them."""
        part = self.parts[member]
        return part is not None and part != self.parts[self.owner] and self.parts.index(part) == member

    def receives(self, member: int) -> bool:
        """Return whether this rank gets its part of the update from the owner."""
        return self.parts[member] is not None and member != self.owner


@dataclass(frozen=True)
class Bucket:
    """Units of one group of ranks that are exchanged together."""

    ranks: tuple[int, ...]
    units: tuple[Unit, ...]

    def owner_rank(self, unit: Unit) -> int:
        """Return the global rank of a unit's owner."""
        return self.ranks[unit.owner]


@dataclass(frozen=True)
class MuonPlan:
    """Static plan of one rank. Buckets are the same on all ranks of their group."""

    local: tuple[LocalTask, ...]
    buckets: tuple[Bucket, ...]


def _part(holding: Holding, rows: Bounds) -> tuple[Bounds, Bounds] | None:
    """Return the part of a holding within the block ``rows``: its rows, relative to the block, and columns; None if
    empty."""
    start = max(holding.rows[0], rows[0])
    stop = min(holding.rows[1], rows[1])
    if start >= stop or holding.columns[0] >= holding.columns[1]:
        return None
    return (start - rows[0], stop - rows[0]), holding.columns


def make_plan(requests: Sequence[PlannedParameter], steps: int, width: int) -> MuonPlan:
    """Build the plan of this rank.

    Args:
        requests: one per parameter, in the same order on all ranks that share it.
        steps: iterations of Newton-Schulz, which determine the cost of a matrix.
        width: bytes of an entry in the exchange.
    """
    local: list[LocalTask] = []
    sharded_units: dict[tuple[int, ...], list[Unit]] = defaultdict(list)
    parts_of_layout: dict[
        tuple[int, Bounds], tuple[tuple[Bounds, Bounds] | None, ...]
    ] = {}  # equal layers share their layouts
    for index, request in enumerate(requests):
        layout = request.layout
        columns = request.layout.shape[2]
        ranks = layout.ranks
        next_row = 0
        for height in request.row_blocks:
            rows = (next_row, next_row + height)
            next_row += height
            full_part = ((0, height), (0, columns))
            if (id(layout), rows) not in parts_of_layout:
                parts_of_layout[id(layout), rows] = tuple(_part(layout.holdings[rank], rows) for rank in ranks)
            parts = parts_of_layout[id(layout), rows]
            # A plain tensor, or one whose ranks hold these rows entirely or not at all.
            if not ranks or full_part in parts:
                if _part(layout.mine, rows) == full_part:
                    first = rows[0] - layout.mine.rows[0]
                    matrices = (0, layout.mine.batch[1] - layout.mine.batch[0])
                    local.append(LocalTask(index, matrices, (first, first + height), columns))
                continue
            flops = newton_schulz_flops(height, columns, steps)
            for matrix in range(layout.mine.batch[1] - layout.mine.batch[0]):
                sharded_units[ranks].append(Unit(index, request.name, matrix, rows, columns, parts, flops))
    buckets: list[Bucket] = []
    # Small groups first, then by rank numbers: the same order on all ranks avoids deadlocks.
    for ranks in sorted(sharded_units, key=lambda ranks: (len(ranks), ranks)):
        owned = _with_owners(sharded_units[ranks], len(ranks))
        packed = _packed(owned, len(ranks), BUCKET_BYTES // width)
        buckets += [Bucket(ranks, tuple(units)) for units in packed]
    return MuonPlan(tuple(local), tuple(buckets))


def _with_owners(units: Sequence[Unit], members: int) -> list[Unit]:
    """Assign each matrix to the least loaded rank that holds a part of it, the most expensive matrices first."""
    loads = [0] * members
    holders: dict[int, list[tuple[int, int]]] = {}  # by parts: a heap of (load, member); loads may be outdated
    owned = []
    for unit in sorted(units, key=lambda unit: (-unit.flops, unit.parameter, unit.matrix, unit.rows)):
        heap = holders.get(id(unit.parts))
        if heap is None:
            heap = holders[id(unit.parts)] = [(loads[m], m) for m in range(members) if unit.parts[m] is not None]
            heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:  # loads only grow, so the first up-to-date load is the minimum
            heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        owner = heap[0][1]
        loads[owner] += unit.flops
        # `replace` takes several times as long, and this runs once per matrix.
        owned.append(Unit(**vars(unit) | {"owner": owner}))
    return owned


def _packed(units: Sequence[Unit], members: int, max_entries: int) -> list[list[Unit]]:
    """Pack units into buckets in which no owner holds more than this many entries of full matrices."""
    buckets: list[list[Unit]] = [[]]
    held_entries = [0] * members
    for unit in units:
        size = unit.shape[0] * unit.shape[1]
        if buckets[-1] and held_entries[unit.owner] + size > max_entries:
            buckets.append([])
            held_entries = [0] * members
        held_entries[unit.owner] += size
        buckets[-1].append(unit)
    return buckets
