"""The order in which tokens travel to experts on other ranks and back: all at once, or in two chunks, so that the rows
of one travel while the experts compute the other.

Backward runs the same in reverse, because an `Exchange` sends its gradient where it was finished.
"""

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
    """For `ExchangeDispatcher.send`."""


class ExchangeDispatcher:
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    Rows dropped by padding or the capacity are not sent. Experts see the rows of a chunk in the order (expert, rank,
    token), so that results do not depend on timing. Subclasses have the steps of one chunk, here in their order.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int = 1):
        self._group, self._ranks, self._chunks = group, dist.get_world_size(group), chunks
        self.multiple = 1

    def plan(self, routing: Routing, num_experts: int) -> Planned:
        """Sort what this rank sends."""
        raise NotImplementedError

    def sizes(self, own_RCX: Tensor, numbers_RCX: Tensor) -> list:
        """The sizes of the buffers of each chunk, from `Planned.numbers_RX` of this rank and those that others have for
        it. Waits for the device."""
        raise NotImplementedError

    def send(self, x_TD: Tensor, routing: Routing, way: Any, numbers_RX: Tensor, sizes: Any) -> Any:
        """Start sending rows. Tensors of the result are in tuples, where FSDP2 finds them."""
        raise NotImplementedError

    def pass_on(self, pending: Any) -> Any:
        """Send rows that came from another host on to the ranks of this one."""
        return pending

    def arrive(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """As `TokenDispatcher.arrived`, of one chunk."""
        raise NotImplementedError

    def send_back(self, y_ND: Tensor, context: Any) -> Any:
        """Start returning the results of experts."""
        raise NotImplementedError

    def pass_back(self, returning: Any) -> Any:
        """Send the results of this host back to another one."""
        return returning

    def finish(self, returning: Any) -> Tensor:
        """The sum of each token's experts, [T, D]."""
        raise NotImplementedError

    @torch.compiler.disable
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """See `TokenDispatcher.start`. Collective."""
        parts = zip(routing.weights.tensor_split(self._chunks), routing.experts.tensor_split(self._chunks), strict=True)
        routings = [Routing(*part, None) for part in parts]
        planned = [self.plan(part, num_experts) for part in routings]
        numbers_RCX, sizes = recalled(lambda: self._exchange(torch.stack([each.numbers_RX for each in planned], 1)))
        chunks = zip(x_TD.tensor_split(self._chunks), routings, planned, numbers_RCX.unbind(1), sizes, strict=True)
        return tuple(self.send(x, part, each.way, *of_chunk) for x, part, each, *of_chunk in chunks)

    def _exchange(self, own_RCX: Tensor) -> tuple[Tensor, list]:
        one_each = [1] * self._ranks
        numbers_RCX = exchange_rows(own_RCX, one_each, one_each, self._group)
        # sync: the sizes of the buffers must be known on the host; once per layer, for all chunks, and not again in a
        # recomputation.
        return numbers_RCX, self.sizes(own_RCX, numbers_RCX)

    @torch.compiler.disable
    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; of the first chunk, for the experts of this rank. Collective."""
        first, *others = pending
        *rows, context = self.arrive(self.pass_on(first))
        return *rows, (context, others)

    def rest(self, context: Any) -> tuple:
        """See `TokenDispatcher.rest`."""
        return (self._compute_rest, context) if context[1] else ()

    @torch.compiler.disable(recursive=False)
    def _compute_rest(self, y_ND: Tensor, in_flight: Any, experts: Callable[..., Tensor]) -> tuple:
        """Send a chunk back, and compute the next ones while it travels. Rows that change from one link to the other
        wait for a moment before the experts of the next chunk, so that both links are in use meanwhile. Collective."""
        context, others = in_flight
        returning = [self.send_back(y_ND, context)]
        for pending in others:
            passed = self.pass_on(pending)
            returning[-1] = self.pass_back(returning[-1])
            *rows, context = self.arrive(passed)
            returning.append(self.send_back(experts(*rows), context))
        return *returning[:-1], self.pass_back(returning[-1])

    @torch.compiler.disable
    def combine(self, y: Any, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        if not context[1]:
            return self.finish(self.pass_back(self.send_back(y, context[0])))
        return torch.cat([self.finish(each) for each in y])
