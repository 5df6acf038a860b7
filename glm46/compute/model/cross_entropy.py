"""Log-probabilities over a large vocabulary in chunks: the full logits never exist in memory.

The output head has two forms, `summed_loss` and `token_logprobs`. Both split the tokens into the same chunks, compute
the softmax of a chunk's logits, and overwrite it with the gradient of the logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.run.sizes import loss_chunk_tokens

IGNORE = -100
"""Label of a position without a target."""


class HeadOutput(NamedTuple):
    """Result of the output head for labelled tokens. The form of the head decides which optional fields are set."""

    predictions: Tensor
    """int64 [...]: the most likely token of each position."""
    loss: Tensor | None = None
    """FP32 scalar: negative log-likelihood summed over the labels; set by `summed_loss`."""
    logprobs: Tensor | None = None
    """FP32, shape of the labels: log-probability of each label, 0 without one; set by `token_logprobs`."""
    entropy: Tensor | None = None
    """FP32 [...]: entropy of the distribution in nats, 0 without a label; set by `token_logprobs` on request."""


@dataclass(frozen=True)
class VocabularyPart:
    """Consecutive columns of the logits that this rank computes. All ranks have the same number of columns."""

    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]
    """Gathers a tensor from all ranks, [...] to [ranks, ...]. Collective."""


HeadForm = Callable[[Tensor, Tensor, Tensor, VocabularyPart | None], HeadOutput]
"""(hidden [..., D], weight [V, D] or this rank's rows of it, labels int64 [...], part) -> output."""


class _Softmax(NamedTuple):
    """Softmax of the logits of n tokens. All fields except the first are [n, 1]."""

    probability: Tensor
    """FP32 [n, local columns]: softmax over the local columns; computing the entropy overwrites it."""
    share: Tensor | None
    """FP32: probability of all local columns; None if the whole vocabulary is local."""
    logprob: Tensor
    """FP32: log-probability of the label; undefined without a label."""
    predicted: Tensor
    """int64: most likely token."""
    entropy: Tensor | None
    """FP32: entropy of the distribution, on request."""


def _softmax_into(wide: Tensor, logits: Tensor) -> Tensor:
    """Compute the FP32 softmax of logits in the memory of ``wide``, which may be the logits themselves."""
    if wide is not logits:
        wide.copy_(logits)
    return torch.softmax(wide, -1, out=wide)


def _softmax_of(
    logits: Tensor, wide: Tensor, labels: Tensor, part: VocabularyPart | None, with_entropy: bool = False
) -> _Softmax:
    """Compute the softmax of a chunk in the memory of ``wide``, for labels [n, 1]. Collective if ``part`` is given."""
    column, is_local = _columns(labels, logits.shape[1], part)
    max_logit, predicted = logits.max(-1, keepdim=True)
    below_max = max_logit.float() - logits.gather(1, column).float()
    probability = _softmax_into(wide, logits)
    # The largest probability is 1 / sum of the softmax. It is never too small for a logarithm.
    log_inverse_sum = probability.gather(1, predicted).log()
    logprob = log_inverse_sum - below_max
    entropy = torch.special.entr(probability, out=probability).sum(-1, keepdim=True) if with_entropy else None
    if part is None:
        return _Softmax(probability, None, logprob, predicted, entropy)

    # FP64 is exact for FP32 numbers and for token ids.
    local = [max_logit, log_inverse_sum, logprob.where(is_local, -torch.inf), predicted + part.rank * logits.shape[1]]
    if entropy is not None:
        local.append(entropy)
    # From here on, tensors are [ranks, n, 1].
    gathered = part.gather(torch.cat([x.double() for x in local], 1)).split(1, -1)
    max_logit, log_inverse_sum, logprob, predicted, *entropies = gathered
    log_sum = max_logit - log_inverse_sum
    log_share = log_sum - log_sum.logsumexp(0)
    return _Softmax(
        probability,
        log_share[part.rank].exp().float(),
        (logprob + log_share).amax(0).float(),  # one rank has the label, the others have -inf
        # The first of equally likely tokens, as in one process.
        predicted.where(max_logit == max_logit.amax(0), torch.inf).amin(0).long(),
        (log_share.exp() * (entropies[0] - log_share)).sum(0).float() if entropies else None,
    )


def _columns(labels: Tensor, width: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Return the local column of each label, 0 if it is on another rank, and whether it is local; both [n, 1]."""
    column = labels - (0 if part is None else part.rank * width)
    is_local = (column >= 0) & (column < width)
    return column.where(is_local, 0), is_local


def _exclude_others(logits: Tensor, kept: Tensor, part: VocabularyPart | None) -> None:
    """Give the lowest finite logit to all tokens of a row except its kept ones, in place.

    It is finite so that a part of the vocabulary without any kept token has a softmax; the share of that part is 0.

    Args:
        logits: [n, local columns].
        kept: int64 [n, K]: token ids, -1 for none. A row of -1 keeps all tokens.
    """
    lowest = torch.finfo(logits.dtype).min
    column, is_local = _columns(kept, logits.shape[1], part)
    kept_logits = logits.gather(1, column).masked_fill_(~is_local, lowest)
    logits.masked_fill_((kept >= 0).any(1, keepdim=True), lowest)
    # The maximum, because entries that are not local share column 0 with a token that may be kept.
    logits.scatter_reduce_(1, column, kept_logits, "amax")


def _add_at_labels(grad_logits: Tensor, labels: Tensor, part: VocabularyPart | None, value: Tensor | float) -> None:
    column, is_local = _columns(labels, grad_logits.shape[1], part)
    grad_logits.scatter_add_(1, column, is_local * value)


def _logit_chunks(
    hidden: Tensor, weight: Tensor, chunk_tokens: int, scale: float = 1.0
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows of `hidden` [T, D], their logits, and FP32 memory of the same shape; the next chunk overwrites
    both."""
    T = hidden.shape[0]
    # Reuse the memory for all chunks: allocating it costs more than the computation.
    buffer = hidden.new_empty(min(chunk_tokens, T), weight.shape[0])
    wide = buffer if buffer.dtype == torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
    for start in range(0, T, chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, T))
        logits = buffer[: rows.stop - start]
        torch.addmm(logits, hidden[rows], weight.t(), beta=0, alpha=scale, out=logits)
        yield rows, logits, logits if wide is buffer else wide[: len(logits)]


class _Gradients:
    """Gradients of hidden states and weight, as far as needed, accumulated over chunks of logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, needed: tuple[bool, ...]):
        self._hidden = hidden
        self._weight = weight
        self._is_target = labels != IGNORE
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._needs_weight = needed[1]
        self._of_weight: Tensor | None = None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Add the gradients of one chunk. Rows without a target count as zero."""
        is_target = self._is_target[rows]
        # Mask the tensors of width D; `grad_logits` is much wider.
        if self.of_hidden is not None:
            torch.mm(grad_logits, self._weight, out=self.of_hidden[rows]).mul_(is_target)
        if not self._needs_weight:
            return
        targets = self._hidden[rows] * is_target
        # FP32: BF16 loses low bits over many chunks. None instead of zeros saves a pass over the memory.
        self._of_weight = compat.add_mm_in_fp32(self._of_weight, grad_logits.t(), targets)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden states and weight, each in the dtype of its tensor."""
        if not self._needs_weight:
            return self.of_hidden, None
        if self._of_weight is None:  # no rows
            return self.of_hidden, torch.zeros_like(self._weight)
        return self.of_hidden, self._of_weight.to(self._weight.dtype)


class _SummedLoss(torch.autograd.Function):
    """Computes both gradients in forward, so that logits are neither kept nor recomputed."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T1: Tensor,
        is_counted_T1: Tensor,
        part: VocabularyPart | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        loss = hidden_TD.new_zeros((), dtype=torch.float32)
        predictions_T1 = torch.empty_like(labels_T1)
        gradients = _Gradients(hidden_TD, weight_VD, labels_T1, ctx.needs_input_grad)
        for rows, logits, wide in _logit_chunks(hidden_TD, weight_VD, chunk_tokens):
            softmax = _softmax_of(logits, wide, labels_T1[rows], part)
            loss -= softmax.logprob.where(is_counted_T1[rows], 0).sum()
            predictions_T1[rows] = softmax.predicted
            if any(ctx.needs_input_grad):
                grad_logits = softmax.probability
                if softmax.share is not None:
                    grad_logits.mul_(softmax.share)
                _add_at_labels(grad_logits, labels_T1[rows], part, -1.0)
                gradients.add(rows, logits.copy_(grad_logits))
        ctx.save_for_backward(*gradients.finish())
        ctx.mark_non_differentiable(predictions_T1)
        return loss, predictions_T1

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient keeps its dtype: a 0-dim FP32 factor does not promote.
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), None, None, None, None


