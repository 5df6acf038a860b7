"""A decoder layer for the few tokens of a decoding step on a CPU; the same numbers as the layer's own forward.

With few rows a product is bound by reading the weight, and BLAS reads it at very different speeds depending on how the
product is put: `weight @ x.T` of two rows and more reads a weight two to three times as fast as `x @ weight.T`, and one
row is cheaper as two equal ones. What only training needs (routing statistics, sorting by expert) is left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.model.attention import Attention
from glm46.model.block import TransformerBlock
from glm46.model.layers import FeedForward, RMSNorm
from glm46.model.moe import MoE
from glm46.model.rope import rotate

MAX_TOKENS = 64
"""Most tokens of a call for which this was measured to be faster than the layer's own forward."""

_MAX_ROWS = 8
"""Most rows for which the turned product is the faster one; `python -m glm46 benchmark generate` shows the effect."""


def is_for(x: Tensor) -> bool:
    """Whether hidden states [B, S, D] are few enough, in FP32 and on a CPU."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] * x.shape[1] <= MAX_TOKENS


def project(x_TD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of contiguous rows, put so that the weight is read fast; contiguous [T, O]."""
    rows = x_TD.shape[0]
    if rows > _MAX_ROWS:
        return F.linear(x_TD, weight, bias)
    if rows == 1:
        out = torch.mm(weight, x_TD.repeat(2, 1).t())[:, 0].clone().unsqueeze(0)
    else:
        out = torch.mm(weight, x_TD.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


def run_block(block: TransformerBlock, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """What ``block(x, rope, ...)`` gives for [B, S, D]; attention through the block's own core."""
    x = x + _attend(block.self_attn, _normed(block.input_layernorm, x), rope)
    normed = _normed(block.post_attention_layernorm, x)
    rows = normed.view(-1, x.shape[-1])
    y = _feed_forward(block.mlp, rows) if block.is_dense else _mixture(block.mlp, rows)
    return x + y.view_as(x)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(norm.eps).rsqrt_()
    return (x * inverse).mul_(norm.weight)


def _attend(attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    B, S, D = x.shape
    rows = x.view(B * S, D)
    q, k, v = (
        project(rows, part.weight, part.bias).view(B, S, -1, attention.head_dim)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.q_norm is not None:
        q, k = _normed(attention.q_norm, q), _normed(attention.k_norm, k)
    out = attention.core(rotate(q, rope), rotate(k, rope), v, None)
    return project(out.reshape(B * S, -1), attention.o_proj.weight).view(B, S, D)


def _feed_forward(network: FeedForward, rows: Tensor) -> Tensor:
    active = F.silu(project(rows, network.gate_proj.weight)).mul_(project(rows, network.up_proj.weight))
    return project(active, network.down_proj.weight)


def _mixture(moe: MoE, rows: Tensor) -> Tensor:
    """Expert after expert, each on the rows that chose it; the activation of all at once."""
    router, experts = moe.router, moe.experts
    scores = project(rows, router.weight).sigmoid_()
    chosen = router.select(scores + router.e_score_correction_bias)
    weights = scores.gather(1, chosen)
    if router.shape.norm_topk_prob:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    weights *= router.shape.routed_scaling_factor
    y = torch.zeros_like(rows) if moe.shared_experts is None else _feed_forward(moe.shared_experts, rows)
    rows_of: dict[int, list[tuple[int, int]]] = {}
    for row, of_row in enumerate(chosen.tolist()):
        for place, expert in enumerate(of_row):
            rows_of.setdefault(expert, []).append((row, place))
    # An expert with one row gets it twice, the second time with weight zero: see `project`.
    sorted_uses = [use for used in rows_of.values() for use in (used if len(used) > 1 else used * 2)]
    row_N, place_N = torch.tensor(sorted_uses).unbind(1)
    weight_N = weights[row_N, place_N]
    width, N = experts.down.shape[2], len(sorted_uses)
    x_ND, hidden_FN, out_DN = rows[row_N], rows.new_empty(2 * width, N), rows.new_empty(rows.shape[1], N)
    spans, start = [], 0
    for expert, used in rows_of.items():
        end = start + max(len(used), 2)
        if len(used) == 1:
            weight_N[start + 1] = 0.0
        spans.append((expert, start, end))
        start = end
    for expert, start, end in spans:
        torch.mm(experts.gate_up[expert], x_ND[start:end].t(), out=hidden_FN[:, start:end])
    active_NF = F.silu(hidden_FN[:width]).mul_(hidden_FN[width:]).mul_(weight_N).t().contiguous()
    for expert, start, end in spans:
        torch.mm(experts.down[expert], active_NF[start:end].t(), out=out_DN[:, start:end])
    return y.index_add_(0, row_N, out_DN.t())
