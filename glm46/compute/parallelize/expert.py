"""Expert parallelism: each rank of a group holds whole experts, and tokens are sent to them and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.compute.distributed.collectives import Exchange, exchange_rows
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
from glm46.compute.parallelize.two_level import TwoLevelDispatcher


def apply(
    model: Transformer,
    ep_mesh: DeviceMesh,
    hosts: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None,
) -> None:
    """Shard the experts of every MoE layer over `ep_mesh` and dispatch tokens to them; in place. ``hosts``: as of
    `Meshes.expert_hosts`."""
    group = ep_mesh.get_group()
    for module in model.modules():
        if isinstance(module, MoE):
            for name, parameter in list(module.experts.named_parameters()):
                whole_experts = distribute_tensor(parameter.data, ep_mesh, [Shard(0)])
                own = nn.Parameter(whole_experts, requires_grad=parameter.requires_grad)
                module.experts.register_parameter(name, own)
            module.dispatcher = AllToAllDispatcher(group) if hosts is None else TwoLevelDispatcher(group, *hosts)


class AllToAllDispatcher:
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    Rows dropped by padding or the capacity are not sent. Experts see their rows in the order (expert, rank, token), so
    that results do not depend on timing.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._ranks = group, dist.get_world_size(group)
        self.multiple = 1

    @torch.compiler.disable
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """See `TokenDispatcher.start`. Collective."""
        T, A = routing.experts.shape
        # Weight 0: dropped by padding or the capacity. Such assignments are sorted after all experts.
        expert_N = torch.where(routing.weights > 0, routing.experts, num_experts).flatten()
        order_N, place_N, sizes_E = sort_assignments(expert_N, num_experts + 1)
        place_TA, sizes_E = place_N.view(T, A), sizes_E[:num_experts]
        local_experts = [num_experts // self._ranks] * self._ranks
        local_sizes = Exchange(sizes_E, local_experts, local_experts, self._group).finish()
        sent_RE, received_RE = sizes_E.view(self._ranks, -1), local_sizes.view(self._ranks, -1)
        # sync: the sizes of the buffers must be known on the host, once per layer.
        send, receive = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).cpu().tolist()

        order_N = order_N[: sum(send)]
        token_N = order_N // A
        rows = Exchange(gather_assignments(x_TD, token_N, place_TA), send, receive, self._group)
        weights = Exchange(routing.weights.flatten()[order_N], send, receive, self._group)
        return rows, weights, received_RE, (token_N, place_TA, send, receive)

    @torch.compiler.disable
    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; offsets cover the experts of this rank."""
        rows, weights, received_RE, (token_N, place_TA, send, receive) = pending
        # Rows arrive in the order (rank, expert); a stable sort by expert gives (expert, rank).
        num_experts = received_RE.shape[1]
        expert_M = torch.arange(num_experts, device=received_RE.device).repeat(self._ranks)
        expert_M = expert_M.repeat_interleave(received_RE.flatten(), output_size=sum(receive))
        by_expert_M, place_M, sizes_E = sort_assignments(expert_M, num_experts)
        offsets, weights_M = sizes_E.cumsum(0).to(torch.int32), weights.finish()[by_expert_M]
        if self.multiple > 1:
            row_P, padded_M, offsets = pad_groups(len(by_expert_M), offsets, self.multiple)
            weights_M = pad_weights(weights_M, padded_M, len(row_P))
            by_expert_M, place_M = by_expert_M[row_P], padded_M[place_M]
        context = (token_N, place_TA, by_expert_M, place_M, send, receive)
        return _Reorder.apply(rows.finish(), by_expert_M, place_M), weights_M, offsets, context

    @torch.compiler.disable
    def combine(self, y_ND: Tensor, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        token_N, place_TA, by_expert_M, place_M, send, receive = context
        by_rank_MD = _Reorder.apply(y_ND, place_M, by_expert_M)
        return combine_assignments(exchange_rows(by_rank_MD, receive, send, self._group), token_N, place_TA)


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
