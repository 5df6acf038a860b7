"""Activation checkpointing of each layer: save some results of forward, recompute the rest in backward."""

import functools
from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glm46 import compat
from glm46.compute.distributed.recomputation import Part, recomputation
from glm46.compute.model.adapters import adapted_grouped_mm
from glm46.compute.model.attention_runs import block_attention
from glm46.compute.model.experts import grouped_mm
from glm46.compute.model.mtp import MTPLayer
from glm46.compute.model.transformer import Transformer

_aten = torch.ops.aten
_OPERATORS = {
    # Its cost is quadratic in the sequence, its result is linear.
    "core_attn": {
        block_attention._opoverload,
        compat.VARLEN_OPERATOR,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    },
    # Most of the FLOPs of a layer.
    "experts": {grouped_mm._opoverload, adapted_grouped_mm._opoverload, _aten._scaled_grouped_mm.default},
    # Other ranks would have to send their rows again.
    "exchange": {compat.EXCHANGE_OPERATOR},
}
"""Operators whose results selective checkpointing keeps, by the names that `recompute` takes."""


def apply(model: Transformer, mode: str, recompute: tuple[str, ...] = (), every_n_layers: int = 1) -> None:
    """Checkpoint the activations of layers in place. A layer returns the routing statistics of its first run.

    Args:
        mode: "full" saves the input of a layer; "selective" also saves the results that cost most to recompute.
        recompute: names of results that "selective" does not save.
        every_n_layers: only the first of so many layers is checkpointed.
    """
    for layer in (*model.layers.values(), *model.mtp.values())[::every_n_layers]:
        # Recomputation stops at the last tensor that backward needs: in a decoder layer before the exchange back. In a
        # prediction layer a norm follows the exchange, so "selective" recomputes only the decoder layer inside it.
        module = layer.block if mode == "selective" and isinstance(layer, MTPLayer) else layer
        contexts = functools.partial(recomputation_contexts, mode, recompute, isinstance(module, MTPLayer))
        # preserve_rng_state: the model draws no random numbers.
        module.forward = functools.partial(
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


def recomputation_contexts(
    mode: str, recompute: tuple[str, ...] = (), reads_result: bool = False
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a forward and of its recomputation. ``reads_result``: backward needs what the experts of other
    ranks return. Without, a chunk's rows are not sent back while those of the next one are computed again."""
    left_out: tuple[Part, ...] = () if reads_result else ("back",)
    if mode == "full":
        return recomputation(left_out)
    saved = set[object]().union(*(_OPERATORS[name] for name in _OPERATORS.keys() - set(recompute)))
    # The choice of experts, which is small, and must match the rows that were exchanged.
    saved.add(_aten.topk.default)

    def policy(_context, operator, *_arguments, **_keywords) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    if "exchange" not in recompute:  # it keeps what the last hop brings
        left_out = ("first hop", *left_out)
    return recomputation(left_out, create_selective_checkpoint_contexts(policy))
