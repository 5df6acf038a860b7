"""Keys and values that a rank attends to and exchanges, whether context-parallel ranks pass them in a ring, and the
form of sparse attention."""

import math
from typing import Literal

from glm46.config.model import ModelShape

MOST_GATHERED_BYTES = 4 * 2**30
"""Maximum bytes of gathered keys and values of one layer. GLM-4.6 reaches it at a million tokens without tensor
parallelism."""
SHARED_KEYS = 3
"""For rows of reinforcement learning, whose samples share their prompts: maximum sum of the keys of all runs of a row,
as a multiple of its tokens."""


def kernel_runs(runs: float) -> int:
    """Round up the number of runs that attention kernels get, with empty runs at the end: a power of two, at least 8.
    cuDNN, which `varlen_attn` of torch 2.15 prefers for whole documents, builds a plan for each number of runs, which
    takes longer than a layer."""
    return max(8, 1 << (math.ceil(runs) - 1).bit_length())


SparseForm = Literal["dense", "masked", "gathered"]
"""How a layer attends: to all keys; to all keys of a document with a mask of the chosen ones; or to the gathered rows
of the chosen keys."""


def rounded_run(length: int) -> int:
    """Round the tokens of the longest document up to a power of two, at least 256; see `attention_layout.longest`."""
    return max(256, 1 << (length - 1).bit_length())


def longest_masked(shape: ModelShape) -> int:
    """Return the tokens of the longest document for which a mask needs no more FLOPs than gathered rows.

    FLOPs of a query and head: of gathered rows, 2 W K for the scores and 2 L K for the values. With a mask, 2 C and 2 C
    for each key of the document up to the query, and a query has S / 2 of them on average: 2 C S. These are equal at
    S = K (W + L) / C, 8,704 tokens for GLM-5. The products outside are the same: a mask expands the rows to keys and
    values; gathered rows need no keys and values, but products of the same size for queries and results. (K:
    index_topk, W: width of a row, L: of its latent, C: of a head.)
    """
    assert shape.index_topk and shape.latent_width and shape.kv_lora_rank
    return shape.index_topk * (shape.latent_width + shape.kv_lora_rank) // shape.head_dim


def sparse_form(shape: ModelShape, longest: int) -> SparseForm:
    """Return the form for a batch whose longest document has this many tokens; "dense" for other models."""
    if shape.index_topk is None or longest <= shape.index_topk:
        return "dense"
    return "masked" if longest <= longest_masked(shape) else "gathered"


def kept_of_key(shape: ModelShape, tp: int, form: SparseForm = "dense") -> float:
    """Count the numbers per token that a rank keeps for attention: keys and values of its heads, and their latent."""
    if form == "gathered":  # heads attend to the latent itself
        return shape.latent_width
    return 2 * max(shape.num_key_value_heads / tp, 1) * shape.head_dim + shape.latent_width


def attended_keys(window: int | None, length: int, cp: int) -> tuple[float, float]:
    """Count the keys that the chunks of a context-parallel rank attend to in total, and the keys that the rank gets,
    for a row of one document.

    The first and the last chunk together attend to 1 + 1 / (2 cp) times the row, and the rank gets all keys. Under a
    window this holds for the part of the row where the window fills. Each rank has one chunk of the remainder, which
    attends to itself and the window before it.
    """
    both_chunks = 1 + 1 / (2 * cp)
    if window is None or window >= length:
        return length * both_chunks, length
    chunk = (length - window) / cp
    attended = window * both_chunks + chunk + window
    received = min(chunk + 2 * window, length)
    return attended, received


def gathered_key_bytes(
    shape: ModelShape, width: int, *, rows: int, length: int, cp: int, tp: int, form: SparseForm = "dense"
) -> float:
    """Compute the bytes of keys and values of one layer that a context-parallel rank holds during attention, if each
    row is one document; see `attended_keys`."""
    keys, _ = attended_keys(shape.sliding_window, length, cp)
    return rows * keys * kept_of_key(shape, tp, form) * width


def keys_travel(shape: ModelShape, width: int, *, rows: int, length: int, cp: int, tp: int) -> bool:
    """Return whether context-parallel ranks pass keys from rank to rank, one part at a time, instead of gathering them.
    Latent attention always gathers latents."""
    if cp == 1 or shape.sliding_window is not None or shape.is_latent:
        return False
    return gathered_key_bytes(shape, width, rows=rows, length=length, cp=cp, tp=tp) > MOST_GATHERED_BYTES
