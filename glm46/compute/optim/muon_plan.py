"""The owner of each matrix of Muon, decided once from shapes and placements: the same plan on every rank, never saved.

* local: a matrix that a rank holds whole is updated there, without communication;
* owner: a sharded matrix has one owner among the ranks that hold a part. It collects the parts, orthogonalises the
  matrix and returns the parts of the update.

Training makes it here from DTensors (`compute/optim/muon_layout.py`), the estimate from the degrees of a layout
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
"""Bound on the whole matrices that one owner collects at a time, in the type in which they travel."""

Bounds = tuple[int, int]
"""Start and stop of consecutive indices."""
Cut = tuple[int, int]
"""An axis of a mesh and the dimension (of first, rows, columns) that it divides, in torch's uneven chunks: the last
ones are shorter, or empty."""


@dataclass(frozen=True)
class Holding:
    """The part of a tensor [matrices, rows, columns] that one rank holds: consecutive indices of each dimension."""

    batch: Bounds
    rows: Bounds
    columns: Bounds


@dataclass(frozen=True)
class TensorLayout:
    """The part of one parameter that each rank of its mesh holds.

    ``ranks`` are the ranks, ascending, that hold parts of the same matrices as this rank, replicas included. A plain
    tensor has none.
    """

    shape: tuple[int, int, int]
    mine: Holding
    holdings: dict[int, Holding]
    ranks: tuple[int, ...]


def mesh_layout(
    sizes: tuple[int, int, int], inner: int, mesh: Sequence[int], ranks: Sequence[int], cuts: Sequence[Cut], me: int
) -> TensorLayout:
    """The layout of a tensor on a mesh.

    Args:
        sizes: of the first dimension (1 for a matrix), rows and columns.
        inner: matrices for each index of the first dimension.
        mesh: ranks on each of its axes.
        ranks: of the mesh, the last axis fastest.
        cuts: in the order in which they apply.
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
    sharing = tuple(sorted(rank for rank, holding in holdings.items() if holding.batch == mine.batch))
    return TensorLayout((sizes[0] * inner, *sizes[1:]), mine, holdings, sharing)


def _chunk(bounds: Bounds, ranks: int, rank: int) -> Bounds:
    start, stop = bounds
    each = -(-(stop - start) // ranks)
    first = start + rank * each
    return (first, min(first + each, stop)) if first < stop else (0, 0)


@dataclass(frozen=True)
class PlannedParameter:
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

    def sends(self, member: int) -> bool:
        """True if this rank is among the `senders`, without the cost of finding all of them."""
        part = self.parts[member]
        return part is not None and part != self.parts[self.owner] and self.parts.index(part) == member

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


def make_plan(requests: Sequence[PlannedParameter], steps: int, width: int) -> MuonPlan:
    """The plan of this rank.

    Args:
        requests: one per parameter, in the same order on all ranks that share it.
        steps: iterations of Newton-Schulz, which decide the cost of a matrix.
        width: bytes of an entry on its way.
    """
    local: list[LocalTask] = []
    cut: dict[tuple[int, ...], list[Unit]] = defaultdict(list)
    known: dict[tuple[int, Bounds], tuple] = {}  # equal layers share their layouts
    for index, request in enumerate(requests):
        layout, columns = request.layout, request.layout.shape[2]
        ranks = layout.ranks
        stop = 0
        for height in request.row_blocks:
            rows, stop = (stop, stop + height), stop + height
            whole = ((0, height), (0, columns))
            if (id(layout), rows) not in known:
                known[id(layout), rows] = tuple(_part(layout.holdings[rank], rows) for rank in ranks)
            parts = known[id(layout), rows]
            if not ranks or whole in parts:
                if _part(layout.mine, rows) == whole:
                    first = rows[0] - layout.mine.rows[0]
                    matrices = (0, layout.mine.batch[1] - layout.mine.batch[0])
                    local.append(LocalTask(index, matrices, (first, first + height), columns))
                continue
            flops = newton_schulz_flops(height, columns, steps)
            for matrix in range(layout.mine.batch[1] - layout.mine.batch[0]):
                cut[ranks].append(Unit(index, request.name, matrix, rows, columns, parts, flops))
    buckets: list[Bucket] = []
    # Small groups first, then by rank numbers: with one order for all ranks, no two wait for each other.
    for ranks in sorted(cut, key=lambda ranks: (len(ranks), ranks)):
        owned = _with_owners(cut[ranks], len(ranks))
        packed = _packed(owned, len(ranks), BUCKET_BYTES // width)
        buckets += [Bucket(ranks, tuple(units)) for units in packed]
    return MuonPlan(tuple(local), tuple(buckets))


def _with_owners(units: Sequence[Unit], members: int) -> list[Unit]:
    """Give each matrix to the least loaded rank that holds a part of it, the most expensive matrices first."""
    loads = [0] * members
    holders: dict[int, list[tuple[int, int]]] = {}  # by parts: a heap of load and member; loads may be older ones
    owned = []
    for unit in sorted(units, key=lambda unit: (-unit.flops, unit.parameter, unit.matrix, unit.rows)):
        heap = holders.get(id(unit.parts))
        if heap is None:
            heap = holders[id(unit.parts)] = [(loads[m], m) for m in range(members) if unit.parts[m] is not None]
            heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:  # loads only grow, so the first one that is not old is the least
            heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        owner = heap[0][1]
        loads[owner] += unit.flops
        # `replace` takes several times as long, and there are as many as matrices.
        owned.append(Unit(**vars(unit) | {"owner": owner}))
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
