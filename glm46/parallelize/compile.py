"""torch.compile of each layer: layers of one kind share their code, so compile time does not grow with depth."""

import torch

from glm46.model.transformer import Transformer


def apply(model: Transformer) -> None:
    """Compile the forward of every layer, in place. Hooks that FSDP2 adds later stay outside the graphs."""
    for layer in (*model.layers.values(), *model.mtp.values()):
        layer.forward = torch.compile(layer.forward, fullgraph=True)
