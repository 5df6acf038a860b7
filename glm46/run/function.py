"""The function of a network: what it computes besides its weights. Training, validation, evaluation, generation,
rollouts, exports and served weights take it from here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from glm46.config.loader import stored_config, without_gone_keys
from glm46.config.model import ModelShape
from glm46.config.moe import MoEConfig
from glm46.config.presets import resolve_shape
from glm46.run.schedule import schedule_value

_SHAPE_KEY, _TEMPERATURE_KEY = "shape", "router_temperature"
"""Keys of a checkpoint's meta."""

_GATE = ".router.weight"


class NetworkFunction(NamedTuple):
    """The function of a network at one point of a run."""

    shape: ModelShape
    """With the sliding window and the RoPE scaling in force."""
    router_temperature: float = 1.0
    """Divisor of the router logits. Routers have no bias of their logits, so a gate that is divided by it computes the
    same at 1: this is how folders and servers, which know no temperature, get it."""

    def meta(self) -> dict[str, Any]:
        """Part of a checkpoint's meta; `function_of_meta` reads it."""
        return {_SHAPE_KEY: self.shape.model_dump(), _TEMPERATURE_KEY: self.router_temperature}


def function_of_meta(meta: Mapping[str, Any]) -> NetworkFunction:
    """The function of a checkpoint's model in its last step. Checkpoints of earlier versions, and imported ones, have
    the shape of [model] and the temperature of the next step."""
    if _SHAPE_KEY in meta:
        shape = ModelShape.model_validate(without_gone_keys(meta[_SHAPE_KEY]))
    else:
        shape = resolve_shape(stored_config(meta["config"]).model)
    return NetworkFunction(shape, meta.get(_TEMPERATURE_KEY) or next_temperature(meta))


def next_temperature(meta: Mapping[str, Any]) -> float:
    """The router temperature of the step that would follow a checkpoint, by its own schedule."""
    tokens = meta.get("progress", {}).get("curriculum_tokens", 0)
    return schedule_value(stored_config(meta["config"]).moe.router_temperature, tokens)


def gate_factor(meta: Mapping[str, Any] | None, temperature: float) -> float:
    """The factor of loaded gates with which a network at a router temperature computes what they were trained for.

    Args:
        meta: of the checkpoint that they are from; None of a Hugging Face folder, which computes at 1.
        temperature: at which the network begins. It is the next one of the checkpoint's own schedule if this goes on
            across two phases, and then the factor is exactly 1.
    """
    if meta is None:
        return temperature
    return 1.0 if temperature == next_temperature(meta) else temperature / function_of_meta(meta).router_temperature


def is_gate(name: str) -> bool:
    """True of our name of a weight that the router temperature divides the products of."""
    return name.endswith(_GATE)


def capacity_lines(moe: MoEConfig, reader: str) -> list[str]:
    """A warning that a reader of the weights computes without the capacity; empty if there is none."""
    if moe.capacity_factor is None:
        return []
    return [
        f"warning: moe.capacity_factor = {moe.capacity_factor}: training drops tokens of full experts, by the tokens "
        f"beside them; {reader} drops none, and so computes another function"
    ]
