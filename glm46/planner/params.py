"""How many parameters a shape has: every tensor of the model listed once, with its shape, and sums over that list.

The list follows the tensors of a Hugging Face checkpoint (each expert's three matrices are tensors of their own),
because those counts can be checked against published files. It needs no torch, so that planning takes no time.
"""

from dataclasses import dataclass
from math import prod

from glm46.config.model import ModelShape


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one name and shape inside one part of the model."""

    name: str
    """Hugging Face name inside its part; an expert's index is written as ``E``."""
    shape: tuple[int, ...]
    count: int = 1
    """How many tensors of this kind the part holds (the experts of a layer)."""
    active: int | None = None
    """How many of them one token uses. Absent: all."""
    trained: bool = True
    """False for the selection bias, which is a buffer and not a parameter of the optimizer."""

    @property
    def numel(self) -> int:
        """Elements of all tensors of this kind."""
        return self.count * prod(self.shape)

    @property
    def active_numel(self) -> int:
        """Elements that one token uses."""
        return (self.count if self.active is None else self.active) * prod(self.shape)


@dataclass(frozen=True)
class ParameterCount:
    """Elements and tensors of a model as Hugging Face counts them, the routers' selection biases included."""

    main: int
    """The decoder with embedding and head, without the MTP layers."""
    mtp: int
    """The MTP layers, without copies of embedding and head."""
    embedding: int
    head: int
    active: int
    """Elements of the main model that one token uses, the whole embedding and the head included."""
    mtp_active: int
    """Elements of the MTP layers that one token uses, without the shared head."""
    buffers: int
    """Selection biases: counted in main and mtp, but not trained by the optimizer."""
    copies: int
    """What a checkpoint with copies of embedding and head in its MTP layers (GLM-4.5, Air) adds."""
    main_tensors: int
    mtp_tensors: int
    copied_tensors: int

    @property
    def total(self) -> int:
        """Main model and MTP layers, without copies, as GLM-4.6 is published."""
        return self.main + self.mtp

    @property
    def tensors(self) -> int:
        """Tensors of a checkpoint without copies."""
        return self.main_tensors + self.mtp_tensors

    @property
    def trained(self) -> int:
        """Elements that the optimizer updates: what summing ``numel`` over the parameters of our model gives."""
        return self.total - self.buffers


def attention_kinds(shape: ModelShape) -> list[TensorKind]:
    """Tensors of one layer's attention and of its two norms."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    kinds = [TensorKind("input_layernorm.weight", (hidden,)), TensorKind("post_attention_layernorm.weight", (hidden,))]
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        kinds.append(TensorKind(f"self_attn.{name}_proj.weight", (width, hidden)))
        if shape.attention_bias:
            kinds.append(TensorKind(f"self_attn.{name}_proj.bias", (width,)))
    kinds.append(TensorKind("self_attn.o_proj.weight", (hidden, queries)))
    if shape.use_qk_norm:
        kinds += [TensorKind(f"self_attn.{name}_norm.weight", (head_dim,)) for name in "qk"]
    return kinds


def _swiglu_kinds(prefix: str, hidden: int, width: int, count: int = 1, active: int | None = None) -> list[TensorKind]:
    return [
        TensorKind(f"{prefix}.gate_proj.weight", (width, hidden), count, active),
        TensorKind(f"{prefix}.up_proj.weight", (width, hidden), count, active),
        TensorKind(f"{prefix}.down_proj.weight", (hidden, width), count, active),
    ]


def dense_layer_kinds(shape: ModelShape) -> list[TensorKind]:
    """Tensors of one layer with a dense feed-forward network."""
    return attention_kinds(shape) + _swiglu_kinds("mlp", shape.hidden_size, shape.intermediate_size)


def moe_layer_kinds(shape: ModelShape) -> list[TensorKind]:
    """Tensors of one layer with experts."""
    hidden, width, experts = shape.hidden_size, shape.moe_intermediate_size, shape.n_routed_experts
    kinds = attention_kinds(shape)
    kinds.append(TensorKind("mlp.gate.weight", (experts, hidden)))
    kinds.append(TensorKind("mlp.gate.e_score_correction_bias", (experts,), trained=False))
    kinds += _swiglu_kinds("mlp.experts.E", hidden, width, experts, shape.num_experts_per_tok)
    return kinds + (shared_expert_kinds(shape) if shape.n_shared_experts else [])


def shared_expert_kinds(shape: ModelShape) -> list[TensorKind]:
    """Tensors of one layer's shared experts; without elements where there are none."""
    width = shape.moe_intermediate_size * shape.n_shared_experts
    return _swiglu_kinds("mlp.shared_experts", shape.hidden_size, width)


def mtp_layer_kinds(shape: ModelShape) -> list[TensorKind]:
    """Tensors of one multi-token prediction layer; embedding and head are the main model's."""
    hidden = shape.hidden_size
    own = [TensorKind(name, (hidden,)) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")]
    return [*own, TensorKind("eh_proj.weight", (hidden, 2 * hidden)), *moe_layer_kinds(shape)]


def embedding_kinds(shape: ModelShape) -> list[TensorKind]:
    """The token embedding."""
    return [TensorKind("embed_tokens.weight", (shape.vocab_size, shape.hidden_size))]


def head_kinds(shape: ModelShape) -> list[TensorKind]:
    """The final norm and the output head."""
    head = TensorKind("lm_head.weight", (shape.vocab_size, shape.hidden_size))
    return [TensorKind("norm.weight", (shape.hidden_size,)), head]


def layer_counts(shape: ModelShape) -> tuple[int, int, int]:
    """Number of dense, of expert and of MTP layers."""
    dense = min(shape.first_k_dense_replace, shape.num_hidden_layers)
    return dense, shape.num_hidden_layers - dense, shape.num_nextn_predict_layers


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Count the elements and tensors of a model. Source of the shapes: config.json and the index of the releases."""
    dense_layers, moe_layers, mtp_layers = layer_counts(shape)
    main = embedding_kinds(shape) + head_kinds(shape)
    main += dense_layer_kinds(shape) * dense_layers + moe_layer_kinds(shape) * moe_layers
    mtp = mtp_layer_kinds(shape) * mtp_layers
    vocabulary = shape.vocab_size * shape.hidden_size
    return ParameterCount(
        main=sum(kind.numel for kind in main),
        mtp=sum(kind.numel for kind in mtp),
        embedding=vocabulary,
        head=vocabulary,
        active=sum(kind.active_numel for kind in main),
        mtp_active=sum(kind.active_numel for kind in mtp),
        buffers=sum(kind.numel for kind in main + mtp if not kind.trained),
        copies=2 * vocabulary * mtp_layers,
        main_tensors=sum(kind.count for kind in main),
        mtp_tensors=sum(kind.count for kind in mtp),
        copied_tensors=2 * mtp_layers,
    )
