"""Activation checkpointing of each layer: save some results of forward, recompute the rest in backward."""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glm46 import compat
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


def apply(model: Transformer, mode: str) -> None:
    """Checkpoint the activations of every layer in place. A layer returns the routing statistics of its first run.

    Args:
        mode: "full" saves the input of a layer; "selective" also saves the results that cost most to recompute.
    """
    keywords = {}
    if mode == "selective":
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in (*model.layers.values(), *model.mtp.values()):
        # Recomputation stops at the last tensor that backward needs: in a decoder layer before the exchange back. In a
        # prediction layer a norm follows the exchange, so "selective" recomputes only the decoder layer inside it.
        module = layer.block if mode == "selective" and isinstance(layer, MTPLayer) else layer
        # preserve_rng_state: the model draws no random numbers.
        module.forward = functools.partial(
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **keywords
        )


def _policy(_context, operator, *arguments, **keywords) -> CheckpointPolicy:
    is_saved = operator in _SAVED_OPERATORS or _is_copy_to_host(operator, arguments, keywords)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_copy_to_host(operator, arguments: tuple, keywords: dict) -> bool:
    """True for a copy from a GPU to the host: the sizes of an exchange, which would synchronise again."""
    target = keywords.get("device")
    return operator == _aten._to_copy.default and target == torch.device("cpu") != arguments[0].device
