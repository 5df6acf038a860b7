"""The shape of a model, with the names of Hugging Face's ``config.json``, and the section [model]."""

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from glm46.config.field_rules import AtMost, Excludes, Needs, Requires
from glm46.config.hub_address import OnHub
from glm46.config.section import ModelFolder, Section

_YARN = Needs("rope_type", "yarn")

GONE_KEYS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
"""Keys of a shape in earlier versions and in config.json -> their value in all of GLM's models."""


class RopeScalingConfig(Section):
    """[model.shape.rope_scaling]: stretch the rotary positions beyond the length trained on."""

    rope_type: Annotated[
        Literal["linear", "yarn"],
        Requires("original_max_position_embeddings", when="yarn", remedy="set the length of the previous training"),
    ]
    """linear: position interpolation (arXiv 2306.15595). yarn: arXiv 2309.00071. GLM itself only raises rope_theta."""

    factor: float = Field(ge=1.0)
    """Target length divided by original length."""

    original_max_position_embeddings: Annotated[int | None, _YARN] = Field(None, ge=1)
    """yarn: length that the model was trained on before."""

    beta_fast: Annotated[float, _YARN] = Field(32.0, gt=0.0)
    """yarn: turns within the original length above which a frequency stays unchanged."""

    beta_slow: Annotated[float, _YARN] = Field(1.0, gt=0.0)
    """yarn: turns within the original length below which a frequency is fully interpolated."""


class ModelShape(Section):
    """All numbers that define the parameters and the arithmetic of a GLM-4.5 to GLM-5.2 model."""

    vocab_size: int = Field(ge=1)
    """Rows of embedding and head, padding rows included."""

    hidden_size: int = Field(ge=1)
    """Width of the residual stream."""

    num_hidden_layers: int = Field(ge=1, le=1024)
    """Decoder layers, multi-token prediction layers not counted."""

    first_k_dense_replace: Annotated[int, AtMost("num_hidden_layers")] = Field(ge=0)
    """The first layers with a dense feed-forward network instead of experts."""

    intermediate_size: int = Field(ge=1)
    """Width of the dense feed-forward network."""

    moe_intermediate_size: int = Field(ge=1)
    """Width of one expert."""

    n_routed_experts: int = Field(ge=1, le=65536)
    """Routed experts per layer."""

    num_experts_per_tok: Annotated[int, AtMost("n_routed_experts")] = Field(ge=1)
    """Routed experts each token uses."""

    n_shared_experts: int = Field(ge=0)
    """Experts that every token uses, stored as one expert of this many times the width."""

    routed_scaling_factor: float = Field(gt=0.0)
    """Factor on the routed experts' output."""

    num_attention_heads: int = Field(ge=1)
    """Query heads."""

    num_key_value_heads: int = Field(ge=1)
    """Key and value heads; each serves an equal number of query heads."""

    head_dim: int = Field(ge=2)
    """Width of one head; heads times this need not equal hidden_size. With latent attention: the sum of both parts."""

    q_lora_rank: int | None = Field(None, ge=1)
    """Latent attention, GLM-4.7-Flash: width of the queries' latent. Set this and the next four keys together; without
    them attention is grouped-query attention."""

    kv_lora_rank: int | None = Field(None, ge=1)
    """Latent attention: width of the latent that keys and values are made from."""

    qk_nope_head_dim: int | None = Field(None, ge=1)
    """Latent attention: part of a query or key head that is not rotated."""

    qk_rope_head_dim: int | None = Field(None, ge=2)
    """Latent attention: part that is rotated, in pairs of neighbours; all heads share its key."""

    v_head_dim: int | None = Field(None, ge=1)
    """Latent attention: width of a value head, which is ``head_dim``."""

    index_n_heads: int | None = Field(None, ge=1)
    """Sparse attention, GLM-5: heads of the indexer, which chooses the keys of each query. Set this and the next two
    keys together, with those of latent attention; without them each query attends to all keys before it."""

    index_head_dim: int | None = Field(None, ge=2)
    """Sparse attention: width of an index head, whose first ``qk_rope_head_dim`` values are rotated."""

    index_topk: int | None = Field(None, ge=1)
    """Sparse attention: maximum number of keys that a query attends to."""

    indexer_types: Annotated[tuple[Literal["full", "shared"], ...] | None, Needs("index_topk")] = None
    """Sparse attention: for each decoder layer, "full" if it has an indexer, "shared" if it uses the keys that the
    last layer with an indexer chose. Absent: each layer has an indexer, as in GLM-5 and 5.1."""

    use_qk_norm: bool
    """RMSNorm of queries and keys per head, before the rotation. True for GLM-4.5 and 4.6, false for Air."""

    attention_bias: bool = True
    """Biases of the query, key and value projections. The output projection has no bias."""

    partial_rotary_factor: float = Field(0.5, gt=0.0, le=1.0)
    """Part of each head that is rotated."""

    rope_theta: float = Field(1_000_000.0, gt=0.0)
    """Base of the rotary frequencies: 1e4 in GLM's pre-training at 4K, 1e6 from 32K on."""

    rope_scaling: RopeScalingConfig | None = None
    """Stretching of positions; absent for every published GLM."""

    sliding_window: int | None = Field(None, ge=1)
    """Each token attends to at most this many tokens, itself included. Absent: to all previous tokens."""

    rms_norm_eps: float = Field(1e-5, gt=0.0)
    """Term under the root of every RMSNorm."""

    initializer_range: float = Field(0.02, gt=0.0)
    """Standard deviation of the initial weights."""

    max_position_embeddings: int = Field(ge=1)
    """Longest sequence that the weights are meant for."""

    num_nextn_predict_layers: Annotated[
        int,
        Excludes("adapter", reason="which does not train prediction layers"),
        Excludes("finetune.preference", reason="which does not train prediction layers"),
    ] = Field(1, ge=0, le=1024)
    """Multi-token prediction layers; each predicts one more token ahead."""

    @property
    def is_latent(self) -> bool:
        """True for multi-head latent attention, whose heads are made from a latent of each token."""
        return self.kv_lora_rank is not None

    @property
    def is_sparse(self) -> bool:
        """True for sparse attention, in which an indexer chooses the keys of each query."""
        return self.index_topk is not None

    def has_indexer(self, layer: int) -> bool:
        """Return whether a decoder layer chooses keys itself; prediction layers, numbered last, all do."""
        types = self.indexer_types or ()
        return self.is_sparse and (layer >= len(types) or types[layer] == "full")

    @property
    def has_key_heads(self) -> bool:
        """True for grouped-query attention, with separate projections for queries, keys and values."""
        return not self.is_latent

    @property
    def latent_width(self) -> int:
        """Values per token from which latent attention makes its keys and values: the latent and the rotated key."""
        return (self.kv_lora_rank or 0) + (self.qk_rope_head_dim or 0)


