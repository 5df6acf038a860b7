"""torch.compile of each layer: layers of one kind share their code, so compile time does not grow with depth."""

import torch

from glm46.model.transformer import Transformer


def apply(model: Transformer, *, tokens_travel: bool) -> None:
    """Compile the forward of every layer, in place. Hooks that FSDP2 adds later stay outside the graphs.

    Args:
        tokens_travel: experts are on other ranks. How many tokens arrive is known only at run time, so the exchange
            stays outside the graphs; without it a layer must be one whole graph.
    """
    for layer in (*model.layers.values(), *model.mtp.values()):
        layer.forward = torch.compile(layer.forward, fullgraph=not tokens_travel)
