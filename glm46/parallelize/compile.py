"""torch.compile of each layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glm46 import compat
from glm46.model.attention_layout import AttentionLayout
from glm46.model.moe import MoE
from glm46.model.transformer import Transformer
from glm46.parallelize.expert import AllToAllDispatcher


def apply(model: Transformer, *, whole_graphs: bool, splits_backward: bool = False) -> None:
    """Compile the forward of every layer in place. Layers of one kind share their code, so that compile time does not
    grow with depth. Hooks that FSDP2 adds later stay outside the graphs.

    Args:
        whole_graphs: require one graph per layer. False if a layer exchanges tokens or keys with other ranks: the
            exchange stays outside the graphs, because its sizes are known only at run time.
        splits_backward: the pipeline schedule runs backward in two halves.
    """
    if splits_backward:
        compat.let_backward_run_twice()
    for layer in (*model.layers.values(), *model.mtp.values()):
        layer.forward = _for_any_layout(torch.compile(layer.forward, fullgraph=whole_graphs))
        for module in layer.modules():
            if isinstance(module, MoE) and isinstance(module.dispatcher, AllToAllDispatcher):
                # It runs after the hook of FSDP2, which makes new tensors.
                module.experts.register_forward_pre_hook(torch.compiler.disable(_for_any_number_of_rows))


def _for_any_number_of_rows(_experts: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Compile experts once. By itself `torch.compile` makes code for the first number of rows too: a layer runs by it,
    and its recomputation by that for any number, which may keep tensors in another order."""
    for varying in inputs[:2]:
        compat.let_size_vary(varying, 0)


def _for_any_layout(forward: Callable) -> Callable:
    """The forward of a layer, compiled once for any number of documents."""

    def call(*arguments: object):
        for layout in arguments:
            if isinstance(layout, AttentionLayout):
                compat.let_size_vary(layout.cu_seq_q, 0)
                compat.let_size_vary(layout.cu_seq_k, 0)
        return forward(*arguments)

    return call
