"""The order in which tokens travel to experts on other ranks and back: all at once, or in two chunks, so that the rows
of one travel while the experts compute the other.

Backward runs the same in reverse, because an `Exchange` sends its gradient where it was finished.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collectives import exchange_rows
from glm46.compute.distributed.recomputation import recalled
from glm46.compute.model.router import Routing


class Planned(NamedTuple):
    """The way of one chunk, before the sizes of others are known."""

    numbers_RX: Tensor
    """int64: X numbers for each rank."""
    way: Any


class ExchangeDispatcher(ABC):
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    Rows dropped by padding or the capacity are not sent. Experts see the rows of a chunk in the order (expert, rank,
    token), so that results do not depend on timing. Subclasses have the steps of one chunk, here in their order.
    Tensors of what they return are in tuples, where FSDP2 finds them.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int = 1):
        self._group, self._ranks, self._chunks = group, dist.get_world_size(group), chunks
        self.multiple = 1

    @abstractmethod
    def _plan(self, routing: Routing, num_experts: int) -> Planned:
        """Sort what this rank sends."""

    @abstractmethod
    def _sizes(self, own_RCX: Tensor, numbers_RCX: Tensor) -> list:
        """The sizes of the buffers of each chunk, from `Planned.numbers_RX` of this rank and those that others have for
        it. Waits for the device."""

    @abstractmethod
    def _send(self, x_TD: Tensor, routing: Routing, way: Any, numbers_RX: Tensor, sizes: Any) -> Any:
        """Start sending rows."""

    def _pass_on(self, pending: Any) -> Any:
        return pending  # rows that came from another host go on to the ranks of this one

    @abstractmethod
    def _arrive(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """As `TokenDispatcher.arrived`."""

    @abstractmethod
    def _send_back(self, y_ND: Tensor, context: Any) -> Any:
        """Start returning the results of experts."""

    def _pass_back(self, returning: Any) -> Any:
        return returning  # the results of this host go back to another one

    @abstractmethod
    def _finish(self, returning: Any) -> Tensor:
        """The sum of each token's experts, [T, D]."""

    @torch.compiler.disable
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """See `TokenDispatcher.start`. Collective."""
        parts = zip(routing.weights.tensor_split(self._chunks), routing.experts.tensor_split(self._chunks), strict=True)
        routings = [Routing(*part, None) for part in parts]
        planned = [self._plan(part, num_experts) for part in routings]
        numbers_RCX, sizes = recalled(lambda: self._exchange(torch.stack([each.numbers_RX for each in planned], 1)))
        chunks = zip(x_TD.tensor_split(self._chunks), routings, planned, numbers_RCX.unbind(1), sizes, strict=True)
        return tuple(self._send(x, part, each.way, *of_chunk) for x, part, each, *of_chunk in chunks)

    def _exchange(self, own_RCX: Tensor) -> tuple[Tensor, list]:
        one_each = [1] * self._ranks
        numbers_RCX = exchange_rows(own_RCX, one_each, one_each, self._group)
        # sync: the sizes of the buffers must be known on the host; once per layer, for all chunks, and not again in a
        # recomputation.
        return numbers_RCX, self._sizes(own_RCX, numbers_RCX)

    @torch.compiler.disable
    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; of the first chunk, for the experts of this rank. Collective."""
        first, *others = pending
        *rows, context = self._arrive(self._pass_on(first))
        return *rows, (context, others, [])

    def rest(self, context: Any) -> tuple:
        """See `TokenDispatcher.rest`."""
        return (self, context) if context[1] else ()

    @torch.compiler.disable
    def halfway(self, in_flight: Any) -> Any:
        """What changes from one link to the other does so between two products of another chunk. Collective."""
        context, others, returning = in_flight
        passed = [self._pass_on(each) for each in others[:1]]
        returned = [self._pass_back(each) for each in returning[-1:]]
        return context, passed + others[1:], returning[:-1] + returned

    @torch.compiler.disable
    def proceed(self, y_ND: Tensor, in_flight: Any, experts: Callable) -> Any:
        """Send a chunk back, and let the experts compute the next one while it travels. Collective."""
        context, others, returning = in_flight
        returning = [*returning, self._send_back(y_ND, context)]
        if not others:
            return *returning[:-1], self._pass_back(returning[-1])
        *rows, context = self._arrive(others[0])
        return experts(*rows, self, (context, others[1:], returning))

    @torch.compiler.disable
    def combine(self, y: Any, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        context, others, _ = context
        if not others:
            return self._finish(self._pass_back(self._send_back(y, context)))
        return torch.cat([self._finish(each) for each in y])