class _LogprobOptions(NamedTuple):
    """Options of `token_logprobs`."""

    part: VocabularyPart | None
    chunk_tokens: int
    scale: float
    """Factor of the logits: 1 / temperature."""
    with_entropy: bool


class _LogprobContext(FunctionContext, Protocol):
    options: _LogprobOptions


class _TokenLogprobs(torch.autograd.Function):
    """Recomputes the logits in backward, because the gradient factor of each token is known only then. Saves the inputs
    and a few numbers per token."""

    @staticmethod
    def forward(
        ctx: _LogprobContext,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels: Tensor,
        kept_TK: Tensor | None,
        options: _LogprobOptions,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        part = options.part
        labels_T1 = labels.view(-1, 1)
        # In the shape of the labels, not a view: FSDP puts hooks on the outputs of the model and warns about views.
        predictions = torch.empty_like(labels)
        logprobs = torch.empty_like(labels, dtype=torch.float32)
        entropies = torch.empty_like(labels, dtype=torch.float32)
        shares = None if part is None else hidden_TD.new_empty(len(labels_T1), 1, dtype=torch.float32)
        for rows, logits, wide in _logit_chunks(hidden_TD, weight_VD, options.chunk_tokens, options.scale):
            if kept_TK is not None:
                _exclude_others(logits, kept_TK[rows].long(), part)
            softmax = _softmax_of(logits, wide, labels_T1[rows], part, options.with_entropy)
            predictions.view(-1, 1)[rows] = softmax.predicted
            logprobs.view(-1, 1)[rows] = softmax.logprob
            if shares is not None and softmax.share is not None:
                shares[rows] = softmax.share
            if softmax.entropy is not None:
                entropies.view(-1, 1)[rows] = softmax.entropy
        logprobs.masked_fill_(labels == IGNORE, 0.0)
        entropies.masked_fill_(labels == IGNORE, 0.0)
        needed_entropies = entropies if options.with_entropy else None
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T1, kept_TK, shares, needed_entropies)
        ctx.options = options
        ctx.mark_non_differentiable(predictions)
        ctx.set_materialize_grads(False)
        return logprobs, needed_entropies, predictions

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _LogprobContext, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, labels_T1, kept_TK, shares, entropies = ctx.saved_tensors
        options = ctx.options
        is_target = labels_T1 != IGNORE
        # The logits carry the factor `scale`; its derivative goes into the factors per token.
        logprob_factor, entropy_factor = (
            None if grad is None else grad.reshape(-1, 1).where(is_target, 0) * options.scale
            for grad in (grad_logprobs, grad_entropies)
        )
        logprob_factor = torch.zeros_like(is_target, dtype=torch.float32) if logprob_factor is None else logprob_factor
        gradients = _Gradients(hidden_TD, weight_VD, labels_T1, ctx.needs_input_grad)
        for rows, logits, wide in _logit_chunks(hidden_TD, weight_VD, options.chunk_tokens, options.scale):
            if kept_TK is not None:
                _exclude_others(logits, kept_TK[rows].long(), options.part)
            grad_logits = _softmax_into(wide, logits)
            if shares is not None:
                grad_logits.mul_(shares[rows])
            factor = logprob_factor[rows]
            if entropy_factor is None:
                grad_logits.mul_(-factor)
            else:  # d entropy / d logit = -p (log p + entropy)
                surprise = torch.special.entr(grad_logits).mul_(entropy_factor[rows])
                grad_logits.mul_(-factor - entropy_factor[rows] * entropies.view(-1, 1)[rows]).add_(surprise)
                del surprise  # free it before the next chunk allocates its own
            _add_at_labels(grad_logits, labels_T1[rows], options.part, factor)
            gradients.add(rows, logits.copy_(grad_logits))
        return *gradients.finish(), None, None, None


