"""Activation checkpointing of each layer: save some results of forward, recompute the rest in backward."""

import functools
from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glm46 import compat
from glm46.compute.distributed.recomputation import recomputation
from glm46.compute.model.adapters import adapted_grouped_mm
from glm46.compute.model.attention_runs import block_attention
from glm46.compute.model.experts import grouped_mm
from glm46.compute.model.mtp import MTPLayer
from glm46.compute.model.transformer import Transformer

_aten = torch.ops.aten
_SAVED_OPERATORS = {
    # Attention: its cost is quadratic in the sequence, its result is linear.
    block_attention._opoverload,
    compat.VARLEN_OPERATOR,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    # Experts: most of the FLOPs of a layer.
    grouped_mm._opoverload,
    adapted_grouped_mm._opoverload,
    _aten._scaled_grouped_mm.default,
    # Other ranks would have to send their rows again.
    compat.EXCHANGE_OPERATOR,
    # The choice of experts must match the rows that were exchanged.
    _aten.topk.default,
}


def apply(model: Transformer, mode: str, every_n_layers: int = 1) -> None:
    """Checkpoint the activations of layers in place. A layer returns the routing statistics of its first run.

    Args:
        mode: "full" saves the input of a layer; "selective" also saves the results that cost most to recompute.
        every_n_layers: only the first of so many layers is checkpointed.
    """
    for layer in (*model.layers.values(), *model.mtp.values())[::every_n_layers]:
        # Recomputation stops at the last tensor that backward needs: in a decoder layer before the exchange back. In a
        # prediction layer a norm follows the exchange, so "selective" recomputes only the decoder layer inside it.
        module = layer.block if mode == "selective" and isinstance(layer, MTPLayer) else layer
        contexts = functools.partial(recomputation_contexts, mode, reads_result=isinstance(module, MTPLayer))
        # preserve_rng_state: the model draws no random numbers.
        module.forward = functools.partial(
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


def recomputation_contexts(mode: str, reads_result: bool) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a forward and of its recomputation. ``reads_result``: backward needs what the experts of other
    ranks return. Without, a chunk's rows are not sent back while those of the next one are computed again."""
    if mode == "selective":  # it keeps what the last hop brings
        return recomputation(("first hop", "back"), create_selective_checkpoint_contexts(_policy))
    return recomputation(() if reads_result else ("back",))


def _policy(_context, operator, *_arguments, **_keywords) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
