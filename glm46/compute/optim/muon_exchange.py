"""Exchange of one bucket: parts are sent to owners, owners orthogonalise, parts of the update are sent back.

Each direction is one all-to-all without padding, and no rank sends to itself. Parts are packed in the order of the
bucket's units, which every rank knows, so no metadata is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.groups import new_group
from glm46.compute.optim.muon_plan import Bucket, Unit
from glm46.compute.optim.muon_update import Orthogonalizer, Piece


def make_groups(
    rank_sets: Sequence[tuple[int, ...]], existing: Sequence[dist.ProcessGroup]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create a process group for each set of ascending ranks; groups in ``existing`` are reused.

    Collective over all ranks, including those that need no group: with NCCL torch splits each group off the
    communicator of all ranks, in which every rank must take part. So each rank creates all groups, in the same order.
    """
    if not dist.is_initialized():
        return {}
    groups = {tuple(dist.get_process_group_ranks(group)): group for group in existing}
    missing: list[set[tuple[int, ...]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(missing, set(rank_sets) - groups.keys())
    return groups | {ranks: new_group(ranks) for ranks in sorted(set().union(*missing))}


class BucketExchange:
    """Exchange of a bucket on this rank; call ``gather``, ``orthogonalize`` and ``finish`` in turn, once per step."""

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, orthogonalize: Orthogonalizer, device: torch.device):
        self._bucket = bucket
        self._group = group
        self._device = device
        self._orthogonalize = orthogonalize
        self._me = dist.get_group_rank(group, dist.get_rank())
        self._owned = [unit for unit in bucket.units if unit.owner == self._me]
        members = range(len(bucket.ranks))
        # (peer, unit) in the order in which parts are packed: by peer, then by unit.
        foreign = sorted((unit for unit in bucket.units if unit.owner != self._me), key=lambda unit: unit.owner)
        self._leaving = [(unit.owner, unit) for unit in foreign if unit.sends(self._me)]
        self._coming = [(peer, unit) for peer in members for unit in self._owned if peer in unit.senders]
        self._leaving_back = [(peer, unit) for peer in members for unit in self._owned if unit.receives(peer)]
        self._coming_back = [(unit.owner, unit) for unit in foreign if unit.receives(self._me)]
        self._work: Any = None  # handle of the running exchange
        self._units_by_shape: dict[tuple[int, int], list[Unit]] = {}
        for unit in self._owned:
            self._units_by_shape.setdefault((min(unit.shape), max(unit.shape)), []).append(unit)

    @property
    def units(self) -> list[Unit]:
        """Units of which this rank holds a part."""
        return [unit for unit in self._bucket.units if unit.parts[self._me] is not None]

    def gather(self, pieces: dict[Unit, Piece]) -> None:
        """Update the momentum of the local parts, and start to send what is orthogonalised to its owners. Collective.

        ``pieces``: a piece for each of ``units``, in the same order.
        """
        sent_dtype = self._orthogonalize.dtype
        self._pieces = pieces
        self._stacks = {
            shape: torch.empty(len(units), *shape, dtype=sent_dtype, device=self._device)
            for shape, units in self._units_by_shape.items()
        }
        self._matrix_of_unit = {
            unit: matrix if unit.shape == tuple(matrix.shape) else matrix.mT
            for shape, units in self._units_by_shape.items()
            for unit, matrix in zip(units, self._stacks[shape], strict=True)
        }
        slots, send, out_sizes = self._slots(self._leaving, lambda _, unit: unit.size(self._me), sent_dtype)
        slot_of = {unit: slot for slot, (_, unit) in zip(slots, self._leaving, strict=True)}
        for unit, piece in self._pieces.items():
            direction = None if piece.gradient is None else piece.direction()
            if unit.owner == self._me:
                target = _within(self._matrix_of_unit[unit], unit, self._me)
            elif unit in slot_of:
                target = slot_of[unit].view(piece.parameter.shape[1:])
            else:
                continue  # another rank sends the same part; the momentum of this replica is updated
            if direction is None:
                target.zero_()
            else:
                target.copy_(direction[0].to(sent_dtype))
        self._arrivals, receive, in_sizes = self._slots(self._coming, lambda peer, unit: unit.size(peer), sent_dtype)
        self._exchange(receive, send, in_sizes, out_sizes)

    def orthogonalize(self) -> None:
        """Wait for the parts of the owned matrices, orthogonalise them and start to send the updates. Collective."""
        self._work.wait()
        for slot, (source, unit) in zip(self._arrivals, self._coming, strict=True):
            target = _within(self._matrix_of_unit[unit], unit, source)
            target.copy_(slot.view(target.shape))
        updates = {}
        for shape, units in self._units_by_shape.items():
            for unit, update in zip(units, self._orthogonalize(self._stacks[shape]), strict=True):
                updates[unit] = update if unit.shape == tuple(update.shape) else update.mT
        self._matrix_of_unit = {}
        self._stacks = {}
        sent_dtype = self._orthogonalize.dtype
        slots, send, out_sizes = self._slots(self._leaving_back, lambda peer, unit: unit.size(peer), sent_dtype)
        for slot, (peer, unit) in zip(slots, self._leaving_back, strict=True):
            part = _within(updates[unit], unit, peer)
            slot.view(part.shape).copy_(part)
        for unit in self._owned:
            self._apply(unit, _within(updates[unit], unit, self._me))
        self._arrivals, receive, in_sizes = self._slots(
            self._coming_back, lambda _, unit: unit.size(self._me), sent_dtype
        )
        self._exchange(receive, send, in_sizes, out_sizes)

    def finish(self) -> None:
        """Wait for the updates of the local parts and apply them."""
        self._work.wait()
        for slot, (_, unit) in zip(self._arrivals, self._coming_back, strict=True):
            self._apply(unit, slot.view(self._pieces[unit].parameter.shape[1:]))
        self._pieces = {}
        self._arrivals = ()
        self._work = None
        self._buffers: tuple[Tensor, ...] = ()

    def _apply(self, unit: Unit, update: Tensor) -> None:
        if self._pieces[unit].gradient is not None:
            self._pieces[unit].apply(update.unsqueeze(0))

    def _slots(
        self, entries: list[tuple[int, Unit]], size: Callable[[int, Unit], int], dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], Tensor, list[int]]:
        """Allocate a flat buffer; return a slice for each of ``entries``, the buffer, and its elements for each rank of
        the group."""
        sizes = [size(peer, unit) for peer, unit in entries]
        by_rank = [0] * len(self._bucket.ranks)
        for (peer, _), entry_size in zip(entries, sizes, strict=True):
            by_rank[peer] += entry_size
        buffer = torch.empty(sum(sizes), dtype=dtype, device=self._device)
        return buffer.split(sizes), buffer, by_rank

    def _exchange(self, receive: Tensor, send: Tensor, in_sizes: list[int], out_sizes: list[int]) -> None:
        self._buffers = (receive, send)  # must exist until the exchange ends
        self._work = dist.all_to_all_single(receive, send, in_sizes, out_sizes, group=self._group, async_op=True)


def _within(matrix: Tensor, unit: Unit, rank: int) -> Tensor:
    part = unit.parts[rank]
    assert part is not None, "the rank holds none"
    (first_row, row_stop), (first_column, column_stop) = part
    return matrix[first_row:row_stop, first_column:column_stop]
