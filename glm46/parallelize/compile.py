"""torch.compile of each layer: layers of one kind share their code, so compile time does not grow with depth."""

import torch

from glm46 import compat
from glm46.model.transformer import Transformer


def apply(model: Transformer, *, whole_graphs: bool, splits_backward: bool) -> None:
    """Compile the forward of every layer, in place. Hooks that FSDP2 adds later stay outside the graphs.

    Args:
        whole_graphs: each layer must become one graph. False where a layer exchanges tokens or keys with other ranks:
            the exchange stays outside the graphs, because how much arrives is known only at run time.
        splits_backward: the pipeline's schedule goes through backward in two halves.
    """
    if splits_backward:
        compat.let_backward_run_twice()
    for layer in (*model.layers.values(), *model.mtp.values()):
        layer.forward = torch.compile(layer.forward, fullgraph=whole_graphs)
