"""Parallel degrees for generation, in [rollout] and on the command line, and their rules."""

from collections.abc import Callable
from typing import NamedTuple

from glm46.config.faults import counted, near_values
from glm46.config.model import ModelShape

_MOST = 1024
"""The largest degree that a message proposes."""


class Degrees(NamedTuple):
    """Ranks over which one model is split; the field names are the names of the keys and options without
    ``_degree``."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that compute the same tokens."""
        return self.tensor_parallel * self.pipeline_parallel


def _broken_rules(
    degrees: Degrees, shape: ModelShape, world_size: int | None, spell: Callable[[str, int], str]
) -> list[tuple[str, str]]:
    """Return the degrees that break a rule, each with the rule; see `degree_faults`."""
    tensor, pipeline, expert = degrees
    faults = []
    for key, degree, what, size in (
        ("tensor_parallel", tensor, "num_attention_heads", shape.num_attention_heads),
        ("tensor_parallel", tensor, "vocab_size", shape.vocab_size),
        ("expert_parallel", expert, "n_routed_experts", shape.n_routed_experts),
    ):
        if size % degree:
            faults.append((key, f"must divide model.shape.{what} = {size}"))
    heads = shape.num_key_value_heads
    width = shape.head_dim
    if not shape.is_latent and heads % tensor and (tensor % heads or width % (tensor // heads)):
        key = f"model.shape.num_key_value_heads = {heads}"
        rule = f"must divide {key}, or be a multiple that leaves each rank an equal part"
        faults.append(("tensor_parallel", f"{rule} of a head's {width} rows"))
    if pipeline > shape.num_hidden_layers:
        faults.append(("pipeline_parallel", f"at most model.shape.num_hidden_layers = {shape.num_hidden_layers}"))
    if expert % tensor and tensor % expert:
        faults.append(("expert_parallel", f"must divide {spell('tensor_parallel', tensor)}, or be a multiple of it"))
    if world_size is not None and world_size % degrees.ranks:
        faults.append(
            ("tensor_parallel", f"times {pipeline} pipeline stages must divide {counted(world_size, 'process')}")
        )
    elif world_size is not None and world_size // pipeline % expert:
        faults.append(("expert_parallel", f"must divide the {world_size // pipeline} processes of a pipeline stage"))
    return faults


def degree_faults(
    degrees: Degrees, shape: ModelShape, world_size: int | None, spell: Callable[[str, int], str]
) -> list[tuple[str, str]]:
    """Return each degree that does not split the model evenly or does not fit the processes, with its message.

    Args:
        world_size: None when it is not known yet.
        spell: formats a degree as the user writes it, from the name of its field and its value.
    """

    def is_refused(key: str, degree: int) -> bool:
        return key in dict(_broken_rules(degrees._replace(**{key: degree}), shape, world_size, spell))

    faults = []
    for key, fault in _broken_rules(degrees, shape, world_size, spell):
        degree: int = getattr(degrees, key)
        remedy = near_values(degree, _MOST, lambda n: not is_refused(key, n))  # noqa: B023 - called here
        faults.append((key, f"{spell(key, degree)}: {fault}; {remedy}"))
    return faults
