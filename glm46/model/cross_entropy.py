"""Cross-entropy of a large vocabulary without ever holding all logits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Label of a position that has no target."""

DEFAULT_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at the same time. Large enough that the matmul is efficient, small enough that the logits
of a chunk are a small part of the activations."""


ChunkLosses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(logits [n, V], labels int64 [n]) -> losses FP32 [n], most likely tokens int64 [n], gradient of the losses to the
logits FP32 [n, V]. Overwrites the logits where their type allows: they are the largest tensor here."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the negative log-likelihoods; both gradients are made in forward, chunk by chunk, so that no logit is
    kept or computed twice."""

    @staticmethod
    def forward(
        ctx,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        is_counted_T: Tensor,
        chunk_tokens: int,
        chunk_losses: ChunkLosses,
    ):
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        T, V = hidden_TD.shape[0], weight_VD.shape[0]
        loss = hidden_TD.new_zeros((), dtype=torch.float32)
        predictions_T = torch.empty_like(labels_T)
        grad_hidden = torch.empty_like(hidden_TD) if needs_grad else None
        # fp32: contributions of many chunks to one weight would lose their low bits in BF16.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad else None
        # One buffer for every chunk: it is so large that fresh memory costs more than the product written into it.
        buffer = hidden_TD.new_empty(min(chunk_tokens, T), V)
        for start in range(0, T, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, T))
            hidden, labels = hidden_TD[rows], labels_T[rows]
            logits = torch.mm(hidden, weight_VD.t(), out=buffer[: rows.stop - start])
            losses, predictions_T[rows], grad_logits = chunk_losses(logits, labels.clamp(min=0))
            loss += (losses * is_counted_T[rows]).sum()
            if needs_grad:
                grad_logits, is_target = grad_logits.to(hidden.dtype), (labels != IGNORE).unsqueeze(1)
                # Rows without a target are left out of the products' other factor, which is much narrower.
                torch.mm(grad_logits, weight_VD, out=grad_hidden[rows]).mul_(is_target)
                targets = hidden * is_target
                if grad_weight.dtype == hidden.dtype:
                    grad_weight.addmm_(grad_logits.t(), targets)
                else:
                    grad_weight += grad_logits.t() @ targets
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight_VD.dtype))
        ctx.mark_non_differentiable(predictions_T)
        return loss, predictions_T

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Type of the gradient stays the tensor's: a 0-dim FP32 factor does not promote.
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None, None


def whole_chunk_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`ChunkLosses` of logits over the whole vocabulary."""
    labels = labels.unsqueeze(1)
    largest, predicted = logits.max(-1, keepdim=True)
    below_largest = largest.float() - logits.gather(1, labels).float()
    in_place = {"out": logits} if logits.dtype == torch.float32 else {"dtype": torch.float32}
    probability = torch.softmax(logits, -1, **in_place)
    # The largest probability is the inverse of the softmax's sum, and never too small for its logarithm.
    losses = below_largest - probability.gather(1, predicted).log()
    probability.scatter_add_(1, labels, probability.new_full((1, 1), -1.0).expand_as(labels))
    return losses.squeeze(1), predicted.squeeze(1), probability


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    *,
    is_counted: Tensor | None = None,
    chunk_losses: ChunkLosses = whole_chunk_losses,
) -> tuple[Tensor, Tensor]:
    """Sum over targets of -log softmax(hidden @ weight.T)[label].

    Args:
        hidden: [..., D]; weight: [V, D]; labels: int64 [...], `IGNORE` where there is no target.
        chunk_tokens: tokens whose logits exist at the same time.
        is_counted: boolean [...], targets that are summed here, as others are elsewhere; absent: all. The gradients
            are always those of the sum over all targets.
        chunk_losses: what a chunk's logits become; replaced where `weight` is a part of the vocabulary.

    Returns:
        FP32 scalar, and the most likely token of each position, int64 [...].
    """
    is_counted = labels != IGNORE if is_counted is None else is_counted & (labels != IGNORE)
    loss, predictions = _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        is_counted.reshape(-1),
        chunk_tokens,
        chunk_losses,
    )
    return loss, predictions.view_as(labels)


def reference_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same sum with all logits at once; the slow reference that the tests hold `chunked_cross_entropy` to."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
