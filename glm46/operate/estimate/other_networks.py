"""Needs of a run beside the training of its policy: other networks, their passes, and the generation of completions."""

from math import prod

from glm46.operate.estimate.rank_parts import local_shape
from glm46.run.layout import generation_layout
from glm46.run.parameters import named_rows
from glm46.run.plan import Plan
from glm46.run.stages import split_layers


def other_networks(plan: Plan, weights: float, trained: float) -> tuple[float, float]:
    """Bytes on a rank, on its device and in host memory, of the frozen reference and of the critic, which is as large
    as the policy.

    Args:
        weights: bytes of the policy's weights on this rank.
        trained: of its gradients and optimizer states.
    """
    if plan.config.rl is None:
        return 0.0, 0.0
    rl = plan.config.rl.resolved()
    reference = weights * (rl.has_reference and not plan.config.is_reference_in_policy)
    host = reference * rl.reference_offload
    return reference - host + (weights + trained) * rl.has_critic, host


def drawing(plan: Plan) -> float:
    """Bytes of the local engine on a rank of its largest pipeline stage: the keys and values of its rows, and copied
    weights, unless the rank has the whole policy in the type of its products and without adapters. Ranks with parts of
    the model gather one tensor at a time to take theirs."""
    config, shape = plan.config, plan.shape
    if config.rl is None or config.rollout is None or config.rollout.kind != "local":
        return 0.0
    if not config.rollout.speculative:
        shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
    width = 4 if config.training.mixed_precision_param == "float32" else 2
    is_own = plan.layout.world_size == 1 and config.training.dtype == config.training.mixed_precision_param
    is_own = is_own and config.adapter is None  # sums with adapters, and what is in FP8, are copies
    layout, rows = generation_layout(config.rollout.degrees, plan.layout.world_size), named_rows(shape)
    is_split = layout.non_dp_degree * layout.ep > 1
    gathered = max(row.numel(shape) for row in rows.values()) if is_split else 0
    heads = 2 * max(shape.num_key_value_heads // layout.tp, 1) * shape.head_dim
    stages = split_layers(shape, layout.pp, shape.max_position_embeddings)
    most = 0
    for layers in stages:
        outside = {"embed_tokens": layers.start == 0}  # norm and head are on the last stage
        names = [
            name
            for name in rows
            if (int(name.split(".")[1]) in layers if name.startswith("layers.") else
                outside.get(name.split(".")[0], layers is stages[-1]))
        ]  # fmt: skip
        weights = 0 if is_own else sum(prod(local_shape(rows[name], shape, layout)) for name in names)
        cached = len(layers) + shape.num_nextn_predict_layers * (layers is stages[-1])
        most = max(most, weights + config.rollout.samples_at_once * config.training.seq_len * heads * cached)
    return width * (most + gathered)


def other_passes(plan: Plan) -> tuple[int, int]:
    """Forward passes without gradient over all rows of a step, and updates of a critic in it.

    The passes: of the reference of a preference; with [rl] of the old policy, the reference and the critic.
    """
    if plan.config.rl is None:
        return int(plan.config.preference is not None), 0
    rl = plan.config.rl.resolved()
    is_old_apart = rl.old_policy == "trainer" and not rl.is_on_policy(plan.config.training.global_batch_size)
    return is_old_apart + rl.has_reference + rl.has_critic, int(rl.has_critic)
