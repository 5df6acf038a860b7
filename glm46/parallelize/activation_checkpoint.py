"""Keep only a part of what a layer computes in forward, and compute the rest again in backward."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glm46 import compat
from glm46.model.experts import grouped_mm
from glm46.model.mtp import MTPLayer
from glm46.model.transformer import Transformer

_aten = torch.ops.aten
_KEPT = {
    # Attention: it costs the square of the sequence, its result is as long as the sequence.
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    # Experts: most of what a layer multiplies.
    grouped_mm._opoverload,
    # What other ranks would have to send again.
    compat.EXCHANGE_OPERATOR,
    # The choice of experts, because what arrived belongs to it.
    _aten.topk.default,
}


def apply(model: Transformer, mode: str) -> None:
    """Checkpoint every layer, in place. The routing statistics that a layer returns are those of its first run.

    Args:
        mode: "full" keeps the input of a layer; "selective" also the results of what costs most to repeat.
    """
    keywords = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    for layer in (*model.layers.values(), *model.mtp.values()):
        # Recomputation ends with the last tensor that backward needs: in a decoder layer before the exchange back. In
        # a prediction layer a norm follows, so there only the decoder layer inside is computed again.
        part = layer.block if mode == "selective" and isinstance(layer, MTPLayer) else layer
        _checkpoint(part, **(keywords if mode == "selective" else {}))


def _checkpoint(module: nn.Module, **keywords) -> None:
    # preserve_rng_state: the model draws no random numbers, so there is no state to keep.
    module.forward = functools.partial(
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **keywords
    )


def _policy(_context, operator, *arguments, **keywords) -> CheckpointPolicy:
    keep = operator in _KEPT or _is_read_by_host(operator, arguments, keywords)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_read_by_host(operator, arguments: tuple, keywords: dict) -> bool:
    """A copy from a GPU to the host: the sizes of an exchange, which the host would wait for again."""
    target = keywords.get("device")
    return operator == _aten._to_copy.default and target == torch.device("cpu") != arguments[0].device
