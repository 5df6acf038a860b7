"""Log-probabilities of a large vocabulary without ever holding all logits.

The output head has two forms, `summed_loss` and `token_logprobs`. Both walk over the same chunks of tokens, take the
same softmax of a chunk's logits, and turn it into the gradient of the logits in its own memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of a position that has no target."""

DEFAULT_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at the same time. Large enough that the matmul is efficient, small enough that the logits
of a chunk are a small part of the activations."""


class HeadOutput(NamedTuple):
    """What the output head gives for labelled tokens; its form decides what there is beside the predictions."""

    predictions: Tensor
    """int64 [...]: the most likely token of each position."""
    loss: Tensor | None = None
    """FP32 scalar: negative log-likelihood summed over the labels; of `summed_loss`."""
    logprobs: Tensor | None = None
    """FP32 [...]: log-probability of each label, 0 where there is none; of `token_logprobs`."""
    entropy: Tensor | None = None
    """FP32 [...]: entropy in nats of the distribution at each label, 0 where there is none; on request."""


@dataclass(frozen=True)
class VocabularyPart:
    """The consecutive columns of the logits that this rank computes, of ranks that each have as many."""

    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]
    """A tensor of each rank to all of them, [...] to [ranks, ...]."""


HeadForm = Callable[[Tensor, Tensor, Tensor, VocabularyPart | None], HeadOutput]
"""(hidden [..., D], weight [V, D] or this rank's part of it, labels int64 [...], that part) -> output."""


class _Softmax(NamedTuple):
    """The softmax of n tokens' logits; all but the first are [n, 1]."""

    probability: Tensor
    """FP32 [n, columns here]: softmax over the columns here; entropy overwrites it."""
    share: Tensor | None
    """FP32: probability of the columns here; None where there are no others."""
    logprob: Tensor
    """FP32, of the label; meaningless where there is none."""
    predicted: Tensor
    """int64."""
    entropy: Tensor | None
    """FP32, on request."""


def _softmax(logits: Tensor, labels: Tensor, part: VocabularyPart | None, with_entropy: bool = False) -> _Softmax:
    """Softmax of a chunk, which overwrites FP32 logits; with a part of the vocabulary collective."""
    column, is_here = _columns(labels, logits.shape[1], part)
    largest, predicted = logits.max(-1, keepdim=True)
    below_largest = largest.float() - logits.gather(1, column).float()
    probability = _probability(logits)
    # The largest probability is the inverse of the softmax's sum, and never too small for its logarithm.
    log_inverse_sum = probability.gather(1, predicted).log()
    logprob = log_inverse_sum - below_largest
    entropy = torch.special.entr(probability, out=probability).sum(-1, keepdim=True) if with_entropy else None
    if part is None:
        return _Softmax(probability, None, logprob, predicted, entropy)

    # In FP64, which is exact for FP32 numbers and for token ids.
    known = [largest, log_inverse_sum, logprob.where(is_here, -torch.inf), predicted + part.rank * logits.shape[1]]
    known = torch.stack([x.double() for x in (*known, *([entropy] if with_entropy else []))])
    # From here on [ranks, n, 1].
    largest, log_inverse_sum, logprob, predicted, *entropy = part.gather(known).unbind(1)
    log_sum = largest - log_inverse_sum
    log_share = log_sum - log_sum.logsumexp(0)
    return _Softmax(
        probability,
        log_share[part.rank].exp().float(),
        (logprob + log_share).amax(0).float(),  # one rank has the label, the others -inf
        # Of several tokens that are equally likely the first one, as one process takes it.
        predicted.where(largest == largest.amax(0), torch.inf).amin(0).long(),
        (log_share.exp() * (entropy[0] - log_share)).sum(0).float() if with_entropy else None,
    )


def _probability(logits: Tensor) -> Tensor:
    """Softmax in FP32; in the memory of FP32 logits, which are the largest tensor here."""
    in_place = {"out": logits} if logits.dtype == torch.float32 else {"dtype": torch.float32}
    return torch.softmax(logits, -1, **in_place)


def _columns(labels: Tensor, width: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Of labels [n]: their column of the logits here, any if it is elsewhere, and whether it is here; both [n, 1]."""
    column = labels.unsqueeze(1) - (0 if part is None else part.rank * width)
    is_here = (column >= 0) & (column < width)
    return column.where(is_here, 0), is_here


def _add_at_labels(grad_logits: Tensor, labels: Tensor, part: VocabularyPart | None, value: Tensor | float) -> None:
    column, is_here = _columns(labels, grad_logits.shape[1], part)
    grad_logits.scatter_add_(1, column, is_here * value)


def _chunks(hidden: Tensor, weight: Tensor, chunk_tokens: int, scale: float = 1.0) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `hidden` [T, D] and their logits, which the next chunk overwrites."""
    T = hidden.shape[0]
    # One buffer for every chunk: it is so large that fresh memory costs more than the product written into it.
    buffer = hidden.new_empty(min(chunk_tokens, T), weight.shape[0])
    for start in range(0, T, chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, T))
        logits = buffer[: rows.stop - start]
        yield rows, torch.addmm(logits, hidden[rows], weight.t(), beta=0, alpha=scale, out=logits)


class _Gradients:
    """Gradients of hidden states and weight, those that are needed, summed up over chunks of logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, needed: tuple[bool, ...]):
        self._hidden, self._weight, self._is_target = hidden, weight, (labels != IGNORE).unsqueeze(1)
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        # fp32: contributions of many chunks to one weight would lose their low bits in BF16.
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Rows without a target count as zero, whatever is in them."""
        is_target = self._is_target[rows]
        # They are left out of the products' other factor, which is much narrower.
        if self.of_hidden is not None:
            torch.mm(grad_logits, self._weight, out=self.of_hidden[rows]).mul_(is_target)
        if self.of_weight is None:
            return
        targets = self._hidden[rows] * is_target
        if self.of_weight.dtype == targets.dtype:
            self.of_weight.addmm_(grad_logits.t(), targets)
        else:
            self.of_weight += grad_logits.t() @ targets

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Of hidden states and weight, each in its type."""
        return self.of_hidden, None if self.of_weight is None else self.of_weight.to(self._weight.dtype)


class _SummedLoss(torch.autograd.Function):
    """Both gradients are made in forward, so that no logit is kept or computed twice."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, labels_T, is_counted_T, part: VocabularyPart | None, chunk_tokens: int):
        loss, predictions_T = hidden_TD.new_zeros((), dtype=torch.float32), torch.empty_like(labels_T)
        gradients = _Gradients(hidden_TD, weight_VD, labels_T, ctx.needs_input_grad)
        for rows, logits in _chunks(hidden_TD, weight_VD, chunk_tokens):
            softmax = _softmax(logits, labels_T[rows], part)
            loss -= softmax.logprob.squeeze(1).where(is_counted_T[rows], 0).sum()
            predictions_T[rows] = softmax.predicted.squeeze(1)
            if any(ctx.needs_input_grad):
                grad_logits = softmax.probability if part is None else softmax.probability.mul_(softmax.share)
                _add_at_labels(grad_logits, labels_T[rows], part, -1.0)
                gradients.add(rows, logits.copy_(grad_logits))
        ctx.save_for_backward(*gradients.finish())
        ctx.mark_non_differentiable(predictions_T)
        return loss, predictions_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, _):
        # Type of the gradient stays the tensor's: a 0-dim FP32 factor does not promote.
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), None, None, None, None