def _rows_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten to [T, D], and detach without autograd: custom functions compute gradients in forward regardless."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return (hidden, weight) if torch.is_grad_enabled() else (hidden.detach(), weight.detach())


def _chunk_tokens_of(weight: Tensor) -> int:
    """Return the default number of tokens per chunk of logits."""
    return loss_chunk_tokens(is_trained=torch.is_grad_enabled() and weight.requires_grad, device=weight.device.type)


def summed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart | None = None, chunk_tokens: int | None = None
) -> HeadOutput:
    """Sum -log softmax(hidden @ weight.T)[label] over the labels, with gradients computed in forward: the fast form.

    Args:
        hidden: [..., D]; with ``part`` [B, S, D], equal on all its ranks.
        weight: [V, D], or this rank's rows of it.
        labels: int64 [...], `IGNORE` without a target; equal on all ranks.
        part: None if `weight` is the whole vocabulary. Otherwise collective: each rank returns the sum over its own
            part of the sequence, so that the results of the ranks add up to the loss. The gradient of `weight` is that
            of the total loss; the gradient of `hidden` is this rank's summand of it.
        chunk_tokens: tokens per chunk of logits. None: default of `loss_chunk_tokens`.
    """
    is_counted = labels != IGNORE  # on this rank: each rank counts its own part of the sequence
    chunk_tokens = chunk_tokens or _chunk_tokens_of(weight)
    if part is not None:
        for other in {*range(part.ranks)} - {part.rank}:
            is_counted.chunk(part.ranks, dim=1)[other].fill_(False)
    loss, predictions = _SummedLoss.apply(
        *_rows_of(hidden, weight), labels.reshape(-1, 1), is_counted.reshape(-1, 1), part, chunk_tokens
    )
    return HeadOutput(predictions.view_as(labels), loss=loss)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    part: VocabularyPart | None = None,
    chunk_tokens: int | None = None,
    *,
    entropy: bool = False,
    temperature: float = 1.0,
    kept: Tensor | None = None,
) -> HeadOutput:
    """Compute log softmax(hidden @ weight.T / temperature)[label] of each label, and on request the entropy of that
    distribution: the form for objectives that weight tokens. Both are differentiable.

    Arguments are as in `summed_loss`. With ``part``, collective: all its ranks get the values of the whole sequence
    and must compute the same objective from them, so that its gradient counts once.

    Args:
        kept: integer [B, K, S]: for each label up to K token ids, with the label among them, and -1 for the rest. The
            distribution is that over these tokens alone. Without an id it is that over the whole vocabulary. Equal on
            all ranks of ``part``.
    """
    chunk_tokens = chunk_tokens or _chunk_tokens_of(weight)
    if entropy:  # its gradient needs a second tensor as large as the logits
        chunk_tokens = -(-chunk_tokens // 2)
    kept_TK = None if kept is None else kept.transpose(1, 2).reshape(-1, kept.shape[1])
    logprobs, entropies, predictions = _TokenLogprobs.apply(
        *_rows_of(hidden, weight),
        labels.contiguous(),
        kept_TK,
        _LogprobOptions(part, chunk_tokens, 1.0 / temperature, entropy),
    )
    return HeadOutput(predictions, logprobs=logprobs, entropy=entropies)
