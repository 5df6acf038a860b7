"""FLOPs of a token in training, counted from the matrix products of forward and backward.

Backward costs twice the forward, so training costs three forwards. Causal attention is counted as causal (half of the
square); the embedding look-up costs nothing. Recomputation under activation checkpointing is not counted: the result is
the work that the model needs, so MFU falls when a layout does redundant work. A frozen weight costs two forwards, as it
has no gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import expm1
from typing import TYPE_CHECKING, TypeVar

from glm46.config.adapter import AdapterConfig
from glm46.config.model import ModelShape
from glm46.run.parameters import Parameter, active_elements, active_matrices, adapter_rows, indexer_counts, layer_counts

if TYPE_CHECKING:  # planning needs no torch
    from torch import Tensor

_Lengths = TypeVar("_Lengths", int, "Tensor")
_TRAINING_OVER_FORWARD = 3
_FROZEN_OVER_FORWARD = 2
_FLOPS_PER_MULTIPLY_ADD = 2
FORWARD_SHARE = 1 / _TRAINING_OVER_FORWARD
"""Share of forward in the FLOPs of a layer."""
FROZEN_SHARE = _FROZEN_OVER_FORWARD / _TRAINING_OVER_FORWARD
"""Share of the FLOPs of a product that remains if its weight has no gradient."""


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs per token of forward and backward."""

    matrices: float
    """Products with weights in the main model, the head included."""
    adapters: float
    """Products with A and B."""
    attention: float
    """Scores and weighted values of attention in the main model."""
    mtp: float
    """All products of the MTP layers, with their use of the head."""

    @property
    def total(self) -> float:
        return self.matrices + self.adapters + self.attention + self.mtp


def matrix_flops(rows: Iterable[Parameter], shape: ModelShape, adapter: AdapterConfig | None = None) -> float:
    """Count the FLOPs per token of products with these rows. Under an adapter they are frozen and have no weight
    gradient; indexers are always frozen."""
    by_part = [(active_elements([row], shape), row.part == "indexer") for row in rows]
    indexer = sum(weights for weights, is_indexer in by_part if is_indexer)
    others = sum(weights for weights, is_indexer in by_part if not is_indexer)
    return _product_flops(others, adapter) + _indexer_flops(indexer)


def _product_flops(weights: int, adapter: AdapterConfig | None = None) -> float:
    forwards = _TRAINING_OVER_FORWARD if adapter is None else _FROZEN_OVER_FORWARD
    return float(forwards * _FLOPS_PER_MULTIPLY_ADD * weights)


def _indexer_flops(weights: int) -> float:
    """Count the FLOPs per token of an indexer's products. It is frozen, and gives its inputs no gradient."""
    return float(_FLOPS_PER_MULTIPLY_ADD * weights)


def _mean_keys(max_keys: int | None, seq_len: int, document: float | None) -> float:
    """Average the number of keys that a query attends to over a sequence: half the sequence, or less with documents or
    if a query attends to at most ``max_keys``."""
    if not seq_len:
        return 0.0
    window = min(max_keys or seq_len, seq_len)
    if document is None:
        return window - window * window / (2 * seq_len)
    # With exponential lengths the distance to the start of the document is exponential too, limited by the start of
    # the row and by the window. The mean of min(distance, x) is `document` (1 - exp(-x / document)), integrated here
    # over the row.
    fraction = -expm1(-window / document)
    return document * (window - document * fraction + (seq_len - window) * fraction) / seq_len


def pair_flops(shape: ModelShape) -> float:
    """Count the FLOPs of a layer's attention for one pair of query and key, forward and backward."""
    width = shape.num_attention_heads * shape.head_dim
    return float(_TRAINING_OVER_FORWARD * 2 * _FLOPS_PER_MULTIPLY_ADD * width)


def _max_keys(shape: ModelShape) -> int | None:
    """Return the maximum number of keys that a query attends to."""
    return shape.sliding_window or shape.index_topk


def _index_share(shape: ModelShape) -> float:
    """Return the FLOPs of scoring a key for a query by the indexers, on average over all layers, as a share of
    `pair_flops`. Indexers are frozen, so their scores have no backward."""
    if not shape.is_sparse:
        return 0.0
    score = _FLOPS_PER_MULTIPLY_ADD * (shape.index_n_heads or 0) * (shape.index_head_dim or 0)
    return sum(indexer_counts(shape)) / sum(layer_counts(shape)) * score / pair_flops(shape)


