"""Shapes of the published models, and smaller ones of this project. Values: config.json of the releases, see
docs/model.md."""

from functools import lru_cache
from typing import Any, Literal

from glm46.config.model import ModelConfig, ModelShape
from glm46.config.run_config import RunConfig
from glm46.config.section import Section

_GLM_45: dict[str, Any] = dict(
    vocab_size=151552,
    hidden_size=5120,
    num_hidden_layers=92,
    first_k_dense_replace=3,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    num_experts_per_tok=8,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    use_qk_norm=True,
    max_position_embeddings=131072,
    num_nextn_predict_layers=1,
)

_FLASH: dict[str, Any] = dict(
    vocab_size=154880,
    hidden_size=2048,
    num_hidden_layers=47,
    first_k_dense_replace=1,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    n_routed_experts=64,
    num_experts_per_tok=4,
    n_shared_experts=1,
    routed_scaling_factor=1.8,
    num_attention_heads=20,
    num_key_value_heads=20,
    head_dim=256,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    use_qk_norm=False,
    attention_bias=False,
    partial_rotary_factor=1.0,
    max_position_embeddings=202752,
    num_nextn_predict_layers=1,
)

_GLM_5: dict[str, Any] = _FLASH | dict(
    hidden_size=6144,
    num_hidden_layers=78,
    first_k_dense_replace=3,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
    num_attention_heads=64,
    num_key_value_heads=64,
    q_lora_rank=2048,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
)

_DEBUG_FLASH: dict[str, Any] = _FLASH | dict(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=2,
    intermediate_size=768,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=64,
    max_position_embeddings=2048,
    rope_theta=10000.0,
)


def indexer_types(layers: int, frequency: int, offset: int) -> tuple[Literal["full", "shared"], ...]:
    """Return which layers have an indexer: the first ``offset``, then one of ``frequency``."""
    return tuple("shared" if max(index - offset + 1, 0) % frequency else "full" for index in range(layers))


PRESETS: dict[str, ModelShape] = {
    "GLM-4.6": ModelShape(**_GLM_45 | dict(max_position_embeddings=202752)),
    "GLM-4.7": ModelShape(**_GLM_45 | dict(max_position_embeddings=202752)),
    "GLM-4.5": ModelShape(**_GLM_45),
    "GLM-4.5-Air": ModelShape(
        **_GLM_45
        | dict(
            hidden_size=4096,
            num_hidden_layers=46,
            first_k_dense_replace=1,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            use_qk_norm=False,
        )
    ),
    "GLM-4.7-Flash": ModelShape(**_FLASH),
    "GLM-5": ModelShape(**_GLM_5),
    "GLM-5.1": ModelShape(**_GLM_5),
    "GLM-5.2": ModelShape(
        **_GLM_5
        | dict(
            indexer_types=indexer_types(78, frequency=4, offset=3),
            rope_theta=8_000_000.0,
            max_position_embeddings=1_048_576,
        )
    ),
    # GLM-4.6 with fewer, narrower layers: the width-to-depth and expert ratios stay near the original's.
    "100B": ModelShape(
        **_GLM_45
        | dict(
            hidden_size=4096,
            num_hidden_layers=48,
            first_k_dense_replace=1,
            intermediate_size=10240,
            moe_intermediate_size=1280,
            n_routed_experts=128,
            num_attention_heads=64,
            max_position_embeddings=202752,
        )
    ),
    "15B": ModelShape(
        **_GLM_45
        | dict(
            hidden_size=2048,
            num_hidden_layers=28,
            first_k_dense_replace=1,
            intermediate_size=6144,
            moe_intermediate_size=768,
            n_routed_experts=96,
            num_experts_per_tok=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=202752,
        )
    ),
    # Trains on a laptop, with every part of GLM-4.6.
    "100M": ModelShape(
        **_GLM_45
        | dict(
            vocab_size=8192,
            hidden_size=512,
            num_hidden_layers=8,
            first_k_dense_replace=1,
            intermediate_size=1536,
            moe_intermediate_size=256,
            n_routed_experts=32,
            num_experts_per_tok=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
        )
    ),
    "debug": ModelShape(
        **_GLM_45
        | dict(
            vocab_size=8192,
            hidden_size=256,
            num_hidden_layers=4,
            first_k_dense_replace=1,
            intermediate_size=768,
            moe_intermediate_size=128,
            n_routed_experts=16,
            num_experts_per_tok=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rope_theta=10000.0,
        )
    ),
    # Two layers with every part of GLM-4.7-Flash.
    "debug-flash": ModelShape(**_DEBUG_FLASH),
    # Five layers with every part of GLM-5.2; documents longer than 64 tokens are attended to in part.
    "debug-glm5": ModelShape(
        **_DEBUG_FLASH
        | dict(
            num_hidden_layers=5,
            routed_scaling_factor=2.5,
            index_n_heads=4,
            index_head_dim=32,
            index_topk=64,
            indexer_types=indexer_types(5, frequency=2, offset=2),
        )
    ),
}

REPEATING = ("GLM-4.7", "GLM-4.7-Flash")
"""Presets whose exports repeat embedding and head in the prediction layers, like the published weights. GLM-4.7 differs
from 4.6 in this and in its chat format."""

RELATIVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    ", GLM-4.5V or 4.6V, of images and text: missing here are the vision tower, its projector, the rotary positions of "
    "images and data with images": (("GLM-4.5V", "GLM-4.6V"), ("glm4v_moe", "glm4v_moe_text")),
    ", GLM-4.6V-Flash, of images and text, without experts: missing here are dense models and the vision tower": (
        ("GLM-4.6V-Flash",),
        ("glm46v",),
    ),
    ", GLM-5.3-Flash: missing here are linear attention, sparse attention over pools of keys, four residual streams "
    "and the vision tower": (("GLM-5.3-Flash",), ("glm5_next",)),
}
"""Other models of the family: description and missing parts -> beginnings of their names, and values of
``model_type``."""


def relative_of(flavor: str) -> str | None:
    """Describe another model of the family for a message, by its name; None if the name is not of such a model."""
    names = {prefix.lower(): description for description, (prefixes, _) in RELATIVES.items() for prefix in prefixes}
    return names.get(max(filter(flavor.lower().startswith, names), key=len, default=""))


@lru_cache(maxsize=64)  # one object for equal tables: a search of layouts compares shapes millions of times
def resolve_shape(model: ModelConfig) -> ModelShape:
    """Return the shape of a [model] table: its preset, changed by the keys that [model.shape] sets.

    Raises:
        KeyError: the flavor is not a preset; `config.loader` turns this into a message before any other use.
    """
    changes = model.shape.model_dump(exclude_none=True)
    return ModelShape.model_validate(PRESETS[model.flavor].model_dump() | changes)


def with_presets(config: RunConfig) -> RunConfig:
    """Return the config with the keys that the presets of [model] and [rl] fill in. `model.shape` is then a
    `ModelShape`."""
    sections: dict[str, Section] = {}
    if config.model.flavor in PRESETS:
        sections["model"] = config.model.model_copy(update={"shape": resolve_shape(config.model)})
    if config.rl is not None:
        sections["rl"] = config.rl.resolved()
    return config.model_copy(update=sections)
