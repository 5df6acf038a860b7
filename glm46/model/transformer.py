"""The whole GLM-4.5/4.6 model: embedding, decoder layers, head, multi-token prediction."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46.config.model import ModelShape
from glm46.model.attention import MaskBuilder, attention_mask
from glm46.model.block import TransformerBlock
from glm46.model.cross_entropy import chunked_cross_entropy
from glm46.model.layers import RMSNorm
from glm46.model.mtp import MTPLayer
from glm46.model.rope import rotary_tables
from glm46.model.router import RoutingOptions, RoutingStatistics


class LossSums(NamedTuple):
    """What one forward pass over labelled tokens gives. Sums, not means: the caller divides by a token count that it
    alone knows, that of the whole optimizer step over all ranks."""

    loss: Tensor
    """FP32 scalar: negative log-likelihood summed over the labels."""
    mtp_losses: Tensor
    """FP32 [K]: the same for each multi-token prediction depth."""
    aux_losses: Tensor
    """FP32 [2]: balance loss and z-loss summed over real tokens and MoE layers."""
    tokens_per_expert: Tensor
    """int64 [MoE layers, E]: real tokens that each expert was given; multi-token prediction layers last."""
    overflow: Tensor
    """int64 [MoE layers]: assignments lost to the capacity."""
    predictions: Tensor
    """int64 [1 + K, B, S]: the most likely next token of the model, then of each prediction depth."""


class OutputHead(nn.Module):
    """Projection to the vocabulary, or straight to the loss."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, hidden: Tensor, labels: Tensor | None = None):
        """Logits [B, S, V] of [B, S, D]; with labels, `chunked_cross_entropy` of them instead."""
        if labels is None:
            return F.linear(hidden, self.weight)
        return chunked_cross_entropy(hidden, self.weight, labels)


class Transformer(nn.Module):
    """GLM-4.5/4.6 mixture-of-experts decoder.

    Layers live in dictionaries keyed by their number, so that a parameter keeps its name wherever the layer goes.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerBlock(shape, is_dense=i < shape.first_k_dense_replace)
                for i in range(shape.num_hidden_layers)
            }
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = OutputHead(shape.vocab_size, shape.hidden_size)
        self.mtp = nn.ModuleDict({str(k): MTPLayer(shape) for k in range(shape.num_nextn_predict_layers)})
        self.build_mask: MaskBuilder = attention_mask

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mtp_input_ids: Tensor | None = None,
        mtp_labels: Tensor | None = None,
        options: RoutingOptions = RoutingOptions(),  # noqa: B008 - frozen
    ) -> "Tensor | LossSums":
        """Logits without labels, loss sums with them.

        Args:
            input_ids: int64 [B, S].
            positions: integer [B, S]; None counts from 0.
            document_ids: integer [B, S], -1 for padding; tokens see only their own document. None: one document, no
                padding.
            labels: int64 [B, S], -100 where there is no target.
            mtp_input_ids, mtp_labels: int64 [B, K, S], see docs/data.md. Without them, multi-token prediction layers
                do not run.
            options: what training adds to the routing.

        Returns:
            Logits [B, S, V], or `LossSums`.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden = self.embed_tokens(input_ids)
        # Built here, never passed in: every stage of a pipeline makes its own from the same small integers.
        rope = rotary_tables(positions, self.shape, hidden.dtype)
        mask = self.build_mask(document_ids, positions, self.shape.sliding_window)
        is_real = None if document_ids is None else document_ids >= 0
        statistics: list[RoutingStatistics] = []
        for layer in self.layers.values():
            hidden, of_layer = layer(hidden, rope, mask, is_real, options)
            if of_layer is not None:
                statistics.append(of_layer)
        hidden = self.norm(hidden)
        if labels is None:
            return self.lm_head(hidden)

        loss, predicted = self.lm_head(hidden, labels)
        mtp_losses, predictions = [], [predicted]
        if mtp_input_ids is not None:
            for k, layer in enumerate(self.mtp.values()):
                embedding = self.embed_tokens(mtp_input_ids[:, k])
                hidden, of_layer = layer(hidden, embedding, rope, mask, is_real, options)
                statistics.append(of_layer)
                mtp_loss, predicted = self.lm_head(hidden, mtp_labels[:, k])
                mtp_losses.append(mtp_loss)
                predictions.append(predicted)
        return LossSums(
            loss=loss,
            mtp_losses=torch.stack(mtp_losses) if mtp_losses else loss.new_zeros(0),
            aux_losses=torch.stack([s.aux_losses for s in statistics]).sum(0) if statistics else loss.new_zeros(2),
            tokens_per_expert=_stack([s.tokens_per_expert for s in statistics], (self.shape.n_routed_experts,), labels),
            overflow=_stack([s.overflow for s in statistics], (), labels),
            predictions=torch.stack(predictions),
        )

    def routers(self) -> dict[str, nn.Module]:
        """Routers of this rank by name, in the order of `LossSums.tokens_per_expert`."""
        return {name: module for name, module in self.named_modules() if name.endswith(".router")}


def _stack(counts: list[Tensor], size: tuple[int, ...], like: Tensor) -> Tensor:
    """int64 [layers, *size]; also for a model without any MoE layer, on the device of `like`."""
    return torch.stack(counts) if counts else like.new_zeros(0, *size, dtype=torch.int64)
