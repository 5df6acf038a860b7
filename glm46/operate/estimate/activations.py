"""Computes the bytes that forward keeps for backward, per token and layer, for the model in `glm46/compute/model`.

The formulas count each tensor that autograd saves once; a test compares the sums with what a small model saves. Letters
as in the model: D hidden, H and K query and key heads, C head width, F expert width, E experts, A experts per token. An
element has `width` bytes in the compute type, 4 bytes in FP32, and 8 bytes as an index.
"""

from dataclasses import dataclass, replace
from math import ceil

from glm46.config.adapter import BASE_FORMATS
from glm46.config.indexer import IndexerTraining
from glm46.config.model import ModelShape
from glm46.run.context_keys import SparseForm
from glm46.run.parameters import DECODED_AT_ONCE, Parameter, in_base_dtype, is_frozen

FP32 = 4
INDEX = 8
CHOSEN_KEY = 4
"""Bytes of the index of a chosen key."""
EXPERT_NUMBER = 4
"""Bytes of each expert index of a token, sent along with a row in two-level exchanges."""


@dataclass(frozen=True)
class Frozen:
    """A layer whose own weights have no gradient, with its adapters, which are trained."""

    adapters: tuple[Parameter, ...] = ()
    base_dtype: str | None = None
    """See `AdapterConfig.base_dtype`."""
    is_compiled: bool = False
    """True if one compiled kernel converts 4-bit weights (`quantised_weights.let_conversions_compile`)."""

    def adapts(self, module: str) -> bool:
        """True if the module of this name has adapters."""
        return any(row.name.rpartition(".")[0].rpartition(".")[0] == module for row in self.adapters)

    def decoding(self, weights: float, width: float) -> tuple[float, int]:
        """Return the bytes that kernels move to convert this many base weights to the compute type, and the number of
        kernels. FP8 is converted and then scaled in place. 4-bit weights are written once if compiled; otherwise they
        are looked up as FP32 values, scaled and rounded, some rows at a time."""
        assert self.base_dtype is not None, "the base is in the compute type"
        base = BASE_FORMATS[self.base_dtype]
        passes = 3 * width
        kernels = 2
        if base.bits == 4 and self.is_compiled:
            passes = width
            kernels = 1
        elif base.bits == 4:
            passes = 5 * FP32 + width
            kernels = 4 * ceil(weights / DECODED_AT_ONCE)
        return weights * (base.bits / 8 + base.scale_bytes / base.columns + passes), kernels


def rows_of_run(
    rows: list[Parameter], shape: ModelShape, frozen: Frozen | None, indexers: IndexerTraining
) -> list[Parameter]:
    """Return rows as a run holds them, frozen with the adapters of ``frozen``, or trained."""
    if frozen is None:
        return [replace(row, is_frozen=True) if is_frozen(row, indexers) else row for row in rows]
    base = in_base_dtype(rows, shape, frozen.base_dtype)
    return [*(replace(row, is_frozen=True) if row.optimizer else row for row in base), *frozen.adapters]


def with_key_copies(shape: ModelShape, tp: int) -> ModelShape:
    """Return the shape that a tensor-parallel group stores in total: each rank stores at least one full key head."""
    return shape.model_copy(update={"num_key_value_heads": max(shape.num_key_value_heads, tp)})


