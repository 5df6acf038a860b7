"""Counts FLOPs and bytes of the kernels of a part of the model, forward and backward, per rank and micro-batch.

Products and attention are counted by formula, as in `flops.py`. The bytes of everything else are sums over the tokens
with the factors of `MOVED`, which `count_kernels.py` of `scripts/measure/` counted on the meta device; a test counts
them again.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from glm46.config.model import ModelShape
from glm46.operate.estimate.activations import Frozen, with_key_copies
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.flops import attention_flops
from glm46.run.layout import Layout
from glm46.run.parameters import Parameter, dimensions, in_base_dtype, layer_rows, part_rows
from glm46.run.sizes import loss_chunk_tokens

Kind = Literal["products", "experts", "attention", "memory"]
PartOfModel = Literal["embedding", "dense", "moe", "mtp", "head"]


class Work(NamedTuple):
    """One kernel, or several memory-bound kernels."""

    kind: Kind
    flops: float
    nbytes: float
    """Bytes that are read and written."""
    kernels: int = 0
    """Number of kernel launches. All kernels of a layer are counted with its memory-bound work."""
    in_fp8: bool = False
    rows: float = 0.0
    """For grouped products the rows per expert, for attention the queries per run; 0 if speed does not depend on it."""


@dataclass(frozen=True)
class PartWork:
    """The kernels of one part of the model for one micro-batch."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    """Kernels without recomputation."""
    recomputed: tuple[Work, ...] = ()
    """Kernels that activation checkpointing repeats before backward."""


MOVED = {
    "hidden": ((84, 214), (80, 244), (18, 32), (36, 64)),  # hidden size: norms, residuals, biases
    "routed_hidden": ((10, 16), (20, 32), (2, 4), (4, 8)),  # the same, more in a layer with experts
    "heads": ((9, 11), (26, 38), (4, 6), (16, 28)),  # width of all query and key heads: RoPE and biases
    "head_norms": ((36, 92), (28, 92), (0, 6), (0, 12)),  # the same width: QK norm
    "inner": ((10, 22), (20, 44), (6, 10), (12, 20)),  # width of a dense layer, or of the shared experts: SwiGLU
    "rows": ((4, 4), (8, 8), (4, 4), (8, 8)),  # experts of a token times hidden size: rows to and from them
    "expert_inner": ((14, 40), (28, 80), (6, 10), (12, 20)),  # experts of a token times their width: SwiGLU
    "scores": ((26, 66), (27, 27), (21, 26), (21, 18)),  # number of experts: scores of the router
}
"""Bytes per token that kernels move besides products and attention, for each element named in the comments; forward and
backward, by `form`."""
KERNELS = {
    "dense": ((38, 71), (34, 66), (14, 25), (14, 25)),
    "moe": ((76, 110), (72, 98), (27, 41), (27, 38)),
    "head_norms": ((16, 32), (12, 28), (0, 2), (0, 2)),
    "exchange": ((23, 7),) * 4,
}
"""Number of all kernels of a layer, forward and backward, by `form`."""
_EXCHANGED = {"bfloat16": (8, 8), "float32": (16, 16)}
"""Additional bytes per element of `rows` with expert parallelism, which stays outside of compiled graphs."""
_PER_LOGIT = {"bfloat16": 16, "float32": 20}
"""Bytes per logit that the head moves besides its products: maximum, softmax, and the copy of the gradient."""
_HEAD_KERNELS_PER_CHUNK = 38
_ATTENTION_BACKWARD = 2.5
"""Ratio of backward to forward products in attention: FlashAttention recomputes the scores."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on one rank, with everything that its kernels depend on."""

    shape: ModelShape
    """Model shape, with the attention window of the stage of text."""
    layout: Layout
    tokens: float
    """Tokens of one rank of a tensor-parallel group: rows x length / (cp x tp)."""
    seq_len: int
    document_tokens: float | None
    param_dtype: str
    is_compiled: bool
    linear_fp8: bool = False
    experts_fp8: bool = False
    hops: tuple[float, ...] = ()
    """See `plan_sizes.rows_of_hops`."""
    chunks: int = 1
    recompute: tuple[str, ...] = ()
    """[activation_checkpoint] recompute."""

    @property
    def width(self) -> float:
        """Bytes of an element."""
        return WIDTHS[self.param_dtype]


def form(param_dtype: str, *, is_compiled: bool) -> int:
    """Return the index of a compute type, with or without compiled layers, in `MOVED` and `KERNELS`."""
    return 2 * is_compiled + (param_dtype == "float32")


