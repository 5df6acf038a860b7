"""The shape of a checkpoint's model, which its meta holds."""

from collections.abc import Mapping
from typing import Any

import tomli

from glm46.config.model import Model, ModelShape
from glm46.config.presets import resolve_shape

SHAPE_KEY = "shape"
"""Key of a checkpoint's meta: the shape of its model, with the window and RoPE scaling of the last step."""


def shape_of_meta(meta: Mapping[str, Any]) -> ModelShape:
    """The shape of a checkpoint's model, with the window and RoPE scaling of its last step. Checkpoints of earlier
    versions, and imported ones, have those of [model]."""
    if SHAPE_KEY in meta:
        return ModelShape.model_validate(meta[SHAPE_KEY])
    return resolve_shape(Model.model_validate(tomli.loads(meta["config"])["model"]))
