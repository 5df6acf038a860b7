"""Keep only the input of each layer in forward and compute the layer again in backward."""

import functools

from torch.utils.checkpoint import checkpoint

from glm46.model.transformer import Transformer


def apply(model: Transformer) -> None:
    """Checkpoint every layer, in place. The routing statistics that a layer returns are those of its first run."""
    for layer in (*model.layers.values(), *model.mtp.values()):
        # preserve_rng_state: the model draws no random numbers, so there is no state to keep.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