def part_work(part: PartOfModel, batch: MicroBatch, checkpointing: str, frozen: Frozen | None = None) -> PartWork:
    """List the kernels of one layer, or of embedding or head, for one micro-batch on one rank.

    Args:
        part: "mtp" is an MTP layer without its use of the head; "head" is one use of the head, with its gradients,
            which are computed in forward.
        checkpointing: [activation_checkpoint] mode.
        frozen: the adapters, if all other weights are frozen.
    """
    if part == "embedding":
        return _embedding(batch, frozen)
    if part == "head":
        return _head(batch, frozen)
    shape = batch.shape
    rows = layer_rows(shape, part)
    matrices = [row for row in rows if row.is_matrix]
    products = [_product(row, batch) for row in matrices]
    recomputed_products = products
    backward = [work for work in products for _ in range(2)]  # gradients of input and of weight
    converted = []  # with True for experts
    if frozen is not None:
        adapters = [work for row in frozen.adapters for work in _adapter_products(row, batch)]
        backward = [*products, *(work for work in adapters for _ in range(2))]  # frozen weights get no gradient
        products = [*products, *adapters]
        recomputed_products = products
        for row in (row for row in in_base_dtype(rows, shape, frozen.base_dtype) if row.is_quantised):
            share = row.numel(shape) / (batch.layout.ep if row.is_expert else batch.layout.tp)
            converted.append((row.is_expert, Work("memory", 0.0, *frozen.decoding(share, batch.width))))
    elif not batch.experts_fp8 and (part != "mtp" or checkpointing == "selective"):
        # The experts' second product is not repeated (`_Recalling` in `compute/parallelize/activation_checkpoint.py`).
        recomputed_products = [_product(row, batch) for row in matrices if not (row.is_expert and "down" in row.name)]
    core = _attention(batch)
    conversions = [work for _, work in converted]
    moved = _moved(part, batch, False)
    moved_backward = _moved(part, batch, True)
    backward += [
        *conversions,
        core._replace(flops=_ATTENTION_BACKWARD * core.flops, nbytes=2 * core.nbytes),
        moved_backward,
    ]
    repeats_experts = "experts" in batch.recompute
    selective = [work for is_expert, work in converted if repeats_experts or not is_expert]
    selective += [work for work in recomputed_products if repeats_experts or work.kind == "products"]
    selective.append(moved)
    selective += [core] if "core_attn" in batch.recompute else []
    full = [*conversions, *recomputed_products, core, moved]
    recomputed = {"none": [], "full": full, "selective": selective}[checkpointing]
    return PartWork((*conversions, *products, core, moved), tuple(backward), tuple(recomputed))


def _product(row: Parameter, batch: MicroBatch) -> Work:
    """Describe one product with a weight. Tensor-parallel ranks have parts of a matrix and all tokens of the group, or
    a complete matrix and their own tokens."""
    shape = batch.shape
    layout = batch.layout
    *_, outputs, inputs = row.shape(shape)
    if row.is_expert:
        rows = batch.tokens * shape.num_experts_per_tok
        weights = row.numel(shape) / layout.ep
        nbytes = (weights + rows * (inputs + outputs)) * batch.width
        rows_per_expert = rows * layout.ep / shape.n_routed_experts
        return Work("experts", 2 * rows * inputs * outputs, nbytes, in_fp8=batch.experts_fp8, rows=rows_per_expert)
    is_split = row.tensor_dim is not None
    tp = layout.tp if is_split else 1
    tokens = batch.tokens * tp
    weights = inputs * outputs / tp
    inner, outer = (inputs, outputs / tp) if row.tensor_dim == 0 else (inputs / tp, outputs)
    nbytes = (weights + tokens * (inner + outer)) * batch.width
    return Work("products", 2 * tokens * weights, nbytes, in_fp8=batch.linear_fp8 and row.fp8_family is not None)


def _adapter_products(row: Parameter, batch: MicroBatch) -> list[Work]:
    """Describe the product with A or B of an adapter, whose ranks have all tokens of a tensor-parallel group, and the
    addition to the base's results. A magnitude scales these results: they are read and written once more."""
    shape = batch.shape
    tp = batch.layout.tp
    rows = batch.tokens * (shape.num_experts_per_tok if row.is_expert else tp)
    share = tp if row.tensor_dim is not None else 1
    outputs = row.shape(shape)[-1 if row.group == "magnitude" else -2]
    results = rows * outputs * batch.width / (share if row.tensor_dim == 0 else 1)
    if row.group == "magnitude":
        return [Work("memory", 0.0, 3 * results)]
    inputs = row.shape(shape)[-1]
    held = row.numel(shape) / (batch.layout.ep if row.is_expert else share)
    nbytes = (held + rows * inputs / (share if row.tensor_dim == 1 else 1)) * batch.width + results
    kind: Kind = "experts" if row.is_expert else "products"
    added = [Work("memory", 0.0, 3 * results)] if row.is_expert and row.group == "adapter B" else []
    return [Work(kind, 2 * rows * inputs * outputs / share, nbytes), *added]


def _attention(batch: MicroBatch) -> Work:
    """Describe the scores and weighted values of one layer."""
    sizes = dimensions(with_key_copies(batch.shape, batch.layout.tp))
    tokens = batch.tokens
    flops = tokens * attention_flops(batch.shape, batch.seq_len, batch.document_tokens) / 3  # forward only
    parts = 2 * batch.layout.cp if batch.layout.cp > 1 else 1  # parts of a row; a context-parallel rank has two
    run = min(batch.seq_len / parts, batch.document_tokens or batch.seq_len)
    return Work("attention", flops, 2 * tokens * (sizes["H"] + sizes["K"]) * batch.width, rows=run)


