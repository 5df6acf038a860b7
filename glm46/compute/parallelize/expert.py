"""Expert parallelism: each rank of a group holds whole experts, and tokens are sent to them and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.compute.distributed.collectives import Exchange
from glm46.compute.model.dispatch import (
    combine_assignments,
    gather_assignments,
    pad_groups,
    pad_weights,
    sort_assignments,
)
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import Routing
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.exchange import ExchangeDispatcher, Planned
from glm46.compute.parallelize.two_level import TwoLevelDispatcher


def apply(
    model: Transformer,
    ep_mesh: DeviceMesh,
    hosts: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None,
    chunks: int = 1,
) -> None:
    """Shard the experts of every MoE layer over `ep_mesh` and dispatch tokens to them; in place. ``hosts``: as of
    `Meshes.expert_hosts`. ``chunks``: as of `Plan.exchange_chunks`."""
    group = ep_mesh.get_group()
    for module in model.modules():
        if isinstance(module, MoE):
            for name, parameter in list(module.experts.named_parameters()):
                whole_experts = distribute_tensor(parameter.data, ep_mesh, [Shard(0)])
                own = nn.Parameter(whole_experts, requires_grad=parameter.requires_grad)
                module.experts.register_parameter(name, own)
            if hosts is None:
                module.dispatcher = AllToAllDispatcher(group, chunks)
            else:
                module.dispatcher = TwoLevelDispatcher(group, *hosts, chunks)


class AllToAllDispatcher(ExchangeDispatcher):
    """Sends a row for each expert of a token."""

    def _plan(self, routing: Routing, num_experts: int) -> Planned:
        # Weight 0: dropped by padding or the capacity. Such assignments are sorted after all experts.
        expert_N = torch.where(routing.weights > 0, routing.experts, num_experts).flatten()
        order_N, place_N, sizes_E = sort_assignments(expert_N, num_experts + 1)
        return Planned(sizes_E[:num_experts].view(self._ranks, -1), (order_N, place_N.view_as(routing.experts)))

    def _sizes(self, own_RCX: Tensor, numbers_RCX: Tensor) -> list:
        of_both = torch.stack([own_RCX.sum(2), numbers_RCX.sum(2)]).cpu()
        return [part.tolist() for part in of_both.unbind(2)]

    def _send(self, x_TD: Tensor, routing: Routing, way: Any, numbers_RX: Tensor, sizes: Any) -> Any:
        (order_N, place_TA), (send, receive) = way, sizes
        order_N = order_N[: sum(send)]
        token_N = order_N // place_TA.shape[1]
        exchanges = tuple(Exchange(send, receive, self._group) for _ in range(2))
        of_rows = gather_assignments(x_TD, token_N, place_TA), routing.weights.flatten()[order_N]
        in_flight = tuple(exchange.start(each) for exchange, each in zip(exchanges, of_rows, strict=True))
        return in_flight, exchanges, numbers_RX, (token_N, place_TA)

    def _arrive(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        (x, weights), (rows, of_weights), received_RE, tokens = pending
        # Rows arrive in the order (rank, expert); a stable sort by expert gives (expert, rank).
        num_experts = received_RE.shape[1]
        expert_M = torch.arange(num_experts, device=received_RE.device).repeat(self._ranks)
        expert_M = expert_M.repeat_interleave(received_RE.flatten(), output_size=sum(rows.receive))
        by_expert_M, place_M, sizes_E = sort_assignments(expert_M, num_experts)
        offsets, weights_M = sizes_E.cumsum(0).to(torch.int32), of_weights.finish(weights)[by_expert_M]
        if self.multiple > 1:
            row_P, padded_M, offsets = pad_groups(len(by_expert_M), offsets, self.multiple)
            weights_M = pad_weights(weights_M, padded_M, len(row_P))
            by_expert_M, place_M = by_expert_M[row_P], padded_M[place_M]
        context = by_expert_M, place_M, rows.send, rows.receive, tokens
        return _Reorder.apply(rows.finish(x), by_expert_M, place_M), weights_M, offsets, context

    def _send_back(self, y_ND: Tensor, context: Any) -> Any:
        by_expert_M, place_M, send, receive, tokens = context
        back = Exchange(receive, send, self._group, "back")
        return back.start(_Reorder.apply(y_ND, place_M, by_expert_M)), back, tokens

    def _finish(self, returning: Any) -> Tensor:
        in_flight, back, tokens = returning
        return combine_assignments(back.finish(in_flight), *tokens)


class _Reorder(torch.autograd.Function):
    """Row n of the result is row order[n]; `inverse` has a place of each row, the only one whose gradient counts. The
    built-in backward of indexing adds rows in varying order.

    Neither is a saved tensor, for the reason given in `_Combine` of `compute/model/dispatch.py`."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.inverse), None, None
