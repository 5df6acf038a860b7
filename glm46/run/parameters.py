"""The one table of the model's parameters: name, Hugging Face name, shape, initial value, optimizer, sharding.

Each fact about a parameter is here once, and other packages read it: the estimate counts with it,
`compute/model/init.py` initialises, `compute/optim/roles.py` and `compute/parallelize/tensor.py` assign roles and
shards, `storage/huggingface/names.py` and `storage/huggingface/fp8.py` convert. It needs no torch, so that planning is
fast. A test compares the rows with the parameters and buffers of the model.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from glm46.config.adapter import BASE_FORMATS, AdapterConfig, AdapterTarget
from glm46.config.indexer import IndexerTraining
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig

Head = Literal["lm", "value"]
"""Kind of the last layer: logits of the vocabulary, or one value per token."""

Part = Literal["embedding", "head", "value", "layer", "indexer", "dense", "moe", "mtp"]
Initial = Literal["normal", "ones", "zeros", "uniform"]
OptimizerName = Literal["muon", "adamw"]

DECODED_AT_ONCE = 1 << 22
"""Number of 4-bit weights that are converted at once; each takes `DECODING_BYTES` in addition to the result."""
DECODING_BYTES = 6


@dataclass(frozen=True)
class Parameter:
    """Row of the table: a parameter or buffer that occurs once in its part of the model."""

    part: Part
    """Part of the model. layer: every decoder layer and the block inside every MTP layer. indexer: the indexer of such
    a layer, if it has one. dense, moe: the feed-forward network of such a layer. head: the final norm and the output
    head. value: the head of a value network, which replaces the output head and the MTP layers. mtp: an MTP layer
    without its block."""
    name: str
    """Name in this project, inside the part."""
    hf_names: tuple[str, ...]
    """Hugging Face names inside the part; whole names for embedding and head. ``E`` is an expert's index. Several names
    are equal blocks of rows, fused into one tensor here; Muon updates each block as a separate matrix."""
    dims: str
    """Dimensions of our tensor, outermost first, as keys of `dimensions`."""
    group: str
    """Line of the printed table of optimizer roles."""
    optimizer: OptimizerName | None = "muon"
    """Optimizer under optimizer.name = "Muon". None: a buffer, which no optimizer updates."""
    initial: Initial = "normal"
    """Initial value. normal: N(0, initializer_range). uniform: within +-1 / sqrt(last dimension)."""
    tensor_dim: int | None = None
    """Dimension that tensor parallelism shards. None: replicated on every tensor-parallel rank."""
    is_expert: bool = False
    """True for routed experts, which expert parallelism shards along their first dimension."""
    needs: str | None = None
    """Key of the shape without which the parameter does not exist."""
    head_rows: str = ""
    """Dimensions of the consecutive rows of one head, each of which Muon updates as a separate matrix, as GLM-5 does
    for latent attention (arXiv 2602.15763). Empty: heads are not updated separately."""
    hf_repeat: str | None = None
    """Hugging Face name inside an MTP layer under which GLM-4.5 and GLM-4.5-Air repeat the tensor."""
    fp8_family: str | None = None
    """Pattern of the modules that inference servers fuse or multiply in sequence: the whole family is in FP8 or none of
    it. None: never in FP8. In the main model the same rows are the targets of adapters."""
    rank: int | None = None
    """Dimension r of an adapter."""
    is_frozen: bool = False
    """True in the base of a run that trains adapters: no gradient and no optimizer state."""
    stored_bytes: float | None = None
    """Bytes of an element of a quantised base, also while a layer is gathered. None: determined by the dtype of
    computation or training."""

    @property
    def is_quantised(self) -> bool:
        """True for a weight of a quantised base, not for its scales."""
        return self.stored_bytes is not None and self.group != "scales"

    @property
    def is_trained(self) -> bool:
        """True if an optimizer updates it."""
        return self.optimizer is not None and not self.is_frozen

    @property
    def is_decayed(self) -> bool:
        """True if weight decay applies: to all parameters except norms, biases and magnitudes."""
        return self.initial in ("normal", "uniform") or self.group == "adapter B"

    @property
    def is_matrix(self) -> bool:
        """True for a matrix or a stack of matrices."""
        return " " in self.dims

    @property
    def row_blocks(self) -> int:
        """Number of blocks of rows that are separate matrices."""
        return len(self.hf_names)

    def exists_in(self, shape: ModelShape) -> bool:
        """Return whether a model of this shape has this parameter, if it has its part."""
        return self.needs is None or bool(getattr(shape, self.needs))

    def block_rows(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the number of rows of each separate matrix, in a model of this shape."""
        if self.head_rows:
            return tuple(dimensions(shape)[dim] for dim in self.head_rows.split()) * shape.num_attention_heads
        return (self.shape(shape)[-2] // self.row_blocks,) * self.row_blocks

    def shape(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the full shape of the tensor in a model of this shape."""
        sizes = _all_dimensions(shape)
        if self.rank is not None:
            sizes = {**sizes, "r": self.rank}
        return tuple([sizes[dim] for dim in self.dims.split()])

    def numel(self, shape: ModelShape) -> int:
        """Count the elements of the full tensor."""
        return prod(self.shape(shape))

    def active_numel(self, shape: ModelShape) -> int:
        """Count the elements that one token uses."""
        numel = self.numel(shape)
        return numel * shape.num_experts_per_tok // shape.n_routed_experts if self.is_expert else numel

    def hf_shape(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the shape of each Hugging Face tensor of this parameter."""
        full_shape = self.shape(shape)
        return (full_shape[1] // self.row_blocks, *full_shape[2:]) if self.is_expert else full_shape

    def hf_tensors(self, shape: ModelShape) -> int:
        """Count the Hugging Face tensors of this parameter: there, each expert has its own matrices."""
        return len(self.hf_names) * (shape.n_routed_experts if self.is_expert else 1)

    def choose_optimizer(self, config: OptimizerConfig) -> str:
        """Return the optimizer, "muon" or "adamw", for this parameter under [optimizer]."""
        assert self.optimizer is not None, f"{self.name} is a buffer"
        return "adamw" if config.name == "AdamW" else self.optimizer

    def states(self, config: OptimizerConfig) -> int:
        """Count the optimizer states per element: one momentum under Muon, two moments under AdamW."""
        return 1 if self.choose_optimizer(config) == "muon" else 2


def dimensions(shape: ModelShape) -> dict[str, int]:
    """Return the sizes of the dimensions named in `Parameter.dims`.

    V vocabulary, D hidden, H width of all query heads, K width of all key heads, C width of one head, I width of a
    dense layer, E experts, F width of one expert, S width of the shared experts. Latent attention: Q and L widths of
    the latents of queries and of keys and values, LR width of L and the rotated key, N width of the unrotated part of a
    head, NC width of the unrotated parts and values of all heads. Sparse attention: G index heads, J width of one, GJ
    width of all.
    """
    width = shape.moe_intermediate_size
    heads = shape.num_attention_heads
    unrotated = shape.qk_nope_head_dim or 0
    index_heads = shape.index_n_heads or 0
    index_width = shape.index_head_dim or 0
    return {
        "V": shape.vocab_size,
        "D": shape.hidden_size,
        "2D": 2 * shape.hidden_size,
        "H": heads * shape.head_dim,
        "K": shape.num_key_value_heads * shape.head_dim,
        "C": shape.head_dim,
        "Q": shape.q_lora_rank or 0,
        "L": shape.kv_lora_rank or 0,
        "LR": shape.latent_width,
        "N": unrotated,
        "NC": heads * (unrotated + (shape.v_head_dim or 0)),
        "G": index_heads,
        "J": index_width,
        "GJ": index_heads * index_width,
        "I": shape.intermediate_size,
        "E": shape.n_routed_experts,
        "F": width,
        "2F": 2 * width,
        "S": width * shape.n_shared_experts,
        "1": 1,
    }


@functools.lru_cache(maxsize=64)
def _all_dimensions(shape: ModelShape) -> Mapping[str, int]:
    """Return `dimensions`, and numbers of column groups of quantised weights. Cached: a layout search calls it millions
    of times."""
    sizes = dimensions(shape)
    groups = {base.columns for base in BASE_FORMATS.values()}
    return MappingProxyType(sizes | {f"{dim}/{n}": size // n for dim, size in sizes.items() for n in groups})


class _Options(TypedDict, total=False):
    """Fields of `Parameter` that have a default."""

    optimizer: OptimizerName | None
    initial: Initial
    tensor_dim: int | None
    is_expert: bool
    needs: str | None
    head_rows: str
    hf_repeat: str | None
    fp8_family: str | None


def _same(part: Part, name: str, dims: str, group: str, **options: Unpack[_Options]) -> Parameter:
    """Build a row whose Hugging Face name equals the name here."""
    return Parameter(part, name, (name,), dims, group, **options)


def _norm(part: Part, name: str, dims: str, hf_name: str | None = None, *, needs: str | None = None) -> Parameter:
    return Parameter(part, name, (hf_name or name,), dims, "norms", "adamw", "ones", needs=needs)


def _bias(name: str, dims: str) -> Parameter:
    group = "attention biases"
    return _same("layer", name, dims, group, optimizer="adamw", initial="zeros", tensor_dim=0, needs="attention_bias")


def _swiglu(part: Part, prefix: str, width: str, group: str, *, needs: str | None = None) -> tuple[Parameter, ...]:
    family = prefix.replace(".", "[.]") + "[.](gate|up|down)_proj"
    by_outputs: dict[str, Any] = dict(dims=f"{width} D", group=group, tensor_dim=0, fp8_family=family, needs=needs)
    return (
        _same(part, f"{prefix}.gate_proj.weight", **by_outputs),
        _same(part, f"{prefix}.up_proj.weight", **by_outputs),
        _same(part, f"{prefix}.down_proj.weight", **by_outputs | {"dims": f"D {width}", "tensor_dim": 1}),
    )


_QKV: dict[str, Any] = dict(group="attention", tensor_dim=0, fp8_family="self_attn[.][qkv]_proj", needs="has_key_heads")
_LATENT: dict[str, Any] = dict(group="attention", needs="is_latent")
# From a latent to the heads, and from the hidden states to the latents.
_UP: dict[str, Any] = _LATENT | dict(tensor_dim=0)
_DOWN: dict[str, Any] = _LATENT | dict(fp8_family="self_attn[.](q_a_proj|kv_a_proj_with_mqa)")
_O: dict[str, Any] = dict(group="attention", tensor_dim=1, fp8_family="self_attn[.]o_proj")
# Servers keep the same choice of keys only with these weights in BF16.
_INDEXER: dict[str, Any] = dict(part="indexer", group="indexer", optimizer="adamw", needs="is_sparse")
_EXPERT: dict[str, Any] = dict(is_expert=True, fp8_family="mlp[.]experts[.].*_proj")
_SELECTION_BIAS = "e_score_correction_bias"

PARAMETERS = (
    Parameter(
        "embedding",
        "embed_tokens.weight",
        ("model.embed_tokens.weight",),
        "V D",
        "embedding",
        "adamw",
        tensor_dim=0,
        hf_repeat="embed_tokens.weight",
    ),
    _norm("layer", "input_layernorm.weight", "D"),
    _norm("layer", "post_attention_layernorm.weight", "D"),
    _same("layer", "self_attn.q_proj.weight", "H D", **_QKV),
    _bias("self_attn.q_proj.bias", "H"),
    _same("layer", "self_attn.k_proj.weight", "K D", **_QKV),
    _bias("self_attn.k_proj.bias", "K"),
    _same("layer", "self_attn.v_proj.weight", "K D", **_QKV),
    _bias("self_attn.v_proj.bias", "K"),
    _same("layer", "self_attn.q_a_proj.weight", "Q D", **_DOWN),
    _norm("layer", "self_attn.q_a_layernorm.weight", "Q", needs="is_latent"),
    _same("layer", "self_attn.q_b_proj.weight", "H Q", **_UP, fp8_family="self_attn[.]q_b_proj", head_rows="C"),
    _same("layer", "self_attn.kv_a_proj_with_mqa.weight", "LR D", **_DOWN),
    _norm("layer", "self_attn.kv_a_layernorm.weight", "L", needs="is_latent"),
    _same("layer", "self_attn.kv_b_proj.weight", "NC L", **_UP, fp8_family="self_attn[.]kv_b_proj", head_rows="N C"),
    _same("layer", "self_attn.o_proj.weight", "D H", **_O),
    _norm("layer", "self_attn.q_norm.weight", "C", needs="use_qk_norm"),
    _norm("layer", "self_attn.k_norm.weight", "C", needs="use_qk_norm"),
    _same(name="self_attn.indexer.wq_b.weight", dims="GJ Q", **_INDEXER),
    _same(name="self_attn.indexer.wk.weight", dims="J D", **_INDEXER),
    _same(name="self_attn.indexer.k_norm.weight", dims="J", initial="ones", **_INDEXER),
    _same(name="self_attn.indexer.k_norm.bias", dims="J", initial="zeros", **_INDEXER),
    _same(name="self_attn.indexer.weights_proj.weight", dims="G D", **_INDEXER),
    *_swiglu("dense", "mlp", "I", "dense feed-forward"),
    Parameter("moe", "mlp.router.weight", ("mlp.gate.weight",), "E D", "router"),
    # Updated by the load of the experts, not by a gradient.
    Parameter("moe", f"mlp.router.{_SELECTION_BIAS}", (f"mlp.gate.{_SELECTION_BIAS}",), "E", "router", None, "zeros"),
    Parameter(
        "moe",
        "mlp.experts.gate_up",
        ("mlp.experts.E.gate_proj.weight", "mlp.experts.E.up_proj.weight"),
        "E 2F D",
        "experts gate and up",
        **_EXPERT,
    ),
    Parameter("moe", "mlp.experts.down", ("mlp.experts.E.down_proj.weight",), "E D F", "experts down", **_EXPERT),
    *_swiglu("moe", "mlp.shared_experts", "S", "shared experts", needs="n_shared_experts"),
    _norm("head", "norm.weight", "D", "model.norm.weight"),
    _same(
        "head", "lm_head.weight", "V D", "head", optimizer="adamw", tensor_dim=0, hf_repeat="shared_head.head.weight"
    ),
    _same("value", "value_head.weight", "1 D", "value head", optimizer="adamw"),
    _norm("mtp", "enorm.weight", "D"),
    _norm("mtp", "hnorm.weight", "D"),
    _norm("mtp", "norm.weight", "D", "shared_head.norm.weight"),
    _same("mtp", "eh_proj.weight", "D 2D", "MTP projection"),
)

_TARGETS: dict[str, AdapterTarget] = {
    "self_attn": "attention",
    "mlp": "dense",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
}
PEFT_NAMES = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Last part of the name of an adapter's tensor -> last part of its name in PEFT."""


def _adapters_of(row: Parameter) -> tuple[Parameter, ...]:
    """Build the rows of A, B and magnitude for a weight W, replaced by ``W + scale * B A``, with PEFT's names.

    A has the columns of W; B and the magnitude have its rows. They are sharded like these dimensions of W. The gate and
    the up matrix of an expert share A.
    """
    outputs, inputs = row.dims.split()[-2:]
    experts = "E " if row.is_expert else ""
    separator = "_" if row.is_expert else "."

    def adapter_row(key: str, dims: str, group: str, initial: Initial, *, tensor_dim: int | None) -> Parameter:
        name = f"{row.name.removesuffix('.weight')}{separator}{key}"
        hf_names = tuple(f"{hf_name.removesuffix('.weight')}.{PEFT_NAMES[key]}" for hf_name in row.hf_names)
        return Parameter(
            row.part,
            name,
            hf_names,
            experts + dims,
            group,
            "adamw",
            initial,
            tensor_dim=tensor_dim,
            is_expert=row.is_expert,
            needs=row.needs,
        )

    column_dim = row.tensor_dim if row.tensor_dim == 1 else None
    row_dim = row.tensor_dim if row.tensor_dim == 0 else None
    return (
        adapter_row("lora_A", f"r {inputs}", "adapter A", "uniform", tensor_dim=column_dim),
        adapter_row("lora_B", f"{outputs} r", "adapter B", "zeros", tensor_dim=row_dim),
        adapter_row("magnitude", outputs, "magnitude", "ones", tensor_dim=row_dim),
    )


ADAPTER_PARAMETERS = tuple(adapter for row in PARAMETERS if row.fp8_family for adapter in _adapters_of(row))
"""Adapters of every weight that can have them, as rows without a rank; see `adapter_rows`."""


def _scales_of(row: Parameter, base_dtype: str) -> Parameter:
    """Build the row of the scales of a frozen weight, sharded like the weight; a folder may have them in other
    shapes."""
    *lead, inputs = row.dims.split()
    base = BASE_FORMATS[base_dtype]
    name = scales_name(row.name)
    dims = " ".join([*lead, f"{inputs}/{base.columns}"])
    scales = replace(row, name=name, hf_names=(), dims=dims, group="scales", initial="zeros", fp8_family=None)
    return replace(scales, is_frozen=True, stored_bytes=base.scale_bytes)


def scales_name(weight: str) -> str:
    """Return the name of the scales of a quantised frozen weight."""
    return f"{weight}_scale"


_SCALES = {(row.name, key): _scales_of(row, key) for row in PARAMETERS if row.fp8_family for key in BASE_FORMATS}


def base_families(shape: ModelShape, base_dtype: str) -> frozenset[str]:
    """Return the `fp8_family` values that a base in this format stores in it: families whose weights all divide into
    groups."""
    rows = [row for row in PARAMETERS if row.exists_in(shape)]
    base = BASE_FORMATS[base_dtype]
    sizes = [(row.fp8_family, row.hf_shape(shape)[-2:]) for row in rows if row.fp8_family]
    unfit = {family for family, (height, width) in sizes if height % base.rows or width % base.columns}
    return frozenset(family for family, _ in sizes).difference(unfit)


def in_base_dtype(rows: list[Parameter], shape: ModelShape, base_dtype: str | None) -> list[Parameter]:
    """Return the rows of a frozen base; each weight that is stored in this format is followed by its scales."""
    if base_dtype is None:
        return rows
    families = base_families(shape, base_dtype)
    base_rows = []
    stored_bytes = BASE_FORMATS[base_dtype].bits / 8
    for row in rows:
        if row.fp8_family in families:
            base_rows += [replace(row, stored_bytes=stored_bytes), _SCALES[row.name, base_dtype]]
        else:
            base_rows.append(row)
    return base_rows


def describe_base(shape: ModelShape, base_dtype: str) -> str:
    """Describe the weights that a base stores in this format, and the projections that it does not."""
    rows = in_base_dtype(list(named_rows(shape).values()), shape, base_dtype)
    columns = BASE_FORMATS[base_dtype].columns
    others = dict.fromkeys(row.name.removesuffix(".weight") for row in rows if row.fp8_family and not row.stored_bytes)
    numel = sum(row.numel(shape) for row in rows if row.is_quantised)
    total = count_parameters(shape).total
    unfit = f"; not {', '.join(others)}, which have no groups of {columns}" if others else ""
    return f"{numel:,} of {total:,} weights stay in {base_dtype}, converted where they are used{unfit}"


_PREFIX = re.compile(r"(?:(layers\.\d+|mtp\.\d+\.block)|mtp\.\d+)\.(.+)")
_SCOPES = dict.fromkeys(("embedding", "head", "value"), "model") | dict.fromkeys(
    ("layer", "indexer", "dense", "moe"), "layer"
)
_SCOPES["mtp"] = "mtp"
_BY_NAME = {(_SCOPES[row.part], row.name): row for row in (*PARAMETERS, *ADAPTER_PARAMETERS, *_SCALES.values())}


def is_frozen(row: Parameter, indexers: IndexerTraining) -> bool:
    """Return whether a run that trains this of sparse attention freezes a parameter. Buffers are not frozen."""
    if row.part == "indexer":
        return indexers == "frozen"
    return indexers == "alone" and row.optimizer is not None


def find_parameter(name: str) -> Parameter:
    """Find the row of a parameter, an adapter or a buffer by its full name, such as ``layers.3.mlp.experts.down``.

    Raises:
        KeyError: no row has this name.
    """
    prefixed = _PREFIX.fullmatch(name)
    if prefixed is None:
        return _BY_NAME["model", name]
    return _BY_NAME["layer" if prefixed[1] else "mtp", prefixed[2]]


def part_rows(shape: ModelShape, *parts: str) -> list[Parameter]:
    """Return the rows of these parts in a model of this shape, in the order of the table."""
    return [row for row in PARAMETERS if row.part in parts and row.exists_in(shape)]


_LAYERS = {"dense": ("layer", "dense"), "moe": ("layer", "moe"), "mtp": ("mtp", "layer", "moe")}


def layer_rows(shape: ModelShape, kind: str, *, has_indexer: bool = False) -> list[Parameter]:
    """Return the rows of a layer: "dense", "moe", or "mtp" with its block, without embedding and head, which it shares
    with the main model.

    Args:
        has_indexer: the layer chooses keys, see `ModelShape.has_indexer`; under sparse attention every prediction layer
            does.
    """
    return part_rows(shape, *_LAYERS[kind], *(["indexer"] if has_indexer else []))


def indexer_counts(shape: ModelShape) -> tuple[int, int]:
    """Return the numbers of indexers in decoder layers and in MTP layers."""
    layers = sum(shape.has_indexer(index) for index in range(shape.num_hidden_layers))
    return layers, shape.num_nextn_predict_layers if shape.is_sparse else 0


def layer_counts(shape: ModelShape) -> tuple[int, int, int]:
    """Return the numbers of dense, expert and MTP layers."""
    dense = min(shape.first_k_dense_replace, shape.num_hidden_layers)
    return dense, shape.num_hidden_layers - dense, shape.num_nextn_predict_layers


def active_elements(rows: Iterable[Parameter], shape: ModelShape) -> int:
    """Count the elements of the matrices among these rows that one token is multiplied with."""
    return sum(row.active_numel(shape) for row in rows if row.is_matrix and row.group != "magnitude")


class ActiveMatrices(NamedTuple):
    """`active_elements` of a layer of each kind, of an indexer, and of the head."""

    dense: int
    """Without an indexer, like the next two."""
    moe: int
    mtp: int
    indexer: int
    head: int


def active_matrices(shape: ModelShape) -> ActiveMatrices:
    """Count the elements of matrices that one token is multiplied with, by part of the model."""
    return ActiveMatrices(
        dense=active_elements(layer_rows(shape, "dense"), shape),
        moe=active_elements(layer_rows(shape, "moe"), shape),
        mtp=active_elements(part_rows(shape, "mtp", "layer", "moe"), shape),
        indexer=active_elements(part_rows(shape, "indexer"), shape),
        head=active_elements(part_rows(shape, "head"), shape),
    )


def named_rows(shape: ModelShape, head: Head = "lm") -> dict[str, Parameter]:
    """Return every parameter and buffer of the model with this head by full name, in the order of the model."""
    dense, moe, mtp = layer_counts(shape)
    absent_head = {"lm": "value_head.weight", "value": "lm_head.weight"}[head]
    prefixes = [("", part_rows(shape, "embedding"))]
    for index in range(dense + moe):
        kind = "dense" if index < dense else "moe"
        prefixes.append((f"layers.{index}.", layer_rows(shape, kind, has_indexer=shape.has_indexer(index))))
    prefixes.append(("", [row for row in part_rows(shape, "head", "value") if row.name != absent_head]))
    for index in range(mtp):
        block = layer_rows(shape, "moe", has_indexer=shape.is_sparse)
        prefixes += [(f"mtp.{index}.", part_rows(shape, "mtp")), (f"mtp.{index}.block.", block)]
    return {prefix + row.name: row for prefix, rows in prefixes for row in rows}


def adapter_layer(shape: ModelShape, adapter: AdapterConfig, index: int) -> list[Parameter]:
    """Return the rows of the adapters in one layer of the main model; magnitudes only under DoRA."""
    if index not in adapter.layers_of(shape.num_hidden_layers):
        return []
    parts = ("layer", "dense" if index < shape.first_k_dense_replace else "moe")
    rows = []
    for row in ADAPTER_PARAMETERS:
        module = row.name.rpartition(".")[0]
        target = _TARGETS[module if row.is_expert else module.rpartition(".")[0]]
        is_present = row.part in parts and row.exists_in(shape)
        is_used = row.group != "magnitude" or adapter.name == "dora"
        if is_present and is_used and target in adapter.targets:
            rank = adapter.rank if adapter.expert_rank is None or not row.is_expert else adapter.expert_rank
            rows.append(replace(row, rank=rank))
    return rows


def adapter_rows(shape: ModelShape, adapter: AdapterConfig) -> dict[str, Parameter]:
    """Return every parameter of the adapters by full name, in the order of the layers."""
    layers = adapter.layers_of(shape.num_hidden_layers)
    return {f"layers.{i}.{row.name}": row for i in layers for row in adapter_layer(shape, adapter, i)}


@dataclass(frozen=True)
class ParameterCount:
    """Elements and tensors of a model as Hugging Face counts them, the routers' selection biases included."""

    main: int
    """Elements of the decoder with embedding and head, without the MTP layers."""
    mtp: int
    """Elements of the MTP layers, without repetitions of embedding and head."""
    embedding: int
    head: int
    active: int
    """Elements of the main model that one token uses, including the full embedding and the head."""
    mtp_active: int
    """Elements of the MTP layers that one token uses, without the shared head."""
    buffers: int
    """Elements of selection biases: counted in main and mtp, but not trained by the optimizer."""
    main_tensors: int
    mtp_tensors: int

    @property
    def total(self) -> int:
        """Main model and MTP layers, as GLM-4.6 is published."""
        return self.main + self.mtp

    @property
    def trained(self) -> int:
        """Elements that the optimizer updates: the sum of ``numel`` over the parameters of the model."""
        return self.total - self.buffers


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Count the elements and tensors of a model. Source of the shapes: config.json and the index of the releases."""
    rows = named_rows(shape)
    main = [row for name, row in rows.items() if not name.startswith("mtp.")]
    mtp = [row for name, row in rows.items() if name.startswith("mtp.")]
    vocabulary = shape.vocab_size * shape.hidden_size
    return ParameterCount(
        main=sum(row.numel(shape) for row in main),
        mtp=sum(row.numel(shape) for row in mtp),
        embedding=vocabulary,
        head=vocabulary,
        active=sum(row.active_numel(shape) for row in main),
        mtp_active=sum(row.active_numel(shape) for row in mtp),
        buffers=sum(row.numel(shape) for row in rows.values() if row.optimizer is None),
        main_tensors=sum(row.hf_tensors(shape) for row in main),
        mtp_tensors=sum(row.hf_tensors(shape) for row in mtp),
    )
