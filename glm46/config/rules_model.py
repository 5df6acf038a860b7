"""Rules about the shape of a model."""

from collections.abc import Iterator

from glm46.config.faults import near_values, show
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig


@rule
def heads_group_evenly(shape: ModelShape) -> Faults:
    """Each key and value head serves the same number of query heads."""
    queries = shape.num_attention_heads
    heads = shape.num_key_value_heads
    if queries % heads:
        near = near_values(queries, queries + heads, lambda number: number % heads == 0)
        yield fault(
            f"`model.shape.num_attention_heads`: must be a multiple of `model.shape.num_key_value_heads`; {near}"
        )


@rule
def rotated_part_is_even(shape: ModelShape) -> Faults:
    """Rotary positions rotate pairs of dimensions."""
    if shape.is_latent:
        return
    rotated = shape.head_dim * shape.partial_rotary_factor
    if rotated != int(rotated) or int(rotated) % 2 or rotated < 2:
        yield fault(
            f"`model.shape.partial_rotary_factor`: rotates {rotated:g} of `model.shape.head_dim` dimensions in pairs, "
            f"so this must be an even number of at least 2; take {max(2, 2 * round(rotated / 2)) / shape.head_dim}"
        )


def _missing_among(shape: ModelShape, keys: tuple[str, ...], attention: str, flavor: str) -> Faults:
    """Yield a fault if some of the keys that a kind of attention needs together are absent, and others are not."""
    missing = [f"model.shape.{key}" for key in keys if getattr(shape, key) is None]
    if len(missing) < len(keys):
        yield fault(
            f"`{missing[0]}`: is absent, and other keys of {attention} are there; set it, or take the flavor {flavor}",
            *missing,
        )


@rule
def latent_keys_fit_together(shape: ModelShape) -> Faults:
    """Latent attention has all of its keys, heads of one width, and no key of grouped-query attention alone."""
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if any(getattr(shape, key) is None for key in keys):
        yield from _missing_among(shape, keys, "latent attention", "GLM-4.7-Flash")
        return
    rotated = shape.qk_rope_head_dim or 0
    width = rotated + (shape.qk_nope_head_dim or 0)
    if rotated % 2:
        yield fault(
            "`model.shape.qk_rope_head_dim`: is rotated in pairs; make it even, and keep its sum with qk_nope_head_dim"
        )
    for key in ("head_dim", "v_head_dim"):
        if getattr(shape, key) != width:
            yield fault(
                f"`model.shape.{key}`: must be the sum of `model.shape.qk_nope_head_dim` and "
                f"`model.shape.qk_rope_head_dim`, because all heads have one width; take {width}"
            )
    for key, value in (
        ("num_key_value_heads", shape.num_attention_heads),
        ("use_qk_norm", False),
        ("attention_bias", False),
        ("partial_rotary_factor", 1.0),
    ):
        if getattr(shape, key) != value:
            yield fault(
                f"`model.shape.{key}`: is not possible with latent attention (`model.shape.kv_lora_rank`); "
                f"take {show(value)}"
            )


@rule
def indexer_keys_fit_together(shape: ModelShape) -> Faults:
    """Sparse attention has all of its keys, latent attention below it, and an indexer in the first layer."""
    keys = ("index_n_heads", "index_head_dim", "index_topk")
    if any(getattr(shape, key) is None for key in keys):
        yield from _missing_among(shape, keys, "sparse attention", "GLM-5.2")
        return
    if not shape.is_latent:
        yield fault("`model.shape.index_topk`: needs latent attention; set `model.shape.kv_lora_rank` and its keys")
        return
    if shape.sliding_window is not None:
        yield fault("`model.shape.index_topk`: is not possible with `model.shape.sliding_window`; remove one of them")
    rotated = shape.qk_rope_head_dim or 0
    if (shape.index_head_dim or 0) < rotated:
        yield fault(
            "`model.shape.index_head_dim`: must be at least `model.shape.qk_rope_head_dim`, the part that is rotated; "
            f"take {rotated} or more"
        )
    types = shape.indexer_types
    if types is not None and len(types) != shape.num_hidden_layers:
        yield fault(
            f"`model.shape.indexer_types`: has {len(types)} entries and must have one for each of "
            f"`model.shape.num_hidden_layers`; take {shape.num_hidden_layers} entries"
        )
    elif types is not None and types[0] != "full":
        yield fault(
            '`model.shape.indexer_types`: the first layer has no choice of keys to share; begin the list with "full"'
        )


@rule
def indexers_can_learn(config: RunConfig, shape: ModelShape) -> Faults:
    """Indexers learn only where the model has some, from text, together with all weights or alone."""
    values: dict[str, str | None] = {"indexer.train": config.indexer.train}
    values |= {f"data.stages[{index}].indexer": stage.indexer for index, stage in enumerate(config.data.stages)}
    for key, value in values.items():
        if value in (None, "frozen"):
            continue
        if not shape.is_sparse:
            yield fault(f'`{key}`: this model has no indexers (`model.shape.index_topk`); take "frozen"')
        for other, is_set, reason in (
            ("rl", config.rl is not None, "in which GLM's makers freeze indexers"),
            ("adapter", config.adapter is not None, "whose base is frozen"),
            ("finetune.train_only", config.trains_only_drafts, "which freezes everything else"),
        ):
            if is_set:
                yield fault(f'`{key}`: is not possible with `{other}`, {reason}; take "frozen"')


@rule
def depths_train_every_prediction_layer(config: RunConfig, shape: ModelShape) -> Faults:
    """There are at least as many prediction depths as prediction layers, so that each layer learns."""
    depths = config.mtp.depths
    layers = shape.num_nextn_predict_layers
    if depths is not None and 0 < depths < layers:
        yield fault(
            f"`mtp.depths`: must be at least `model.shape.num_nextn_predict_layers`, so that every layer learns; take "
            f"{layers}, or remove it"
        )


@rule
def expert_rows_are_aligned(config: RunConfig, shape: ModelShape) -> Faults:
    """Expert rows begin at multiples of 16 bytes."""
    for key, entries, broken in unaligned_experts(shape, config.training.mixed_precision_param):
        width = -(-getattr(shape, key) // entries) * entries
        yield fault(f"model.shape.{broken}; take {width}", f"model.shape.{key}", "training.mixed_precision_param")


def unaligned_experts(shape: ModelShape, dtype: str) -> Iterator[tuple[str, int, str]]:
    """Yield the widths of experts that grouped matmul would refuse at the first step: rows begin at multiples of 16
    bytes.

    Yields:
        The key, the number of which its value must be a multiple, and the fault as text.
    """
    entries = 16 // {"bfloat16": 2, "float32": 4}[dtype]
    if shape.first_k_dense_replace < shape.num_hidden_layers + shape.num_nextn_predict_layers:
        for key in ("hidden_size", "moe_intermediate_size"):
            if (width := getattr(shape, key)) % entries:
                part = f"{entries} for experts in {dtype}, whose rows begin at multiples of 16 bytes"
                yield key, entries, f"{key} = {width}: must be a multiple of {part}"
