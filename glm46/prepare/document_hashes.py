"""What is computed of one document: hashes of its runs of tokens, by which similar texts and evaluation text are found.

Similar: MinHash over runs of tokens, in bands (arXiv math/9903042; Broder 1997). Two documents whose sets of runs
overlap by a share s agree in some band with probability 1 - (1 - s^rows)^bands: 0.5 at about 0.72.
"""

from collections.abc import Sequence

import numpy as np

# As datatrove and FineWeb: fourteen bands of eight.
BANDS, ROWS = 14, 8
RUN_TOKENS = 8
# The run that two texts share by copying only. Source: GPT-3, arXiv 2005.14165, appendix C.
CONTAMINATION_TOKENS = 13

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xBF58476D1CE4E5B9)
# Any fixed odd factors: changing them changes which documents count as similar, so they belong to the format.
_RNG = np.random.Generator(np.random.PCG64(20260101))
_FACTORS = _RNG.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32) | np.uint32(1)
_OFFSETS = _RNG.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32)
# The hash of a document falls into one of these; the first ones are held out.
_BUCKETS = 10_000
# Runs at once: the table of all hash functions over them stays in the processor's cache.
_BLOCK = 512


def run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Hash of each run of ``length`` tokens, uint64 [n - length + 1]; of all tokens where there are fewer."""
    length = min(length, len(tokens))
    hashes = np.zeros(len(tokens) - length + 1, np.uint64)
    for i in range(length):
        hashes *= _MULTIPLIER
        hashes += tokens[i : i + len(hashes)]
    # The sum alone leaves the low bits of one token visible.
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    return hashes ^ (hashes >> np.uint64(29))


def band_hashes(tokens: np.ndarray) -> np.ndarray:
    """The bands of one document's MinHash, uint64 [BANDS]. ``tokens`` uint32 [n], n > 0, without the end token."""
    runs = (run_hashes(tokens, RUN_TOKENS) >> np.uint64(32)).astype(np.uint32)
    least = np.full(BANDS * ROWS, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(runs), _BLOCK):
        block = runs[None, start : start + _BLOCK] * _FACTORS[:, None]
        block += _OFFSETS[:, None]
        np.minimum(least, block.min(axis=1), out=least)
    rows = least.reshape(BANDS, ROWS)
    bands = np.zeros(BANDS, np.uint64)
    for row in range(ROWS):
        bands = bands * _MULTIPLIER + rows[:, row]
    return bands


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Whether documents belong to the validation split, by the first half of their hashes (uint64 [d]); bool [d]."""
    return hashes % np.uint64(_BUCKETS) < round(share * _BUCKETS)


def evaluation_runs(documents: Sequence[np.ndarray]) -> np.ndarray:
    """All runs of evaluation text, sorted uint64, for `is_contaminated`. Shorter texts cannot be told from chance."""
    runs = [run_hashes(d, CONTAMINATION_TOKENS) for d in documents if len(d) >= CONTAMINATION_TOKENS]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *runs]))


def is_contaminated(tokens: np.ndarray, evaluation: np.ndarray) -> bool:
    """Whether a document shares a run with evaluation text."""
    if not len(evaluation) or len(tokens) < CONTAMINATION_TOKENS:
        return False
    hashes = run_hashes(tokens, CONTAMINATION_TOKENS)
    found = np.searchsorted(evaluation, hashes)
    return bool((evaluation[np.minimum(found, len(evaluation) - 1)] == hashes).any())
