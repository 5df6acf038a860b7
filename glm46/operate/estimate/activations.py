"""Bytes that forward keeps for backward, per token and layer, as `glm46/compute/model` computes it.

The formulas count each tensor that autograd saves once; a test compares the sums with what a small model saves.
Letters as in the model: D hidden, H and K query and key heads, C head width, F expert width, E experts, A experts per
token. Compute-type elements have `width` bytes; FP32 has 4 and an index 8.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from glm46.config.adapter import BASE_FORMATS
from glm46.config.model import ModelShape
from glm46.run.parameters import DECODED_AT_ONCE, Parameter

FP32 = 4
INDEX = 8
EXPERT_NUMBER = 4
"""Of each expert of a token, beside a row that travels in two levels."""


@dataclass(frozen=True)
class Frozen:
    """A layer whose own weights have no gradient, with adapters that have one."""

    adapters: tuple[Parameter, ...] = ()
    base_dtype: str | None = None
    """See `AdapterConfig.base_dtype`."""
    is_compiled: bool = False
    """One kernel converts weights of 4 bits (`quantised_weights.let_conversions_compile`)."""

    def adapts(self, module: str) -> bool:
        """True if there are adapters in the module of this name."""
        return any(row.name.rpartition(".")[0].rpartition(".")[0] == module for row in self.adapters)

    def decoding(self, weights: float, width: float) -> tuple[float, int]:
        """Bytes that kernels move to convert so many weights of the base to the compute type, and these kernels. FP8 is
        converted, and that is scaled in place; 4 bits are written once if compiled, else an index of values in FP32,
        which are scaled and rounded, some rows at a time."""
        assert self.base_dtype is not None, "the base is in the compute type"
        base = BASE_FORMATS[self.base_dtype]
        passes, kernels = 3 * width, 2
        if base.bits == 4 and self.is_compiled:
            passes, kernels = width, 1
        elif base.bits == 4:
            passes, kernels = 5 * FP32 + width, 4 * ceil(weights / DECODED_AT_ONCE)
        return weights * (base.bits / 8 + base.scale_bytes / base.columns + passes), kernels


class Spread(NamedTuple):
    """Ranks that share a layer: degrees, and rows of a token in exchanges of two levels (`Plan.hops`)."""

    tp: int = 1
    ep: int = 1
    hops: tuple[float, ...] = ()


def _norm(dim: int, width: int, frozen: Frozen | None = None) -> float:
    """RMSNorm: its FP32 input, one statistic per row, and the normalised rows, which a GPU does not keep in FP32."""
    return dim * (FP32 + width * (frozen is None)) + FP32


def with_key_copies(shape: ModelShape, tp: int) -> ModelShape:
    """The shape of what all ranks of a tensor-parallel group keep together: each keeps at least one whole key head."""
    return shape.model_copy(update={"num_key_value_heads": max(shape.num_key_value_heads, tp)})


def attention_bytes(shape: ModelShape, width: int, tp: int = 1, frozen: Frozen | None = None) -> float:
    """Norm and attention of one layer, per token of a rank. Each of ``tp`` ranks keeps the whole sequence that it
    gathers, and its heads of it; without ``frozen`` all weights are trained."""
    heads, key_heads = shape.num_attention_heads, shape.num_key_value_heads
    has_gradient = frozen is None or frozen.adapts("self_attn")
    total = _norm(shape.hidden_size, width, frozen) + has_gradient * shape.hidden_size * width * tp
    if shape.is_latent:  # both latents of a token: their norms, and the inputs of the projections to heads
        queries, keys = shape.q_lora_rank or 0, shape.kv_lora_rank or 0
        latents = _norm(queries, width, frozen) + _norm(keys, width, frozen)
        if width == FP32:  # the norm keeps its input as it is, which lies beside the key to rotate
            latents += (shape.latent_width - keys) * FP32
        total += tp * (latents + has_gradient * (queries + shape.latent_width) * width)
    if shape.use_qk_norm:
        total += (heads + key_heads) * _norm(shape.head_dim, width, frozen)
    # Rotated queries and keys, values, the result, and the log-sum of the softmax.
    return total + 2 * (heads + key_heads) * shape.head_dim * width + heads * FP32


def attention_backward_bytes(
    shape: ModelShape, width: int, *, queries: float, keys: float, runs: float, tp: int = 1
) -> float:
    """Bytes that the backward of one layer's attention allocates on a rank: the gradients of result, queries, keys and
    values, and the workspace of the flash kernel.

    The workspace is that of `mha_varlen_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp of
    PyTorch: the sums of the gradient of the queries, FP32 [queries + 128 runs, heads, width of a head rounded up], one
    more FP32 number for each of these rows and heads, and where query heads share keys, the gradients of keys and
    values of each query head. cuDNN, which `varlen_attn` of torch 2.15 prefers for whole documents, does not publish
    its workspace. With debug.deterministic the kernel has the FP32 sums several times, 132 / (runs x heads) rounded
    up on an H100; that is not counted.

    Args:
        queries, keys: of all runs.
        runs: documents, or the parts of documents, that a rank attends in.
        tp: ranks of tensor parallelism, which share the heads.
    """
    heads, key_heads = shape.num_attention_heads / tp, max(shape.num_key_value_heads / tp, 1)
    multiple = 32 if shape.head_dim <= 128 else 64
    rounded = -(-shape.head_dim // multiple) * multiple
    workspace = (queries + 128 * runs) * heads * (rounded + 1) * FP32
    of_keys = key_heads + heads * (heads != key_heads)
    return workspace + (2 * queries * heads + 2 * keys * of_keys) * shape.head_dim * width


def freed_before_attention(
    shape: ModelShape, width: int, block: str, tp: int = 1, frozen: Frozen | None = None
) -> float:
    """Bytes that the backward of a layer has freed when that of its attention begins, per token of a rank."""
    whole = dense_layer_bytes if block == "dense" else moe_layer_bytes  # the rest of an MTP layer comes before both
    return whole(shape, width, tp, frozen) - attention_bytes(shape, width, tp, frozen)


def _swiglu(inner: int, width: int, has_gradient: bool = True) -> float:
    """Gate, up and the input of the down projection, which only a gradient of that needs."""
    return (2 + has_gradient) * inner * width


def dense_layer_bytes(shape: ModelShape, width: int, tp: int = 1, frozen: Frozen | None = None) -> float:
    """One dense layer, per token."""
    has_gradient = frozen is None or frozen.adapts("mlp")
    total = attention_bytes(shape, width, tp, frozen) + adapter_bytes(shape, width, tp, frozen)
    total += _norm(shape.hidden_size, width, frozen) + has_gradient * shape.hidden_size * width * tp
    return total + _swiglu(shape.intermediate_size, width, has_gradient)


def moe_layer_bytes(shape: ModelShape, width: int, tp: int = 1, frozen: Frozen | None = None) -> float:
    """One layer with experts, per token."""
    chosen, experts = shape.num_experts_per_tok, shape.n_routed_experts
    has_gradient = frozen is None or frozen.adapts("mlp.shared_experts")
    total = attention_bytes(shape, width, tp, frozen) + adapter_bytes(shape, width, tp, frozen)
    total += _norm(shape.hidden_size, width, frozen)
    # Of the router, whose product in BF16 keeps its input in any case.
    total += shape.hidden_size * width * (width < FP32 or frozen is None or (has_gradient and tp == 1))
    if tp > 1 and shape.n_shared_experts:
        total += has_gradient * shape.hidden_size * width * tp
    total += 2 * experts * FP32 + chosen * (3 * FP32 + 4 * INDEX)
    total += chosen * shape.hidden_size * width  # rows sorted by expert
    total += chosen * _swiglu(shape.moe_intermediate_size, width)  # grouped products keep their inputs in any case
    return total + _swiglu(shape.moe_intermediate_size * shape.n_shared_experts, width, has_gradient)


def adapter_bytes(shape: ModelShape, width: int, tp: int, frozen: Frozen | None) -> float:
    """Bytes of the adapters of a layer, per token of a rank: ``scale * A x`` of each, and under DoRA the sum that is
    scaled to the magnitude."""
    total = 0.0
    for row in () if frozen is None else frozen.adapters:
        # Ranks of a tensor-parallel group have all tokens of it: of A's results all, of the sum their rows of W.
        times = shape.num_experts_per_tok if row.is_expert else tp
        if row.group == "adapter A":
            total += row.shape(shape)[-2] * width * times
        elif row.group == "magnitude":
            total += row.shape(shape)[-1] * width * (1 if row.tensor_dim == 0 else times)
    return total


def mtp_layer_bytes(shape: ModelShape, width: int, tp: int = 1) -> float:
    """One multi-token prediction layer with its own norms and projection, per token."""
    joined = 3 * _norm(shape.hidden_size, width) + 2 * shape.hidden_size * width
    return joined + moe_layer_bytes(shape, width, tp)


def head_bytes(shape: ModelShape, width: int, tp: int = 1, frozen: Frozen | None = None) -> float:
    """The last norm, and for the main model and each prediction depth the gradient of the head's input, which forward
    computes for the whole sequence; per token of a rank."""
    heads = 1 + shape.num_nextn_predict_layers
    return _norm(shape.hidden_size, width, frozen) + heads * tp * (shape.hidden_size * width + INDEX)


def layer_bytes(
    shape: ModelShape, width: int, block: str, mode: str, spread: Spread, *, frozen: Frozen | None = None,
    recompute: tuple[str, ...] = (),
) -> float:  # fmt: skip
    """Bytes that forward keeps of a block, per token of a rank; "selective" does not keep what ``recompute`` names."""
    tp, ep, hops = spread
    shape, layer = with_key_copies(shape, tp), dense_layer_bytes if block == "dense" else moe_layer_bytes
    whole = mtp_layer_bytes(shape, width, tp) if block == "mtp" else layer(shape, width, tp, frozen)
    if mode == "none":
        return whole
    kept = sum(kept_tensors(shape, width, block, mode, spread, frozen, recompute))
    if block != "dense":
        # Indices by which backward finds the rows of each assignment, and of each hop. A recomputation that repeats the
        # exchange has the order of its assignments and of those that it received.
        orders = 2 if mode == "full" or "exchange" in recompute else 1
        kept += (shape.num_experts_per_tok * (1 + (ep > 1 and not hops) * orders) + sum(hops)) * INDEX
    # Selective checkpointing covers only the decoder layer inside an MTP layer.
    return kept + whole - moe_layer_bytes(shape, width, tp) if (block, mode) == ("mtp", "selective") else kept


def kept_tensors(
    shape: ModelShape, width: int, block: str, mode: str, spread: Spread, frozen: Frozen | None = None,
    recompute: tuple[str, ...] = (),
) -> list[float]:  # fmt: skip
    """Bytes of each tensor that "full" or "selective" keeps of a block, per token of a rank, the input first: those
    that `cpu_checkpointing` moves. Backward reads nothing of what the experts return, but for DoRA's magnitudes."""
    chosen, hidden, hops = shape.num_experts_per_tok, shape.hidden_size * width, spread.hops
    tensors: list[float] = [hidden]
    if mode == "full":
        return tensors * (2 if block == "mtp" else 1)  # the embeddings of a prediction depth
    if "core_attn" not in recompute:
        tensors += [shape.num_attention_heads * shape.head_dim * width, shape.num_attention_heads * FP32]
    if block == "dense":
        return tensors
    tensors += [chosen * FP32, chosen * INDEX]
    if "experts" not in recompute:
        tensors.append(chosen * 2 * shape.moe_intermediate_size * width)
        rows = () if frozen is None else [row for row in frozen.adapters if row.is_expert]
        # Kept beside the results of grouped products.
        tensors += [chosen * row.shape(shape)[-2] * width for row in rows if row.group == "adapter A" and row.rank]
        tensors += [chosen * hidden for row in rows if row.group == "magnitude" and "down" in row.name]
    if "exchange" not in recompute:
        tensors += [rows * chosen * EXPERT_NUMBER for rows in hops]
        tensors += [rows * each for rows in hops[-1:] for each in (hidden, chosen * FP32)]
        tensors += [chosen * hidden, chosen * FP32] if spread.ep > 1 and not hops else []
    return tensors


def output_gradient_bytes(shape: ModelShape, width: int, block: str, tp: int) -> float:
    """Gradients of the results of all products and norms of a block, per token of a rank. A schedule that splits
    backward keeps them from the gradients of inputs until those of weights."""
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    elements = queries + 2 * keys + (2 + tp) * shape.hidden_size  # of attention with its output, and both norms
    if shape.is_latent:  # keys and values come from one product, which makes no rotated part
        rotated = shape.num_attention_heads * (shape.qk_rope_head_dim or 0)
        elements += tp * (2 * (shape.q_lora_rank or 0) + (shape.kv_lora_rank or 0) + shape.latent_width) - rotated
    if shape.use_qk_norm:
        elements += queries + keys
    if block == "dense":
        return (elements + 2 * shape.intermediate_size + tp * shape.hidden_size) * width
    chosen, shared = shape.num_experts_per_tok, shape.n_shared_experts
    elements += (chosen + shared) * 2 * shape.moe_intermediate_size
    elements += (chosen + tp * (shared > 0) + 4 * (block == "mtp")) * shape.hidden_size
    return elements * width + shape.n_routed_experts * FP32


def travelling_key_bytes(shape: ModelShape, width: int, *, rows: int, length: int, cp: int, tp: int) -> float:
    """Keys and values that a rank holds in backward while they travel: those that it has, those that come, and those of
    its runs; and their gradients in FP32: of this rank, those that come, and their sum."""
    heads = max(shape.num_key_value_heads / tp, 1)
    return 2 * rows * length / cp * heads * shape.head_dim * (3 * width + 3 * FP32)
