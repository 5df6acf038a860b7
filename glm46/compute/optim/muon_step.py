"""One step of Muon over all parameters of this rank, in an order that overlaps communication with computation.

The first buckets are sent to their owners. Meanwhile the rank orthogonalises the matrices that it holds whole, then
each bucket as it arrives. Momenta in host memory are copied in the same order. The order is made once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.optim.compact_state import State
from glm46.compute.optim.muon_exchange import BucketExchange
from glm46.compute.optim.muon_layout import local_gradient, local_matrices
from glm46.compute.optim.muon_plan import Bounds, LocalTask, MuonPlan, PlannedParameter, Unit
from glm46.compute.optim.muon_update import Orthogonalizer, Piece, update_whole
from glm46.compute.optim.newton_schulz import stack_limit
from glm46.compute.optim.state_offload import StatePlace, StateStream

# Buckets that travel while another one is orthogonalised; more would only hold more memory.
BUCKETS_IN_FLIGHT = 2
WORKSPACE_BYTES = 1 << 30
"""Bound on the memory of one stacked iteration."""

Slice = tuple[int, Bounds, Bounds]
"""The number of a parameter, and some of its matrices and rows on this rank."""


class MuonStep:
    """The actions of a step, in order; ``run`` executes them."""

    def __init__(
        self,
        entries: Sequence[tuple[dict, int]],
        requests: Sequence[PlannedParameter],
        plan: MuonPlan,
        settings: Orthogonalizer,
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        momenta: Sequence[State],
        place: StatePlace,
        device: torch.device | None,
    ):
        """
        Args:
            entries: the parameter group and the place in it of each parameter.
            requests: the requests that the plan was made from, one per parameter.
            groups: a process group for each set of ranks in the plan.
            momenta: this rank's part of each momentum, [matrices, rows, columns].
            place: has the momenta between steps.
            device: computes the updates; None: that of each parameter.

        Raises:
            ValueError: offloaded momenta that several devices would update, or momenta of parameters that another
                device updates, but that are not offloaded.
        """
        self._entries, self._requests, self._settings = entries, requests, settings
        self._parameters = [group["params"][index] for group, index in entries]
        self._views: list[tuple[Tensor, Tensor | None]] = []
        """This rank's parts of each parameter and of its gradient as [matrices, rows, columns], in a step."""
        self._actions: list[Callable[[], None]] = []
        self._taken: list[list[Slice]] = []
        self._devices = [device or parameter.device for parameter in self._parameters]
        devices = set(self._devices)
        if place != "none" and len(devices) > 1:
            raise ValueError(f"state_offload takes parameters of one device, not of {devices}")
        if place == "none" and any(parameter.device != device for parameter in self._parameters if device):
            raise ValueError(f"updates on {device} of parameters elsewhere need state_offload")
        exchanges = [
            BucketExchange(bucket, groups[bucket.ranks], settings, self._devices[bucket.units[0].parameter])
            for bucket in plan.buckets
        ]
        self._arrange(exchanges, stack_tasks(plan.local, settings, self._devices))
        items = [
            [momenta[number][slice(*matrices), slice(*rows)] for number, matrices, rows in slices]
            for slices in self._taken
        ]
        self._momenta = StateStream(items, next(iter(devices), torch.device("cpu")), place)

    def run(self) -> None:
        """Update every parameter that has a gradient. Collective."""
        of_gradients = map(local_gradient, self._parameters)
        pairs = zip(map(local_matrices, self._parameters), of_gradients, strict=True)
        self._views = [(part, None if of is None else of.reshape(part.shape)) for part, of in pairs]
        self._momenta.begin()
        for action in self._actions:
            action()
        self._momenta.end()
        self._views = []

    def _arrange(self, exchanges: list[BucketExchange], chunks: list[list[LocalTask]]) -> None:
        rest = iter(chunks)
        for exchange in exchanges[:BUCKETS_IN_FLIGHT]:
            self._add(self._gather, exchange, map(self._slice_of, exchange.units))
        for number, exchange in enumerate(exchanges):
            # Spread over the buckets, so that each exchange overlaps with some computation.
            self._add_chunks(islice(rest, len(chunks) // len(exchanges)))
            self._actions.append(exchange.orthogonalize)
            if number:
                self._actions.append(exchanges[number - 1].finish)
            if number + BUCKETS_IN_FLIGHT < len(exchanges):
                following = exchanges[number + BUCKETS_IN_FLIGHT]
                self._add(self._gather, following, map(self._slice_of, following.units))
        self._add_chunks(rest)
        if exchanges:
            self._actions.append(exchanges[-1].finish)

    def _add(self, action: Callable, subject: object, slices: Iterable[Slice]) -> None:
        """An action that takes the next momenta, those of ``slices``."""
        self._actions.append(partial(action, subject))
        self._taken.append(list(slices))

    def _add_chunks(self, chunks: Iterable[list[LocalTask]]) -> None:
        for chunk in chunks:
            self._add(self._update_chunk, chunk, ((task.parameter, task.matrices, task.rows) for task in chunk))

    def _slice_of(self, unit: Unit) -> Slice:
        """This rank's part of a sharded matrix."""
        mine = self._requests[unit.parameter].layout.mine
        first, last = max(unit.rows[0], mine.rows[0]), min(unit.rows[1], mine.rows[1])
        return unit.parameter, (unit.matrix, unit.matrix + 1), (first - mine.rows[0], last - mine.rows[0])

    def _piece(self, part: Slice, momentum: State, shape: tuple[int, int]) -> Piece:
        """The views of a part; ``shape`` is that of the whole matrices."""
        number, matrices, rows = part
        parameter, gradient = self._views[number]
        inside = slice(*matrices), slice(*rows)
        if gradient is not None:
            gradient = gradient[inside].to(self._devices[number], non_blocking=True)
        return Piece(self._entries[number][0], parameter[inside], gradient, momentum, *shape)

    def _gather(self, exchange: BucketExchange) -> None:
        with self._momenta.take() as momenta:
            units = zip(exchange.units, momenta, strict=True)
            exchange.gather({unit: self._piece(self._slice_of(unit), m, unit.shape) for unit, m in units})

    def _update_chunk(self, chunk: list[LocalTask]) -> None:
        with self._momenta.take() as momenta:
            pieces = [
                self._piece((task.parameter, task.matrices, task.rows), m, (task.rows[1] - task.rows[0], task.columns))
                for task, m in zip(chunk, momenta, strict=True)
                if self._views[task.parameter][1] is not None
            ]
            if pieces:
                update_whole(pieces, self._settings)


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