def attention_flops(shape: ModelShape, seq_len: int, document: float | None = None) -> float:
    """Count the FLOPs per token and layer of scores and weighted values, forward and backward; under sparse attention
    those of chosen keys, and the scores of indexers.

    Args:
        seq_len: tokens of a row.
        document: mean tokens of a document, assuming exponential lengths; None: each row is one document.
    """
    keys = _mean_keys(_max_keys(shape), seq_len, document)
    return pair_flops(shape) * (keys + _index_share(shape) * _mean_keys(None, seq_len, document))


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs per token of forward and backward, for each decoder layer and for the rest."""

    per_layer: list[float]
    head_and_mtp: float


def layer_flops(shape: ModelShape, seq_len: int) -> LayerFlops:
    """Compute `training_flops` of each decoder layer, and of the head and the MTP layers."""
    attention = attention_flops(shape, seq_len)
    total = training_flops(shape, seq_len)
    weights = active_matrices(shape)
    dense = _product_flops(weights.dense) + attention
    moe = _product_flops(weights.moe) + attention
    indexer = _indexer_flops(weights.indexer)
    flops_of_layers = [
        (dense if index < shape.first_k_dense_replace else moe) + indexer * shape.has_indexer(index)
        for index in range(shape.num_hidden_layers)
    ]
    return LayerFlops(flops_of_layers, _product_flops(weights.head) + total.mtp)


def training_flops(
    shape: ModelShape,
    seq_len: int,
    document: float | None = None,
    adapter: AdapterConfig | None = None,
    *,
    only_drafts: bool = False,
) -> TrainingFlops:
    """Count the FLOPs per token of forward and backward, by part; further arguments as in `attention_flops`.

    Args:
        adapter: config of the adapters, if the run trains only these.
        only_drafts: the run trains only the prediction layers; the main model has no backward, and the head no gradient
            of its weight.
    """
    dense_layers, moe_layers, mtp_layers = layer_counts(shape)
    attention = attention_flops(shape, seq_len, document)
    weights = active_matrices(shape)
    head = _product_flops(weights.head, adapter)
    dense = _product_flops(weights.dense, adapter)
    moe = _product_flops(weights.moe, adapter)
    mtp = _product_flops(weights.mtp, adapter) + _indexer_flops(weights.indexer)
    adapters = 0 if adapter is None else active_elements(adapter_rows(shape, adapter).values(), shape)
    main_share = FORWARD_SHARE if only_drafts else 1.0
    head_share = FROZEN_SHARE if only_drafts else 1.0
    return TrainingFlops(
        matrices=main_share * (dense_layers * dense + moe_layers * moe + head)
        + indexer_counts(shape)[0] * _indexer_flops(weights.indexer),
        adapters=_product_flops(adapters),
        attention=main_share * shape.num_hidden_layers * attention,
        mtp=mtp_layers * (mtp + attention + head_share * head),
    )


def batch_flops(
    shape: ModelShape,
    tokens: int,
    half_pairs: int,
    adapter: AdapterConfig | None = None,
    *,
    only_drafts: bool = False,
) -> float:
    """Count the FLOPs of forward and backward for tokens with this number of attention pairs.

    Args:
        half_pairs: sum of `attended_half_pairs` over the documents. With one document per row the result is the total
            of `training_flops` times the tokens.
    """
    main_share = FORWARD_SHARE if only_drafts else 1.0
    passes = main_share * shape.num_hidden_layers + shape.num_nextn_predict_layers
    attention = passes * pair_flops(shape) * half_pairs / 2
    return tokens * training_flops(shape, 0, adapter=adapter, only_drafts=only_drafts).total + attention


def document_half_pairs(length: _Lengths, window: int | None) -> _Lengths:
    """Compute twice the number of (query, key) pairs of a document of this many tokens: its square, or less under a
    window.

    Args:
        length: integer, or integer tensor of any shape; the result has the same form.
    """
    # min(length, window), also for tensors
    reach = length if window is None else length - (length - window) * (length > window)
    return 2 * reach * length - reach * reach


def attended_half_pairs(length: "Tensor", shape: ModelShape) -> "Tensor":
    """Compute `document_half_pairs` of the keys that a model of this shape attends to. Under sparse attention, scores
    of indexers count as the pairs that cost as much.

    Args:
        length: integer tensor of any shape; the result has the same shape.
    """
    pairs = document_half_pairs(length, _max_keys(shape))
    return pairs + _index_share(shape) * document_half_pairs(length, None) if shape.is_sparse else pairs


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Count the FLOPs of ``steps`` iterations on one matrix: two products S x S x L and one S x S x S, where S and L
    are the shorter and the longer side."""
    min_side = min(rows, columns)
    max_side = max(rows, columns)
    return steps * (4 * min_side * min_side * max_side + 2 * min_side**3)
