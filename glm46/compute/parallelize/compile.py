"""torch.compile of each layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm46 import compat
from glm46.compute.model.attention_layout import AttentionLayout, KeyExchange
from glm46.compute.model.dispatch import LocalDispatcher
from glm46.compute.model.moe import MoE
from glm46.compute.model.quantised_weights import let_conversions_compile
from glm46.compute.model.transformer import Transformer

_MOST_COMPILATIONS = 32
"""Of a layer's forward: dense and with experts, with and without gradients, in training and of other shapes in
validation and probes, each for one row and for several, with and without shared prefixes."""


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
        inner_layers: of prediction layers compile the decoder layer alone, which is then checkpointed: no graph can
            have our checkpointing inside.
    """
    compat.let_layers_compile(_MOST_COMPILATIONS)
    compat.let_longest_run_vary()
    if splits_backward:
        compat.let_backward_run_twice()
    if torch.cuda.is_available():
        let_conversions_compile()
    ahead: list[Any] = [*model.mtp.values()]
    for layer in (*model.layers.values(), *(each.block if inner_layers else each for each in ahead)):
        layer.forward = _for_any_layout(torch.compile(layer.forward, fullgraph=whole_graphs), sizes_vary=sizes_vary)
        for module in layer.modules():
            if isinstance(module, MoE) and not isinstance(module.dispatcher, LocalDispatcher):
                experts: Any = module.experts
                experts.forward = _for_any_number_of_rows(torch.compile(experts.forward))


def _for_any_number_of_rows(forward: Callable) -> Callable:
    """The forward of experts, compiled once. By itself `torch.compile` makes code for the first number of rows too: a
    layer runs by it, and its recomputation by that for any number, which may keep tensors in another order.

    It runs after the hook of FSDP2, which makes new tensors, and for each chunk of rows."""

    @torch.compiler.disable
    def call(x_ND: Tensor, weights_N: Tensor, *others: object):
        for varying in (x_ND, weights_N):
            compat.let_size_vary(varying, 0)
        return forward(x_ND, weights_N, *others)

    return call


def _for_any_layout(forward: Callable, *, sizes_vary: bool) -> Callable:
    """The forward of a layer, compiled once for any number of documents and of keys, and perhaps of rows and
    tokens."""

    def call(*arguments: object):
        for given in arguments:
            if isinstance(given, AttentionLayout):
                compat.let_size_vary(given.cu_seq_q, 0)
                compat.let_size_vary(given.cu_seq_k, 0)
                if isinstance(given.exchange, KeyExchange):
                    compat.let_size_vary(given.exchange.keys, 0)
            elif sizes_vary:
                for tensor in given if type(given) is tuple else (given,):
                    if isinstance(tensor, Tensor):
                        for dim in range(2):
                            compat.let_size_vary(tensor, dim)
        return forward(*arguments)

    return call
