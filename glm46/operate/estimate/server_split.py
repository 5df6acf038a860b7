"""Splits a model over the GPUs of an inference server."""

from typing import NamedTuple

from glm46.config.generation_degrees import Degrees
from glm46.config.model import ModelShape
from glm46.run.layout import Layout, generation_layout


class ServerSplit(NamedTuple):
    """The GPUs of one server, and how many of them share heads."""

    gpus: int
    tensor: int
    """GPUs that share the heads of attention; all of them if experts are not spread."""

    @property
    def replicas(self) -> int:
        """Replicas of attention, whose GPUs share the experts."""
        return self.gpus // self.tensor

    @property
    def layout(self) -> Layout:
        return generation_layout(Degrees(self.tensor, 1, self.gpus), self.gpus)


def split_model(shape: ModelShape, gpus: int, host_gpus: int) -> ServerSplit | None:
    """Split a model over GPUs, `host_gpus` on each host: heads over the largest number of GPUs of a host that divides
    them, experts over all GPUs. None if there is no such split."""
    if shape.n_routed_experts % gpus or gpus > host_gpus and gpus % host_gpus:
        return None
    heads = shape.num_attention_heads if shape.is_latent else shape.num_key_value_heads
    tensor = max(size for size in range(1, min(gpus, host_gpus) + 1) if not (gpus % size or heads % size))
    return ServerSplit(gpus, tensor)


def leaves_room(weights: float, room: float) -> bool:
    """True if half of a GPU's room remains for keys and values: with less, a server waits for its longest samples."""
    return 2 * weights <= room