def _norm(dim: int, width: int, frozen: Frozen | None = None) -> float:
    """Bytes of an RMSNorm: its FP32 input, one statistic per row, and unless frozen the normalised rows, which a GPU
    keeps in the compute type."""
    return dim * (FP32 + width * (frozen is None)) + FP32


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a model's layers in a compute type, per token of a rank. Without ``frozen`` all weights of a layer are
    trained. Each of ``tp`` ranks keeps the full sequence that it gathers, and its share of everything else."""

    shape: ModelShape
    width: int
    tp: int = 1
    ep: int = 1
    hops: tuple[float, ...] = ()
    """Rows of a token in exchanges of two levels (`plan_sizes.rows_of_hops`)."""
    recompute: tuple[str, ...] = ()
    """Results that "selective" checkpointing recomputes."""
    form: SparseForm = "dense"
    """How attention computes the longest document; chosen keys, which layers share, are not counted here."""

    def layer(self, block: str, frozen: Frozen | None = None, mode: str = "none") -> float:
        """Return the bytes that forward keeps of a block under a mode of activation checkpointing."""
        if mode == "none":
            joined = 3 * _norm(self.shape.hidden_size, self.width) + 2 * self.shape.hidden_size * self.width
            # A prediction layer has norms and a projection of its own.
            return (block == "mtp") * joined + self.attention(frozen) + self.network(block, frozen)
        kept = sum(self.kept_tensors(block, mode, frozen))
        if block != "dense":
            # Indices with which backward finds the rows of each assignment and of each hop. A recomputation that
            # repeats the exchange keeps both the order of its assignments and the order of the received ones.
            orders = 2 if mode == "full" or "exchange" in self.recompute else 1
            indices = self.shape.num_experts_per_tok * (1 + (self.ep > 1 and not self.hops) * orders)
            kept += (indices + sum(self.hops)) * INDEX
        # Selective checkpointing covers only the decoder layer inside an MTP layer.
        is_partly = (block, mode) == ("mtp", "selective")
        return kept + self.layer(block, frozen) - self.layer("moe", frozen) if is_partly else kept

    def attention(self, frozen: Frozen | None = None) -> float:
        """Return the bytes of the norm and attention of one layer."""
        shape = with_key_copies(self.shape, self.tp)
        width = self.width
        heads = shape.num_attention_heads
        key_heads = shape.num_key_value_heads
        has_gradient = frozen is None or frozen.adapts("self_attn")
        total = _norm(shape.hidden_size, width, frozen) + has_gradient * shape.hidden_size * width * self.tp
        if shape.is_latent:  # both latents of a token: their norms, and the inputs of the projections to heads
            queries = shape.q_lora_rank or 0
            keys = shape.kv_lora_rank or 0
            latents = _norm(queries, width, frozen) + _norm(keys, width, frozen)
            if width == FP32:  # the norm keeps its input as a view, which includes the key to rotate
                latents += (shape.latent_width - keys) * FP32
            keeps_rows = has_gradient or self.form == "gathered"
            total += self.tp * (latents + (has_gradient * queries + keeps_rows * shape.latent_width) * width)
        if shape.use_qk_norm:
            total += (heads + key_heads) * _norm(shape.head_dim, width, frozen)
        if self.form == "gathered":
            # Queries before and after the product with the weights of keys, the result before and after the product
            # with those of values.
            return total + heads * (2 * shape.head_dim * width + self._absorbed_width * width + FP32)
        # Rotated queries and keys, values, the result, and the log-sum of the softmax.
        return total + 2 * (heads + key_heads) * shape.head_dim * width + heads * FP32

    @property
    def _absorbed_width(self) -> int:
        """Width of a query that attends to rows, and of its result."""
        return self.shape.latent_width + (self.shape.kv_lora_rank or 0)

    def network(self, block: str, frozen: Frozen | None = None) -> float:
        """Return the bytes of a layer without its attention: adapters, norm, and the dense network or the router and
        experts. Backward frees them before the backward of attention begins. SwiGLU keeps gate and up, and also the
        input of the down projection if that has a gradient; grouped products always keep their inputs."""
        shape = self.shape
        width = self.width
        tp = self.tp
        is_dense = block == "dense"
        hidden = shape.hidden_size * width
        has_gradient = frozen is None or frozen.adapts("mlp" if is_dense else "mlp.shared_experts")
        total = self._adapters(frozen) + _norm(shape.hidden_size, width, frozen)
        if is_dense:
            return total + has_gradient * hidden * tp + (2 + has_gradient) * shape.intermediate_size * width
        chosen = shape.num_experts_per_tok
        inner = shape.moe_intermediate_size
        # Input of the router, whose product in BF16 always keeps it.
        total += hidden * (width < FP32 or frozen is None or (has_gradient and tp == 1))
        if tp > 1 and shape.n_shared_experts:
            total += has_gradient * hidden * tp
        total += 2 * shape.n_routed_experts * FP32 + chosen * (3 * FP32 + 4 * INDEX)
        total += chosen * (hidden + 3 * inner * width)  # rows sorted by expert
        return total + (2 + has_gradient) * inner * shape.n_shared_experts * width

    def _adapters(self, frozen: Frozen | None) -> float:
        """Return the bytes of ``scale * A x`` of each adapter, and with DoRA of the sum that the magnitude scales."""
        total = 0.0
        shape = with_key_copies(self.shape, self.tp)
        for row in () if frozen is None else frozen.adapters:
            # Tensor-parallel ranks hold all tokens of their group: all results of A, and their own rows of W of the
            # sum.
            times = shape.num_experts_per_tok if row.is_expert else self.tp
            if row.group == "adapter A":
                total += row.shape(shape)[-2] * self.width * times
            elif row.group == "magnitude":
                total += row.shape(shape)[-1] * self.width * (1 if row.tensor_dim == 0 else times)
        return total

    def head(self, frozen: Frozen | None = None) -> float:
        """Return the bytes of the last norm, and of the gradients of the head's input for the main model and each
        prediction depth, which forward computes for the full sequence."""
        heads = 1 + self.shape.num_nextn_predict_layers
        return _norm(self.shape.hidden_size, self.width, frozen) + self.head_inputs(heads)

    def head_inputs(self, heads: int) -> float:
        """Return the bytes of the gradients of the head's input and of the labels, for this many uses of the head."""
        return heads * self.tp * (self.shape.hidden_size * self.width + INDEX)

    def kept_tensors(self, block: str, mode: str, frozen: Frozen | None = None) -> list[float]:
        """Return the bytes of each tensor that "full" or "selective" keeps of a block, the input first; these are the
        tensors that `cpu_checkpointing` moves. Backward needs the experts' outputs only for DoRA's magnitudes."""
        shape = self.shape
        hops = self.hops
        recompute = self.recompute
        chosen = shape.num_experts_per_tok
        hidden = shape.hidden_size * self.width
        tensors: list[float] = [hidden]
        if mode == "full":
            return tensors * (2 if block == "mtp" else 1)  # the embeddings of a prediction depth
        if "core_attn" not in recompute:
            result_width = shape.kv_lora_rank or 0 if self.form == "gathered" else shape.head_dim
            tensors += [shape.num_attention_heads * result_width * self.width, shape.num_attention_heads * FP32]
        if block == "dense":
            return tensors
        tensors += [chosen * FP32, chosen * INDEX]
        if "experts" not in recompute:
            tensors.append(chosen * 2 * shape.moe_intermediate_size * self.width)
            rows = () if frozen is None else [row for row in frozen.adapters if row.is_expert]
            # Kept in addition to the results of grouped products.
            adapter_a_rows = [row for row in rows if row.group == "adapter A" and row.rank]
            tensors += [chosen * row.shape(shape)[-2] * self.width for row in adapter_a_rows]
            tensors += [chosen * hidden for row in rows if row.group == "magnitude" and "down" in row.name]
        if "exchange" not in recompute:
            tensors += [rows * chosen * EXPERT_NUMBER for rows in hops]
            tensors += [rows * row_bytes for rows in hops[-1:] for row_bytes in (hidden, chosen * FP32)]
            tensors += [chosen * hidden, chosen * FP32] if self.ep > 1 and not hops else []
        return tensors

    def output_gradients(self, block: str) -> float:
        """Return the bytes of the gradients of all outputs of products and norms of a block. A schedule that splits
        backward keeps them from the gradients of inputs until the gradients of weights."""
        shape = self.shape
        tp = self.tp
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        elements = queries + 2 * keys + (2 + tp) * shape.hidden_size  # attention with its output, and both norms
        if shape.is_latent:  # keys and values come from one product, which makes no rotated part
            rotated = shape.num_attention_heads * (shape.qk_rope_head_dim or 0)
            elements += tp * (2 * (shape.q_lora_rank or 0) + (shape.kv_lora_rank or 0) + shape.latent_width) - rotated
        if shape.use_qk_norm:
            elements += queries + keys
        if block == "dense":
            return (elements + 2 * shape.intermediate_size + tp * shape.hidden_size) * self.width
        chosen = shape.num_experts_per_tok
        shared = shape.n_shared_experts
        elements += (chosen + shared) * 2 * shape.moe_intermediate_size
        elements += (chosen + tp * (shared > 0) + 4 * (block == "mtp")) * shape.hidden_size
        return elements * self.width + shape.n_routed_experts * FP32


