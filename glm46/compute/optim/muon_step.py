"""One step of Muon over all parameters of this rank, in an order that overlaps communication with computation.

The first buckets are sent to their owners. Meanwhile the rank orthogonalises its local matrices, then each bucket
as it arrives. Momenta in host memory are copied in the same order. The order is determined once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.optim.compact_state import Quantized, State
from glm46.compute.optim.muon_exchange import BucketExchange
from glm46.compute.optim.muon_layout import local_gradient, local_matrices
from glm46.compute.optim.muon_plan import Bounds, LocalTask, MuonPlan, PlannedParameter, Unit
from glm46.compute.optim.muon_update import Orthogonalizer, Piece, update_whole
from glm46.compute.optim.newton_schulz import stack_limit
from glm46.compute.optim.rounding import entry_numbers
from glm46.compute.optim.state_offload import StatePlace, StateStream

# Buckets in transit while another one is orthogonalised; more would only take more memory.
BUCKETS_IN_FLIGHT = 2
WORKSPACE_BYTES = 1 << 30
"""Maximum memory of one stacked iteration."""

Slice = tuple[int, Bounds, Bounds]
"""Index of a parameter, and a range of its matrices and rows on this rank."""


class MuonStep:
    """Actions of a step, in order; ``run`` executes them."""

    def __init__(
        self,
        entries: Sequence[tuple[dict[str, Any], int]],
        requests: Sequence[PlannedParameter],
        plan: MuonPlan,
        orthogonalizer: Orthogonalizer,
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        momenta: Sequence[State],
        place: StatePlace,
        device: torch.device | None,
    ):
        """
        Args:
            entries: parameter group and index in it of each parameter.
            requests: requests that the plan was built from, one per parameter.
            groups: a process group for each set of ranks in the plan.
            momenta: this rank's part of each momentum, [matrices, rows, columns].
            place: where the momenta are between steps.
            device: device that computes the updates; None: device of each parameter.

        Raises:
            ValueError: offloaded momenta that several devices would update, or parameters updated on another device
                without offloaded momenta.
        """
        self._entries = entries
        self._requests = requests
        self._orthogonalizer = orthogonalizer
        self._parameters = [group["params"][index] for group, index in entries]
        self._views: list[tuple[Tensor, Tensor | None]] = []
        """During a step, this rank's parts of each parameter and its gradient as [matrices, rows, columns]."""
        self._actions: list[Callable[[], None]] = []
        self._slices_of_items: list[list[Slice]] = []
        """Parts of the momenta that each action takes, in the order of the actions that take any."""
        self._numbers = [
            entry_numbers(request.name, parameter).as_matrices() if _is_rounded(parameter, momentum) else None
            for request, parameter, momentum in zip(requests, self._parameters, momenta, strict=True)
        ]
        self._devices = [device or parameter.device for parameter in self._parameters]
        devices = set(self._devices)
        if place != "none" and len(devices) > 1:
            raise ValueError(f"state_offload takes parameters of one device, not of {devices}")
        are_elsewhere = device is not None and any(parameter.device != device for parameter in self._parameters)
        if place == "none" and are_elsewhere:
            raise ValueError(f"updates on {device} of parameters elsewhere need state_offload")
        exchanges = [
            BucketExchange(bucket, groups[bucket.ranks], orthogonalizer, self._devices[bucket.units[0].parameter])
            for bucket in plan.buckets
        ]
        self._arrange(exchanges, stack_tasks(plan.local, orthogonalizer, self._devices))
        items = [
            [momenta[number][slice(*matrices), slice(*rows)] for number, matrices, rows in slices]
            for slices in self._slices_of_items
        ]
        self._momentum_stream = StateStream(items, next(iter(devices), torch.device("cpu")), place)

    def run(self) -> None:
        """Update every parameter that has a gradient. Collective."""
        gradients = map(local_gradient, self._parameters)
        pairs = zip(map(local_matrices, self._parameters), gradients, strict=True)
        self._views = [(part, None if gradient is None else gradient.reshape(part.shape)) for part, gradient in pairs]
        self._momentum_stream.begin()
        for action in self._actions:
            action()
        self._momentum_stream.end()
        self._views = []

    def _arrange(self, exchanges: list[BucketExchange], chunks: list[list[LocalTask]]) -> None:
        remaining_chunks = iter(chunks)
        for exchange in exchanges[:BUCKETS_IN_FLIGHT]:
            self._add(self._gather, exchange, map(self._slice_of, exchange.units))
        for number, exchange in enumerate(exchanges):
            # Distribute chunks over the buckets, so that each exchange overlaps with some computation.
            self._add_chunks(islice(remaining_chunks, len(chunks) // len(exchanges)))
            self._actions.append(exchange.orthogonalize)
            if number:
                self._actions.append(exchanges[number - 1].finish)
            if number + BUCKETS_IN_FLIGHT < len(exchanges):
                next_exchange = exchanges[number + BUCKETS_IN_FLIGHT]
                self._add(self._gather, next_exchange, map(self._slice_of, next_exchange.units))
        self._add_chunks(remaining_chunks)
        if exchanges:
            self._actions.append(exchanges[-1].finish)

    def _add(self, action: Callable[[Any], None], subject: object, slices: Iterable[Slice]) -> None:
        """Append an action that takes the next momenta, the ones of ``slices``."""
        self._actions.append(partial(action, subject))
        self._slices_of_items.append(list(slices))

    def _add_chunks(self, chunks: Iterable[list[LocalTask]]) -> None:
        for chunk in chunks:
            self._add(self._update_chunk, chunk, ((task.parameter, task.matrices, task.rows) for task in chunk))

    def _slice_of(self, unit: Unit) -> Slice:
        """Return this rank's part of a sharded matrix."""
        mine = self._requests[unit.parameter].layout.mine
        first = max(unit.rows[0], mine.rows[0])
        stop = min(unit.rows[1], mine.rows[1])
        return unit.parameter, (unit.matrix, unit.matrix + 1), (first - mine.rows[0], stop - mine.rows[0])

    def _make_piece(self, part: Slice, momentum: State, shape: tuple[int, int]) -> Piece:
        """Build the piece of a part; ``shape``: rows and columns of the full matrices."""
        number, matrices, rows = part
        parameter, gradient = self._views[number]
        inside = slice(*matrices), slice(*rows)
        if gradient is not None:
            gradient = gradient[inside].to(self._devices[number], non_blocking=True)
        numbers = self._numbers[number]
        return Piece(
            group=self._entries[number][0],
            parameter=parameter[inside],
            gradient=gradient,
            momentum=momentum,
            rows=shape[0],
            columns=shape[1],
            numbers=None if numbers is None else numbers[inside],
        )

    def _gather(self, exchange: BucketExchange) -> None:
        with self._momentum_stream.take() as momenta:
            units = zip(exchange.units, momenta, strict=True)
            exchange.gather(
                {unit: self._make_piece(self._slice_of(unit), momentum, unit.shape) for unit, momentum in units}
            )

    def _update_chunk(self, chunk: list[LocalTask]) -> None:
        with self._momentum_stream.take() as momenta:
            pieces = [
                self._make_piece((task.parameter, task.matrices, task.rows), momentum, (task.row_count, task.columns))
                for task, momentum in zip(chunk, momenta, strict=True)
                if self._views[task.parameter][1] is not None
            ]
            if pieces:
                update_whole(pieces, self._orthogonalizer)


def _is_rounded(parameter: Tensor, momentum: State) -> bool:
    """Return whether an update rounds the parameter or its momentum to fewer bits than it is computed with."""
    wide = (torch.float32, torch.float64)
    return parameter.dtype not in wide or isinstance(momentum, Quantized) or momentum.dtype not in wide


def stack_tasks(
    tasks: Sequence[LocalTask], orthogonalizer: Orthogonalizer, devices: Sequence[torch.device]
) -> list[list[LocalTask]]:
    """Group tasks of equal shape, up to transposition, into chunks whose iteration fits the workspace; ``devices``:
    one per parameter."""
    tasks_by_shape: dict[tuple[int, int, torch.device], list[LocalTask]] = defaultdict(list)
    for task in tasks:
        short = min(task.row_count, task.columns)
        long = max(task.row_count, task.columns)
        tasks_by_shape[short, long, devices[task.parameter]].append(task)
    chunks: list[list[LocalTask]] = []
    for (short, long, device), same_shape in tasks_by_shape.items():
        # The stack, its normalised copy and two alternating results; two short x short products.
        limit = max(1, WORKSPACE_BYTES // (orthogonalizer.dtype.itemsize * (4 * short * long + 2 * short * short)))
        if device.type == "cpu":
            limit = min(limit, stack_limit(short, long, orthogonalizer.dtype))
        free = 0
        for task in same_shape:
            first, stop = task.matrices
            while first < stop:
                if not free:
                    chunks.append([])
                    free = limit
                chunk_stop = min(stop, first + free)
                chunks[-1].append(replace(task, matrices=(first, chunk_stop)))
                free -= chunk_stop - first
                first = chunk_stop
    return chunks
