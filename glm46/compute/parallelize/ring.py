"""Attention over keys that pass from rank to rank, each rank holding one part at a time.

For rows whose gathered keys would take too much memory. Every part gives a result and the log-sum-exp of its scores;
attention to all keys is the sum of the results, each weighted by its share of the softmax (arXiv 2310.01889). Gradients
of keys travel with them and are home again after a whole round. Activation checkpointing repeats the round.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compat import FunctionContext
from glm46.compute.model.attention_layout import KeyRing, RingPart
from glm46.compute.model.attention_runs import part_attention, part_attention_backward


def ring_attention(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, ring: KeyRing, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of a group. Collective, in backward too.

    Args:
        q_NHC: this rank's tokens [B, S / ranks], flattened; H, C.
        k_NKC, v_NKC: keys and values of the same tokens.
        ring: see `attention_layout`.

    Returns:
        [N, H, C].
    """
    out_NHC: Tensor = _RingAttention.apply(q_NHC, torch.stack([k_NKC, v_NKC]), ring, group)
    return out_NHC


class _Passing:
    """A tensor that is sent to the next rank, while the tensor of the previous rank is received."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup):
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        next_rank, previous_rank = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self._sent = x
        self._received = torch.empty_like(x)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, next_rank, group),
                dist.P2POp(dist.irecv, self._received, previous_rank, group),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for the tensor of the previous rank, and return it."""
        for work in self._works:
            work.wait()
        return self._received


def _gather_runs(keys_2NKC: Tensor, part: RingPart) -> tuple[Tensor, Tensor]:
    return keys_2NKC[0].index_select(0, part.keys), keys_2NKC[1].index_select(0, part.keys)


class _RingContext(FunctionContext, Protocol):
    ring: KeyRing
    group: dist.ProcessGroup


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RingContext, q_NHC: Tensor, keys_2NKC: Tensor, ring: KeyRing, group: dist.ProcessGroup) -> Tensor:
        held = keys_2NKC
        for distance, part in enumerate(ring.parts):
            passing = _Passing(held, group) if distance + 1 < len(ring.parts) else None
            if distance == 0:
                out, log_sum_HN = part_attention(q_NHC, *_gather_runs(held, part), part.layout, causal=True)
                total_NHC = out.to(log_sum_HN.dtype)
            elif len(part.queries):
                out, part_sum_HN = part_attention(
                    q_NHC.index_select(0, part.queries), *_gather_runs(held, part), part.layout, causal=False
                )
                earlier_sum_HN = log_sum_HN.index_select(1, part.queries)
                new_sum_HN = torch.logaddexp(earlier_sum_HN, part_sum_HN)
                # Shares of the softmax over all keys so far: of earlier keys, and of the keys of this part.
                earlier_share, part_share = (
                    (log_sum - new_sum_HN).exp_().t().unsqueeze(2) for log_sum in (earlier_sum_HN, part_sum_HN)
                )
                earlier = total_NHC.index_select(0, part.queries)
                total_NHC.index_copy_(0, part.queries, earlier.mul_(earlier_share).add_(part_share * out))
                log_sum_HN.index_copy_(1, part.queries, new_sum_HN)
            held = held if passing is None else passing.wait()
        out_NHC = total_NHC.to(q_NHC.dtype)
        ctx.ring = ring
        ctx.group = group
        ctx.save_for_backward(q_NHC, keys_2NKC, out_NHC, log_sum_HN)
        return out_NHC

    @staticmethod
    def backward(ctx: _RingContext, grad_NHC: Tensor) -> tuple[Tensor | None, ...]:
        q_NHC, held, out_NHC, log_sum_HN = ctx.saved_tensors
        parts = ctx.ring.parts
        wide = log_sum_HN.dtype
        grad_q = torch.zeros_like(q_NHC, dtype=wide)
        grad_keys = torch.zeros_like(held, dtype=wide)
        passing_grad = None
        for distance, part in enumerate(parts):
            passing = _Passing(held, ctx.group) if distance + 1 < len(parts) else None
            part_grad = torch.zeros_like(grad_keys)
            if len(part.queries):
                grad, q, out = (x.index_select(0, part.queries) for x in (grad_NHC, q_NHC, out_NHC))
                log_sum = log_sum_HN.index_select(1, part.queries)
                part_grad_q, *part_grad_keys = part_attention_backward(
                    grad, q, *_gather_runs(held, part), out, log_sum, part.layout, causal=distance == 0
                )
                grad_q.index_add_(0, part.queries, part_grad_q.to(wide))
                for i, gradient in enumerate(part_grad_keys):
                    part_grad[i].index_add_(0, part.keys, gradient.to(wide))
            # The gradient that earlier ranks have summed for these keys.
            grad_keys = part_grad if passing_grad is None else part_grad.add_(passing_grad.wait())
            passing_grad = _Passing(grad_keys, ctx.group)
            held = held if passing is None else passing.wait()
        assert passing_grad is not None, "the keys of this rank are a part"
        return grad_q.to(q_NHC.dtype), passing_grad.wait().to(held.dtype), None, None
