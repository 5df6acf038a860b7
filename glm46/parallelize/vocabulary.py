"""Embedding and loss when each rank of a group holds a part of the vocabulary: no rank ever has all logits."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from glm46.distributed.collectives import gather_sequence, scatter_sum
from glm46.model.cross_entropy import DEFAULT_CHUNK_TOKENS, IGNORE
from glm46.model.layers import local_part
from glm46.model.transformer import OutputHead


def vocabulary_parallel_lookup(embedding: nn.Embedding, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """The forward of an embedding split by rows: ids int64 [B, S], the same on all ranks, to this rank's [B, s, D]."""
    rank = dist.get_rank(group)

    def lookup(ids: Tensor) -> Tensor:
        weight = local_part(embedding.weight)
        row = ids - rank * weight.shape[0]
        is_here = (row >= 0) & (row < weight.shape[0])
        found = F.embedding(row.where(is_here, 0), weight) * is_here.unsqueeze(-1)
        return scatter_sum(found, group)

    return lookup


def vocabulary_parallel_head(head: OutputHead, group: dist.ProcessGroup) -> Callable:
    """The forward of a head split by rows; takes this rank's part of the sequence, and labels of all of it."""

    def forward(hidden: Tensor, labels: Tensor | None = None):
        whole = gather_sequence(hidden, group)
        if labels is None:
            logits = F.linear(whole, local_part(head.weight))
            return gather_sequence(logits.transpose(1, 2), group).transpose(1, 2)
        return vocabulary_parallel_cross_entropy(whole, local_part(head.weight), labels, group)

    return forward


def vocabulary_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """`chunked_cross_entropy` with a part of the vocabulary on each rank; collective.

    Args:
        hidden: [B, S, D], the same on all ranks; weight: [V / ranks, D], this rank's rows, in the order of the ranks.
        labels: int64 [B, S], the same on all ranks, `IGNORE` where there is no target.
        chunk_tokens: tokens whose logits exist at the same time.

    Returns:
        FP32 scalar: the sum over *this rank's* part of the sequence, so that the ranks add up to the whole sum. The
        gradients belong to that whole sum: `hidden` gets this rank's summand of it. And the most likely tokens of the
        whole sequence, int64 [B, S].
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    is_mine = torch.zeros_like(labels, dtype=torch.bool)
    is_mine.chunk(ranks, dim=1)[rank].fill_(True)
    loss, predictions = _CrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), is_mine.view(-1), group, chunk_tokens
    )
    return loss, predictions.view_as(labels)


class _CrossEntropy(torch.autograd.Function):
    """Both gradients are made in forward, chunk by chunk, as in `glm46/model/cross_entropy.py`."""

    @staticmethod
    def forward(
        ctx,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        is_mine_T: Tensor,
        group: dist.ProcessGroup,
        chunk_tokens: int,
    ):
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = hidden_TD.new_zeros((), dtype=torch.float32)
        predictions_T = torch.empty_like(labels_T)
        grad_hidden = torch.empty_like(hidden_TD) if needs_grad else None
        # fp32: contributions of many chunks to one weight would lose their low bits in BF16.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad else None
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden, is_target = hidden_TD[rows], labels_T[rows] != IGNORE
            losses, predictions_T[rows], grad_logits = _chunk(hidden @ weight_VD.t(), labels_T[rows], group)
            loss += (losses * (is_target & is_mine_T[rows])).sum()
            if needs_grad:
                grad_logits = (grad_logits * is_target.unsqueeze(1)).to(hidden.dtype)
                torch.mm(grad_logits, weight_VD, out=grad_hidden[rows])
                grad_weight += grad_logits.t() @ hidden
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight_VD.dtype))
        ctx.mark_non_differentiable(predictions_T)
        return loss, predictions_T

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None, None


def _chunk(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Losses FP32 [n], predictions int64 [n] and the gradient of the losses to these logits FP32 [n, v]."""
    logits, first = logits.float(), dist.get_rank(group) * logits.shape[1]
    largest_here, place = logits.max(-1)
    largest = largest_here.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # Of several tokens that are equally likely the first one, as one process takes it.
    predicted = (place + first).where(largest_here == largest, torch.iinfo(torch.int64).max)
    dist.all_reduce(predicted, dist.ReduceOp.MIN, group=group)

    column = labels - first
    is_here = (column >= 0) & (column < logits.shape[1])
    column = column.where(is_here, 0).unsqueeze(1)
    logits -= largest.unsqueeze(1)
    of_label = logits.gather(1, column).squeeze(1) * is_here
    logits.exp_()
    sums = torch.stack([logits.sum(-1), of_label])
    dist.all_reduce(sums, group=group)
    total, of_label = sums
    gradient = logits.div_(total.unsqueeze(1))
    gradient.scatter_add_(1, column, -is_here.unsqueeze(1).to(gradient.dtype))
    return total.log() - of_label, predicted, gradient
