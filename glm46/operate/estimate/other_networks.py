"""Needs of a run beside the training of its policy: other networks, their passes, and the generation of completions."""

from math import prod

from glm46.config.model import ModelShape
from glm46.operate.estimate.activations import FP32
from glm46.operate.estimate.rank_parts import local_shape
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import Layout, generation_layout
from glm46.run.parameters import Parameter, dense_layer, moe_layer, mtp_layer, named_rows, part_rows
from glm46.run.plan import Plan, resolve_plan
from glm46.run.stages import split_layers


def other_networks(plan: Plan, weights: float, trained: float) -> tuple[float, float]:
    """Bytes on a rank, on its device and in host memory, of the reference, the reward model and the critic; each is as
    large as the policy.

    Args:
        weights: bytes of the policy's weights on this rank.
        trained: of its gradients and optimizer states.
    """
    if plan.config.rl is None:
        return 0.0, 0.0
    rl = plan.config.rl.resolved()
    reference = weights * (rl.has_reference and not plan.config.is_reference_in_policy)
    host = reference * rl.reference_offload
    judge = weights * (rl.reward_model is not None)
    return reference - host + judge + (weights + trained) * rl.has_critic, host


def generation_memory(plan: Plan) -> float:
    """Bytes of the local engine on a rank of its largest pipeline stage: the keys and values of its rows, and copied
    weights, unless the rank has the whole policy in the type of its products and without adapters. Ranks with parts of
    the model gather one tensor at a time to take theirs."""
    config, dtype = plan.config, plan.config.training.mixed_precision_param
    if config.rl is None or config.rollout is None or config.rollout.kind != "local":
        return 0.0
    is_own = plan.layout.world_size == 1 and config.training.dtype == dtype
    is_own = is_own and config.adapter is None  # sums with adapters, and what is in FP8, are copies
    layout = generation_layout(config.rollout.degrees, plan.layout.world_size)
    held = inference_bytes(
        plan.shape, layout, dtype, drafts=config.rollout.speculative, rows=config.rollout.samples_at_once,
        length=config.training.seq_len, copies_weights=not is_own, caches_drafts=True,
    )  # fmt: skip
    is_split = layout.non_dp_degree * layout.ep > 1
    largest = max(row.numel(plan.shape) for row in named_rows(plan.shape).values()) if is_split else 0
    return held + largest * WIDTHS[dtype]


def inference_bytes(
    shape: ModelShape, layout: Layout, dtype: str, *, drafts: bool = True, rows: int = 0, length: int = 0,
    copies_weights: bool = True, caches_drafts: bool = False,
) -> float:  # fmt: skip
    """Bytes of the weights, and of the keys and values of the decoder layers, on the rank that holds most.

    Args:
        layout: see `generation_layout`.
        dtype: of the weights but the selection biases, which are FP32, and of keys and values.
        drafts: with the prediction layers.
        rows: sequences of a rank in the cache.
        length: tokens of each.
        copies_weights: False: the weights are those of somebody else, and not counted.
        caches_drafts: count the keys and values of the prediction layers too.
    """
    width, depths = WIDTHS[dtype], shape.num_nextn_predict_layers if drafts else 0

    def of(rows: list[Parameter]) -> float:
        return sum(prod(local_shape(row, shape, layout)) * (FP32 if row.optimizer is None else width) for row in rows)

    layers = range(shape.num_hidden_layers)
    stages = [layers] if layout.pp == 1 else split_layers(shape, layout.pp, shape.max_position_embeddings)
    cache = rows * length * cached_elements(shape, layout.tp) * width
    sizes = []
    for stage in stages:
        is_last = stage.stop >= len(layers)
        dense = len(range(stage.start, min(stage.stop, shape.first_k_dense_replace)))
        predicting = depths * is_last
        size = dense * of(dense_layer(shape)) + (len(stage) - dense) * of(moe_layer(shape))
        size += predicting * of(mtp_layer(shape)) if predicting else 0
        size += of(part_rows(shape, "embedding")) * (not stage.start or bool(predicting))
        size += of(part_rows(shape, "head")) * is_last
        sizes.append(size * copies_weights + (len(stage) + predicting * caches_drafts) * cache)
    return max(sizes)


def cached_elements(shape: ModelShape, tp: int) -> int:
    """Of the keys and values of a token in one layer, on a rank of tensor parallelism."""
    return shape.latent_width or 2 * max(shape.num_key_value_heads // tp, 1) * shape.head_dim


def frozen_plan(plan: Plan) -> Plan | None:
    """The plan of the network that fine-tuning compares with and does not train: a reference as large as the policy, or
    a teacher. None without one, and where it is the policy without its adapters."""
    config = plan.config
    if config.teacher is not None:
        return resolve_plan(config.teacher, plan.layout.world_size, plan.document_tokens, host_ranks=plan.host_ranks)
    return plan if config.has_preference_reference and config.adapter is None else None


def other_passes(plan: Plan) -> tuple[int, int]:
    """Forward passes without gradient over all rows of a step, and updates of a critic in it.

    The passes: of a teacher, or of the reference of a preference, of KTO also of both networks on other prompts; with
    [rl] of the old policy, the reference, the reward model and the critic.
    """
    if plan.config.rl is None:
        has_kl = plan.config.preference is not None and plan.config.preference.loss_type == "kto"
        has_teacher = (of := plan.config.distillation) is not None and of.stored_path is None
        return plan.config.has_preference_reference + 2 * has_kl + has_teacher, 0
    rl = plan.config.rl.resolved()
    is_old_apart = rl.old_policy == "trainer" and not rl.is_on_policy(plan.config.training.global_batch_size)
    has_judge = rl.reward_model is not None
    return is_old_apart + rl.has_reference + has_judge + rl.has_critic, int(rl.has_critic)
