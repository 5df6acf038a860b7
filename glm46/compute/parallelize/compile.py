"""torch.compile of each layer."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from glm46 import compat
from glm46.compat import uncompiled
from glm46.compute.model.attention_layout import AttentionLayout, KeyExchange
from glm46.compute.model.dispatch import LocalDispatcher
from glm46.compute.model.moe import MoE
from glm46.compute.model.quantised_weights import let_conversions_compile
from glm46.compute.model.sparse_attention import SparseState
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.compiled_code import repair_compiled_code

_Output = TypeVar("_Output")
_MOST_COMPILATIONS = 32
"""Maximum number of compilations of a layer's forward: dense and with experts, with and without gradients, in training
and of other shapes in validation and probes, each for one row and for several, with and without shared prefixes."""


def apply(
    model: Transformer,
    *,
    whole_graphs: bool,
    sizes_vary: bool = False,
    splits_backward: bool = False,
    inner_layers: bool = False,
) -> None:
    """Compile the forward of every layer in place. Layers of one kind share their code, so that compile time does not
    grow with depth. Hooks that FSDP2 adds later stay outside the graphs.

    Args:
        whole_graphs: require one graph per layer. False if a layer exchanges tokens or keys with other ranks: the
            exchange stays outside the graphs, because its sizes are known only at run time.
        sizes_vary: steps have other numbers of rows, or of tokens in a row.
        splits_backward: the pipeline schedule runs backward in two halves.
        inner_layers: compile only the decoder layer of each prediction layer, which is then checkpointed: no graph
            can contain our checkpointing.
    """
    repair_compiled_code()
    compat.let_layers_compile(_MOST_COMPILATIONS)
    compat.let_longest_run_vary()
    if splits_backward:
        compat.let_backward_run_twice()
    if torch.cuda.is_available():
        let_conversions_compile()
    prediction_layers: list[Any] = [*model.mtp.values()]
    if inner_layers:
        prediction_layers = [layer.block for layer in prediction_layers]
    for layer in (*model.layers.values(), *prediction_layers):
        layer.forward = _for_any_layout(torch.compile(layer.forward, fullgraph=whole_graphs), sizes_vary=sizes_vary)
        for module in layer.modules():
            if isinstance(module, MoE) and not isinstance(module.dispatcher, LocalDispatcher):
                _compile_experts(module.experts, overlaps=getattr(module.dispatcher, "chunks", 1) > 1)


def _compile_experts(experts: Any, *, overlaps: bool) -> None:
    """Compile the experts of a layer; if chunks of tokens travel between their products, compile these instead."""
    if overlaps:
        experts.forward = torch.compiler.disable(experts.forward)
        experts.first_product = _for_any_number_of_rows(torch.compile(experts.first_product))
        experts.second_product = _for_any_number_of_rows(torch.compile(experts.second_product))
    else:
        experts.forward = _for_any_number_of_rows(torch.compile(experts.forward))


def _for_any_number_of_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a compiled forward of experts, or of one of their products, with one graph for any number of rows.

    By itself `torch.compile` makes code for the first number of rows too: a layer runs by it, and its recomputation by
    the code for any number, which may keep tensors in another order. The wrapper runs after the hook of FSDP2, which
    makes new tensors, and for each chunk of rows.
    """

    @uncompiled
    def call(*arguments: Tensor | None) -> Tensor:
        for tensor in arguments:
            if tensor is not None and tensor.is_floating_point():  # not the offsets, whose number is fixed
                compat.let_size_vary(tensor, 0)
        return forward(*arguments)

    return call


def _for_any_layout(forward: Callable[..., _Output], *, sizes_vary: bool) -> Callable[..., _Output]:
    """Return a compiled forward of a layer with one graph for any number of documents and keys, and perhaps of rows and
    tokens."""

    def call(*arguments: object) -> _Output:
        for argument in arguments:
            if isinstance(argument, AttentionLayout):
                compat.let_size_vary(argument.cu_seq_q, 0)
                compat.let_size_vary(argument.cu_seq_k, 0)
                if isinstance(argument.exchange, KeyExchange):
                    compat.let_size_vary(argument.exchange.keys, 0)
            elif sizes_vary and isinstance(argument, SparseState):
                if argument.keys is not None:
                    compat.let_size_vary(argument.keys, 0)
            elif sizes_vary:
                tensors = argument if type(argument) is tuple else (argument,)  # the rotary tables are a pair
                for tensor in tensors:
                    if isinstance(tensor, Tensor):
                        for dim in range(2):  # rows and tokens
                            compat.let_size_vary(tensor, dim)
        return forward(*arguments)

    return call