class _TokenLogprobs(torch.autograd.Function):
    """Backward computes the logits once more: a gradient that differs by token cannot be made before it is known. Kept
    are the inputs and some numbers per token."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, labels, part: VocabularyPart | None, chunk_tokens, scale, with_entropy):
        labels_T, predictions = labels.view(-1), torch.empty_like(labels)
        # Made in the labels' shape: FSDP hangs its hooks on what the model returns, and warns of views.
        logprobs, entropies = (torch.empty_like(labels, dtype=torch.float32) for _ in range(2))
        shares = None if part is None else hidden_TD.new_empty(len(labels_T), 1, dtype=torch.float32)
        for rows, logits in _chunks(hidden_TD, weight_VD, chunk_tokens, scale):
            softmax = _softmax(logits, labels_T[rows], part, with_entropy)
            predictions.view(-1, 1)[rows], logprobs.view(-1, 1)[rows] = softmax.predicted, softmax.logprob
            if part is not None:
                shares[rows] = softmax.share
            if with_entropy:
                entropies.view(-1, 1)[rows] = softmax.entropy
        for figure in (logprobs, entropies):
            figure.masked_fill_(labels == IGNORE, 0.0)
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, shares, entropies if with_entropy else None)
        ctx.part, ctx.chunk_tokens, ctx.scale = part, chunk_tokens, scale
        ctx.mark_non_differentiable(predictions)
        ctx.set_materialize_grads(False)
        return logprobs, entropies if with_entropy else None, predictions

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, _):
        hidden_TD, weight_VD, labels_T, shares, entropies = ctx.saved_tensors
        is_target = labels_T != IGNORE
        # The logits were made with this factor; here it goes into the numbers per token.
        of_logprob, of_entropy = (
            None if grad is None else (grad.reshape(-1).where(is_target, 0) * ctx.scale).unsqueeze(1)
            for grad in (grad_logprobs, grad_entropies)
        )
        gradients = _Gradients(hidden_TD, weight_VD, labels_T, ctx.needs_input_grad)
        for rows, logits in _chunks(hidden_TD, weight_VD, ctx.chunk_tokens, ctx.scale):
            grad_logits = _probability(logits)
            if shares is not None:
                grad_logits.mul_(shares[rows])
            factor = 0.0 if of_logprob is None else of_logprob[rows]
            if of_entropy is None:
                grad_logits.mul_(-factor)
            else:  # of entropy to a logit: -p (log p + entropy)
                surprise = torch.special.entr(grad_logits).mul_(of_entropy[rows])
                grad_logits.mul_(-factor - of_entropy[rows] * entropies.view(-1, 1)[rows]).add_(surprise)
                del surprise  # before the next chunk makes its own
            _add_at_labels(grad_logits, labels_T[rows], ctx.part, factor)
            gradients.add(rows, logits.copy_(grad_logits))
        return *gradients.finish(), None, None, None, None, None


def _rows(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As autograd functions take them: they would make gradients even where autograd is off."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return (hidden, weight) if torch.is_grad_enabled() else (hidden.detach(), weight.detach())


def summed_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    part: VocabularyPart | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> HeadOutput:
    """The fast form: sum over labels of -log softmax(hidden @ weight.T)[label], with gradients made in forward.

    Args:
        hidden: [..., D]; with a part of the vocabulary [B, S, D], the same on its ranks.
        weight: [V, D], or the rows of this rank's part.
        labels: int64 [...], `IGNORE` where there is none; the same on all ranks.
        part: None where `weight` is the whole vocabulary. Else collective; of the sum each rank returns what belongs to
            its part of the sequence, so that the ranks add up to the whole. Gradients are those of the whole sum, that
            of `hidden` this rank's summand of it.
        chunk_tokens: tokens whose logits exist at the same time.
    """
    is_counted = labels != IGNORE
    if part is not None:
        is_mine = torch.zeros_like(is_counted)
        is_mine.chunk(part.ranks, dim=1)[part.rank].fill_(True)
        is_counted &= is_mine
    loss, predictions = _SummedLoss.apply(
        *_rows(hidden, weight), labels.reshape(-1), is_counted.reshape(-1), part, chunk_tokens
    )
    return HeadOutput(predictions.view_as(labels), loss=loss)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    part: VocabularyPart | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    *,
    entropy: bool = False,
    temperature: float = 1.0,
) -> HeadOutput:
    """The form for objectives that weigh tokens: log softmax(hidden @ weight.T / temperature)[label] of each label, and
    the entropy of that distribution; both have gradients.

    Arguments are those of `summed_loss`. With a part of the vocabulary all its ranks get the numbers of the whole
    sequence, and must make the same objective of them: its gradient to `hidden` and `weight` is then counted once.
    """
    # The gradient of an entropy needs a second tensor as large as the logits.
    chunk_tokens = -(-chunk_tokens // 2) if entropy else chunk_tokens
    logprobs, entropies, predictions = _TokenLogprobs.apply(
        *_rows(hidden, weight), labels.contiguous(), part, chunk_tokens, 1.0 / temperature, entropy
    )
    return HeadOutput(predictions, logprobs=logprobs, entropy=entropies)
