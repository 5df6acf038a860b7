"""Keys and values that a rank attends to and exchanges, and whether context-parallel ranks pass them around."""

import math

from glm46.config.model import ModelShape

MOST_GATHERED_BYTES = 4 * 2**30
"""Of the keys and values of one layer. GLM-4.6 reaches it at a million tokens without tensor parallelism."""
SHARED_KEYS = 3
"""Of the rows of reinforcement learning, whose samples share their prompts: keys that the runs of a row have together,
at most, as a multiple of its tokens."""


def kernel_runs(runs: float) -> int:
    """Runs that attention kernels are given, the last ones empty: a power of two, at least 8. cuDNN, which
    `varlen_attn` of torch 2.15 prefers for whole documents, makes a plan for each number of runs, and that takes longer
    than a layer."""
    return max(8, 1 << (math.ceil(runs) - 1).bit_length())


def kept_of_key(shape: ModelShape, tp: int) -> float:
    """Numbers of a token that a rank attends to: keys and values of its heads, and the latent that they are from."""
    return 2 * max(shape.num_key_value_heads / tp, 1) * shape.head_dim + shape.latent_width


def attended_keys(window: int | None, length: int, cp: int) -> tuple[float, float]:
    """Keys of a row as one document that the chunks of a context-parallel rank see together, and those that it gets.

    The first chunk and the last one see 1 + 1 / (2 cp) times the row between them, and the rank gets all keys. Under a
    window this holds for the part of the row where the window fills. Each rank has one chunk of the rest, which sees
    itself and the window before it.
    """
    if window is None or window >= length:
        return length * (1 + 1 / (2 * cp)), length
    rest = (length - window) / cp
    return window * (1 + 1 / (2 * cp)) + rest + window, min(rest + 2 * window, length)


def gathered_key_bytes(shape: ModelShape, width: int, *, rows: int, length: int, cp: int, tp: int) -> float:
    """Keys and values of one layer that a context-parallel rank holds while it attends, of whole rows as one document:
    `attended_keys` of both."""
    keys, _ = attended_keys(shape.sliding_window, length, cp)
    return rows * keys * kept_of_key(shape, tp) * width


def keys_travel(shape: ModelShape, width: int, *, rows: int, length: int, cp: int, tp: int) -> bool:
    """True if context-parallel ranks pass keys from rank to rank, one part at a time, and do not gather them all. Those
    of latent attention are gathered as latents."""
    if cp == 1 or shape.sliding_window is not None or shape.is_latent:
        return False
    return gathered_key_bytes(shape, width, rows=rows, length=length, cp=cp, tp=tp) > MOST_GATHERED_BYTES