def _moved(part: PartOfModel, batch: MicroBatch, backward: bool) -> Work:
    """Describe the kernels of a layer other than products and attention."""
    shape = batch.shape
    sizes = dimensions(with_key_copies(batch.shape, batch.layout.tp))
    form_index = form(batch.param_dtype, is_compiled=batch.is_compiled)
    chosen = shape.num_experts_per_tok
    heads = sizes["H"] + sizes["K"]
    elements: dict[str, float] = {"hidden": shape.hidden_size, "heads": heads, "head_norms": heads * shape.use_qk_norm}
    if part == "dense":
        elements["inner"] = sizes["I"]
    else:
        elements |= {
            "routed_hidden": shape.hidden_size,
            "inner": sizes["S"],
            "rows": chosen * shape.hidden_size,
            "expert_inner": chosen * sizes["F"],
            "scores": shape.n_routed_experts,
        }
    if part == "mtp":  # three more norms, in addition to the two of the block
        elements["hidden"] *= 2.5
    nbytes = sum(MOVED[name][form_index][backward] * count for name, count in elements.items())
    kernels = KERNELS["dense" if part == "dense" else "moe"][form_index][backward]
    kernels += KERNELS["head_norms"][form_index][backward] * shape.use_qk_norm
    if part != "dense" and batch.layout.ep > 1:
        # Rows are copied and summed once for all experts of a token, or at each rank on the hops.
        share = (chosen + sum(batch.hops)) / (2 * chosen) if batch.hops else 1.0
        nbytes += _EXCHANGED[batch.param_dtype][backward] * elements["rows"] * share
        kernels += KERNELS["exchange"][form_index][backward] * batch.chunks
        if batch.chunks > 1:  # results are joined; weight gradients of two chunks are added
            nbytes += 2 * shape.hidden_size * batch.width * (not backward)
            weights = sum(row.numel(shape) for row in layer_rows(shape, "moe") if row.is_expert) / batch.layout.ep
            nbytes += 3 * weights * batch.width / batch.tokens * backward
    return Work("memory", 0.0, batch.tokens * nbytes, kernels)


def work_beside_exchange(batch: MicroBatch, backward: bool) -> dict[str, list[Work]]:
    """List the kernels of the shared expert and of both products of routed experts, which overlap with the exchange."""
    shape = batch.shape
    form_index = form(batch.param_dtype, is_compiled=batch.is_compiled)
    sizes = dimensions(shape)
    inner = {
        "shared": MOVED["inner"][form_index][backward] * sizes["S"],
        "down": MOVED["expert_inner"][form_index][backward] * shape.num_experts_per_tok * sizes["F"],
    }
    by_step = {name: [Work("memory", 0.0, batch.tokens * nbytes)] for name, nbytes in inner.items()} | {"gate_up": []}
    for row in layer_rows(shape, "moe"):
        if row.is_matrix and (row.is_expert or "shared_experts" in row.name):
            step = "shared" if not row.is_expert else "down" if "down" in row.name else "gate_up"
            by_step[step] += [_product(row, batch)] * (1 + backward)
    return by_step


def _embedding(batch: MicroBatch, frozen: Frozen | None) -> PartWork:
    """Describe the embedding: a row is read and written for each token; backward also zeroes the full gradient."""
    [weight] = part_rows(batch.shape, "embedding")
    held = weight.numel(batch.shape) / batch.layout.tp
    moved = 2 * batch.tokens * batch.layout.tp
    forward = Work("memory", 0.0, moved * batch.shape.hidden_size * batch.width, 1)
    if frozen is not None:
        return PartWork((forward,), ())
    return PartWork((forward,), (forward._replace(nbytes=forward.nbytes + held * batch.width),))


def _head(batch: MicroBatch, frozen: Frozen | None) -> PartWork:
    """Describe the head: logits, loss and both gradients, in chunks of tokens, all in forward. Backward only scales the
    gradients."""
    weight = next(row for row in part_rows(batch.shape, "head") if row.is_matrix)
    product = _product(weight, replace(batch, linear_fp8=False))
    tokens = batch.tokens * batch.layout.tp
    held = weight.numel(batch.shape) / batch.layout.tp
    chunks = max(tokens / loss_chunk_tokens(is_trained=frozen is None), 1.0)
    logits = tokens * held / batch.shape.hidden_size * _PER_LOGIT[batch.param_dtype]
    kernels = round(_HEAD_KERNELS_PER_CHUNK * chunks)
    if frozen is not None:
        return PartWork((product, product, Work("memory", 0.0, logits, kernels)), ())
    # The sum over the chunks' gradients is FP32; the products add to it.
    added = held * 2 * 4 * chunks
    forward = Work("memory", 0.0, logits + added, kernels)
    return PartWork((product, product, product, forward), (Work("memory", 0.0, 2 * held * batch.width, 4),))
