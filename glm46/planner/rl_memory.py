"""Memory that a run with [rl] needs beside its policy: other networks, and what draws completions in the job."""

from glm46.planner.parameters import count_parameters
from glm46.planner.plan import Plan

ROWS = 64
"""Samples that the local engine draws at once on each rank."""


def other_networks(plan: Plan, weights: float, trained: float) -> float:
    """Bytes on a rank of the frozen reference and of the critic, which is as large as the policy.

    Args:
        weights: bytes of the policy's weights on this rank.
        trained: of its gradients and optimizer states.
    """
    if plan.config.rl is None:
        return 0.0
    rl = plan.config.rl.resolved()
    return weights * rl.has_reference + (weights + trained) * rl.has_critic


def drawing(plan: Plan) -> float:
    """Bytes on each rank of the local engine: the keys and values of its rows, and a copy of the whole policy where
    the rank does not hold it whole in the type of its products."""
    config, shape = plan.config, plan.shape
    if config.rl is None or config.rollout is None or config.rollout.kind != "local":
        return 0.0
    width = 4 if config.training.mixed_precision_param == "float32" else 2
    is_own = plan.layout.world_size == 1 and config.training.dtype == config.training.mixed_precision_param
    heads = 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers
    return width * (ROWS * config.training.seq_len * heads + (0 if is_own else count_parameters(shape).main))
