"""Function of a network: everything besides its weights that determines what it computes. Training, validation,
evaluation, generation, rollouts, exports and served weights take it from here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.config.loader import stored_config, without_gone_keys
from glm46.config.model import ModelShape
from glm46.config.moe import MoEConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.run.schedule import schedule_value

# Keys of a checkpoint's meta.
_SHAPE_KEY = "shape"
_TEMPERATURE_KEY = "router_temperature"

_GATE = ".router.weight"


class NetworkFunction(NamedTuple):
    """Function of a network at one point of a run."""

    shape: ModelShape
    """Shape with the current sliding window and RoPE scaling."""
    router_temperature: float = 1.0
    """Divisor of the router logits. Router logits have no bias, so a gate divided by the temperature computes the same
    at temperature 1. Exports to folders and servers, which have no temperature, use this."""

    def meta(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's meta that `function_of_meta` reads."""
        return {_SHAPE_KEY: self.shape.model_dump(), _TEMPERATURE_KEY: self.router_temperature}


def config_of_meta(meta: Mapping[str, Any], folder: Path) -> RunConfig:
    """Return the config of the run that saved a step folder. Raises UserError if it cannot be read or has another
    version, see `stored_config`."""
    try:
        return stored_config(meta["config"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"its meta has no config of a run ({type(error).__name__}: {error})"
        raise UserError(f"{folder}: {reason}; take another checkpoint") from error


def function_of_meta(meta: Mapping[str, Any]) -> NetworkFunction:
    """Return the function of a checkpoint's model in its last step. For checkpoints of earlier versions, and imported
    ones, it has the shape of [model] and the temperature of the next step."""
    if _SHAPE_KEY in meta:
        shape = ModelShape.model_validate(without_gone_keys(meta[_SHAPE_KEY]))
    else:
        shape = resolve_shape(stored_config(meta["config"]).model)
    return NetworkFunction(shape, meta.get(_TEMPERATURE_KEY) or next_temperature(meta))


def next_temperature(meta: Mapping[str, Any]) -> float:
    """Return the router temperature of the step after a checkpoint, by its own schedule. Weights of another program
    have no schedule."""
    if "config" not in meta:
        imported: float = meta[_TEMPERATURE_KEY]
        return imported
    tokens = meta.get("progress", {}).get("curriculum_tokens", 0)
    return schedule_value(stored_config(meta["config"]).moe.router_temperature, tokens)


def gate_factor(meta: Mapping[str, Any], temperature: float) -> float:
    """Compute the factor for loaded gates so that a network at this router temperature keeps the function of the gates.

    Args:
        meta: meta of the checkpoint of the gates, or `NetworkFunction.meta` of a folder of another program.
        temperature: first temperature of the network. If it equals the next one of the checkpoint's own schedule, the
            schedule continues across two phases, and the factor is exactly 1.
    """
    following = next_temperature(meta)
    return 1.0 if temperature == following else temperature / (meta.get(_TEMPERATURE_KEY) or following)


def is_gate(name: str) -> bool:
    """Return whether this is our name of a gate, the weight whose products the router temperature divides."""
    return name.endswith(_GATE)


def capacity_lines(moe: MoEConfig, reader: str) -> list[str]:
    """Warn that a reader of the weights computes without the capacity factor; empty if there is no such factor."""
    if moe.capacity_factor is None:
        return []
    return [
        f"warning: moe.capacity_factor = {moe.capacity_factor}: training drops tokens of full experts, by the tokens "
        f"beside them; {reader} drops none, and so computes another function"
    ]