class _ShapeBase(Section):
    """[model.shape]: keys of Hugging Face's config.json whose values differ from the preset."""

    refused = dict.fromkeys(GONE_KEYS, "it has one value in all of GLM's models; remove it")


# [model.shape] has every field of ModelShape with the default "absent", so that each shape key is documented once.
_SHAPE_KEYS: dict[str, Any] = {
    name: (field.rebuild_annotation() | None, Field(None, description=field.description))
    for name, field in ModelShape.model_fields.items()
}
ShapeConfig = create_model("ShapeConfig", __base__=_ShapeBase, __doc__=_ShapeBase.__doc__, **_SHAPE_KEYS)


class ModelConfig(Section):
    """[model]: a preset, and what differs from it."""

    refused = _ShapeBase.refused
    moved = {name: f"shape.{name}" for name in ModelShape.model_fields}

    flavor: str
    """Preset to start from; the list is in glm46/config/presets.py."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    """Keys of Hugging Face's config.json whose values differ from the preset, such as ``hidden_size``;
    docs/reference/shape.md lists them."""

    tokenizer_path: Annotated[ModelFolder, OnHub("tokenizer")] = "builtin"
    """"builtin" is the shipped vocabulary of 8,192 tokens; else a .tiktoken rank file, a Hugging Face
    tokenizer.json or its folder, or ``hf://owner/name``."""

    attention_kernel: Literal["default", "FA3", "FA4"] = "default"
    """Flash attention on a GPU: the kernel of torch, or of a package: FA3 is FlashAttention 3 (`flash_attn_interface`,
    for Hopper), FA4 is FlashAttention 4 (`flash_attn.cute`, for Hopper and Blackwell)."""
