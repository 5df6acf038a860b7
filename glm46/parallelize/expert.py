"""Expert parallelism: each rank of a group holds whole experts, and tokens are sent to them and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.distributed.collectives import Exchange, exchange_rows
from glm46.model.dispatch import combine_assignments, gather_assignments, sort_assignments
from glm46.model.moe import MoE
from glm46.model.router import Routing
from glm46.model.transformer import Transformer


def apply(model: Transformer, ep_mesh: DeviceMesh) -> None:
    """Shard the experts of every MoE layer over `ep_mesh` and dispatch tokens to them; in place."""
    for module in model.modules():
        if isinstance(module, MoE):
            for name, parameter in list(module.experts.named_parameters()):
                whole_experts = distribute_tensor(parameter.data, ep_mesh, [Shard(0)])
                module.experts.register_parameter(name, nn.Parameter(whole_experts))
            module.dispatcher = AllToAllDispatcher(ep_mesh.get_group())


class AllToAllDispatcher:
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    Rows dropped by padding or the capacity are not sent. Experts see their rows in the order (expert, rank, token), so
    that results do not depend on timing.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._ranks = group, dist.get_world_size(group)

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

        rows_ND = gather_assignments(x_TD, order_N // A, place_TA)[: sum(send)]
        weights_N = routing.weights.flatten()[order_N[: sum(send)]]
        rows = Exchange(rows_ND, send, receive, self._group)
        weights = Exchange(weights_N, send, receive, self._group)
        return rows, weights, received_RE, (order_N // A, place_TA, send, receive)

    @torch.compiler.disable
    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; offsets cover the experts of this rank."""
        rows, weights, received_RE, (token_N, place_TA, send, receive) = pending
        # Rows arrive in the order (rank, expert); a stable sort by expert gives (expert, rank).
        expert_M = torch.arange(received_RE.shape[1], device=received_RE.device).repeat(self._ranks)
        expert_M = expert_M.repeat_interleave(received_RE.flatten(), output_size=sum(receive))
        by_expert_M = expert_M.argsort(stable=True)
        offsets = received_RE.sum(0).cumsum(0).to(torch.int32)
        context = (token_N, place_TA, by_expert_M, send, receive)
        return _Reorder.apply(rows.finish(), by_expert_M, False), weights.finish()[by_expert_M], offsets, context

    @torch.compiler.disable
    def combine(self, y_ND: Tensor, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        token_N, place_TA, by_expert_M, send, receive = context
        by_rank_MD = _Reorder.apply(y_ND, by_expert_M, True)
        returned = exchange_rows(by_rank_MD, receive, send, self._group)
        dropped = returned.new_zeros(token_N.numel() - returned.shape[0], returned.shape[1])
        return combine_assignments(torch.cat([returned, dropped]), token_N, place_TA)


class _Reorder(torch.autograd.Function):
    """Permutes rows. The built-in backward of indexing adds rows in varying order, although each occurs once.

    `order` is not a saved tensor, for the reason given in `_Combine` of `model/dispatch.py`."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, is_inverse: bool) -> Tensor:
        ctx.order, ctx.is_inverse = order, is_inverse
        return _reorder(x, order, is_inverse)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reorder(grad, ctx.order, not ctx.is_inverse), None, None


def _reorder(x: Tensor, order: Tensor, is_inverse: bool) -> Tensor:
    """Row n of the result is row order[n] of `x`; inverse: row order[n] of the result is row n of `x`."""
    if not is_inverse:
        return x.index_select(0, order)
    out = torch.empty_like(x)
    out[order] = x
    return out