def attention_backward_bytes(
    shape: ModelShape, width: int, *, queries: float, keys: float, runs: float, tp: int = 1
) -> float:
    """Return the bytes that the backward of one layer's attention allocates on a rank: the gradients of result,
    queries, keys and values, and the workspace of the flash kernel.

    The workspace follows `mha_varlen_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp of
    PyTorch: the sums of the gradient of the queries, FP32 [queries + 128 runs, heads, head width rounded up], one more
    FP32 number for each of these rows and heads, and, where query heads share keys, the gradients of keys and values of
    each query head. cuDNN, which `varlen_attn` of torch 2.15 prefers for complete documents, does not publish its
    workspace. With debug.deterministic the kernel allocates the FP32 sums 132 / (runs x heads) times, rounded up, on an
    H100; that is not counted.

    Args:
        queries, keys: totals over all runs.
        runs: documents, or parts of documents, in which a rank attends.
        tp: ranks of tensor parallelism, which share the heads.
    """
    heads = shape.num_attention_heads / tp
    key_heads = max(shape.num_key_value_heads / tp, 1)
    multiple = 32 if shape.head_dim <= 128 else 64
    rounded = -(-shape.head_dim // multiple) * multiple
    workspace = (queries + 128 * runs) * heads * (rounded + 1) * FP32
    key_gradient_heads = key_heads + heads * (heads != key_heads)
    return workspace + (2 * queries * heads + 2 * keys * key_gradient_heads) * shape.head_dim * width


def travelling_key_bytes(shape: ModelShape, width: int, *, rows: int, length: int, cp: int, tp: int) -> float:
    """Return the bytes of keys and values that a rank holds in backward while they travel: its current ones, the
    arriving ones, and those of its runs; plus three FP32 gradients: this rank's, the arriving ones, and their sum."""
    heads = max(shape.num_key_value_heads / tp, 1)
    return 2 * rows * length / cp * heads * shape.head_dim * (3 * width + 3 * FP32)


def sent_of_key(shape: ModelShape, tp: int) -> float:
    """Return the numbers per token that context-parallel ranks exchange in one call: keys, then values, or the
    latent."""
    return shape.latent_width or max(shape.num_key_value_heads / tp, 1) * shape.head_dim
