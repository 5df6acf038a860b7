"""Provides the shape of a model by its flavor, with counted parameters: ``from glm46 import model_shape``."""

from typing import Any

from glm46.config.loader import config_from
from glm46.config.model import ModelShape
from glm46.config.presets import resolve_shape
from glm46.run.parameters import count_parameters


class CountedShape(ModelShape):
    """A `ModelShape` that counts its parameters."""

    @property
    def total_parameters(self) -> int:
        """All parameters as Hugging Face counts tensors: MTP layers and the routers' selection biases included."""
        return count_parameters(self).total

    @property
    def active_parameters(self) -> int:
        """Parameters used per token: embedding and head included, MTP layers excluded."""
        return count_parameters(self).active


def model_shape(flavor: str, **changes: Any) -> CountedShape:
    """Return the shape that a TOML file with this flavor and these keys in ``[model.shape]`` has.

    Args:
        flavor: a preset, such as "GLM-4.6", "GLM-4.5-Air" or "15B".
        changes: keys of the shape to change, such as ``num_hidden_layers=24``.

    Raises:
        UserError: a flavor or key is unknown, or the values do not form a valid model; lists every fault.
    """
    config = config_from({"model": {"flavor": flavor, "shape": changes}})
    return CountedShape.model_validate(resolve_shape(config.model).model_dump())
