"""Estimates what a run needs besides training its policy: other networks, their passes, and generation."""

from math import prod

from glm46.config.model import ModelShape
from glm46.operate.estimate.activations import FP32
from glm46.operate.estimate.rank_parts import local_shape
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import Layout, generation_layout
from glm46.run.parameters import Parameter, layer_rows, named_rows, part_rows
from glm46.run.plan import Plan
from glm46.run.stages import split_layers


def other_networks(plan: Plan, weights: float, trained: float) -> float:
    """Return the bytes on a rank of the reference, the reward model and the critic; each is as large as the policy.

    Args:
        weights: bytes of the policy's weights on this rank.
        trained: bytes of its gradients and optimizer states.
    """
    if plan.config.rl is None:
        return 0.0
    rl = plan.config.rl.resolved()
    reference = weights * (rl.has_reference and not plan.config.is_reference_in_policy)
    judge = weights * (rl.reward_model is not None)
    return reference + judge + (weights + trained) * rl.has_critic


def generation_memory(plan: Plan) -> float:
    """Return the bytes of the local engine on a rank of its largest pipeline stage: the keys and values of its rows,
    and copied weights. Weights are not copied if the rank has the complete policy in the compute type without adapters.
    Ranks with parts of the model gather one tensor at a time to get theirs."""
    config = plan.config
    dtype = plan.config.training.mixed_precision_param
    if config.rl is None or config.rollout is None or config.rollout.kind != "local":
        return 0.0
    is_own = plan.layout.world_size == 1 and config.training.dtype == dtype
    is_own = is_own and config.adapter is None  # weights with merged adapters or in FP8 are copies
    layout = generation_layout(config.rollout.degrees, plan.layout.world_size)
    held = inference_bytes(
        plan.shape,
        layout,
        dtype,
        drafts=config.rollout.speculative,
        rows=config.rollout.samples_at_once,
        length=config.training.seq_len,
        copies_weights=not is_own,
        caches_drafts=True,
    )
    is_split = layout.non_dp_degree * layout.ep > 1
    largest = max(row.numel(plan.shape) for row in named_rows(plan.shape).values()) if is_split else 0
    return held + largest * WIDTHS[dtype]


def inference_bytes(
    shape: ModelShape,
    layout: Layout,
    dtype: str,
    *,
    drafts: bool = True,
    rows: int = 0,
    length: int = 0,
    copies_weights: bool = True,
    caches_drafts: bool = False,
) -> float:
    """Return the bytes of weights, keys and values of the decoder layers, on the rank that holds most.

    Args:
        layout: see `generation_layout`.
        dtype: type of keys and values, and of the weights except the selection biases, which are FP32.
        drafts: include the prediction layers.
        rows: sequences of a rank in the cache.
        length: tokens of each sequence.
        copies_weights: False if the engine shares the trainer's weights, which are then not counted.
        caches_drafts: count the keys and values of the prediction layers too.
    """
    width = WIDTHS[dtype]
    depths = shape.num_nextn_predict_layers if drafts else 0

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
        size = dense * of(layer_rows(shape, "dense")) + (len(stage) - dense) * of(layer_rows(shape, "moe"))
        size += sum(shape.has_indexer(layer) for layer in stage) * of(part_rows(shape, "indexer"))
        size += predicting * of(layer_rows(shape, "mtp", has_indexer=shape.is_sparse)) if predicting else 0
        size += of(part_rows(shape, "embedding")) * (not stage.start or bool(predicting))
        size += of(part_rows(shape, "head")) * is_last
        sizes.append(size * copies_weights + (len(stage) + predicting * caches_drafts) * cache)
    return max(sizes)


def cached_elements(shape: ModelShape, tp: int) -> int:
    """Return the elements of a token's keys and values in one layer, on a tensor-parallel rank."""
    return shape.latent_width or 2 * max(shape.num_key_value_heads // tp, 1) * shape.head_dim


def other_passes(plan: Plan) -> tuple[int, int]:
    """Return the forward passes without gradient over all rows of a step, and the updates of a critic in it.

    In preference training, passes of the reference, and for KTO also of both networks on other prompts; with [rl],
    passes of the old policy, the reference, the reward model and the critic.
    """
    if plan.config.rl is None:
        has_kl = plan.config.preference is not None and plan.config.preference.loss_type == "kto"
        return plan.config.has_preference_reference + 2 * has_kl, 0
    rl = plan.config.rl.resolved()
    is_old_apart = rl.old_policy == "trainer" and not rl.is_on_policy(plan.config.training.global_batch_size)
    has_judge = rl.reward_model is not None
    return is_old_apart + rl.has_reference + has_judge + rl.has_critic, int(rl.has_critic)
