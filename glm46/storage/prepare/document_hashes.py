"""Hashes of one document's n-grams of tokens, which find similar documents and evaluation text.

Similar documents: MinHash over n-grams, in bands (arXiv math/9903042; Broder 1997). Two documents whose sets of n-grams
have Jaccard similarity s agree in some band with probability 1 - (1 - s^rows)^bands, which is 0.5 at s = 0.72.
"""

from collections.abc import Sequence

import numpy as np

from glm46.storage.data.mixing import GOLDEN_GAMMA, MIX_1

# Fourteen bands of eight rows, as in datatrove and FineWeb.
BANDS, ROWS = 14, 8
NGRAM_TOKENS = 8
# Two texts share an n-gram of this length only by copying. Source: GPT-3, arXiv 2005.14165, appendix C.
CONTAMINATION_TOKENS = 13

# Any fixed odd factors work. Changing them changes which documents count as similar: raise `pipeline.PIPELINE` then.
_RNG = np.random.Generator(np.random.PCG64(20260101))
_FACTORS = _RNG.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32) | np.uint32(1)
_OFFSETS = _RNG.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32)
# Buckets of document hashes; the documents of the first ones are held out.
_BUCKETS = 10_000
# N-grams hashed at once: the table of all hash functions over them fits into the processor's cache.
_BLOCK = 512


def ngram_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Hash each n-gram of ``length`` tokens, uint64 [n - length + 1]; a shorter document as one n-gram, uint64 [1]."""
    length = min(length, len(tokens))
    hashes = np.zeros(len(tokens) - length + 1, np.uint64)
    for i in range(length):
        hashes *= GOLDEN_GAMMA
        hashes += tokens[i : i + len(hashes)]
    # Without mixing, the low bits would depend on the low bits of the tokens only.
    hashes ^= hashes >> np.uint64(32)
    hashes *= MIX_1
    return hashes ^ (hashes >> np.uint64(29))


def band_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return the MinHash bands of one document, uint64 [BANDS]. ``tokens`` uint32 [n], n > 0, without the end token."""
    ngrams = (ngram_hashes(tokens, NGRAM_TOKENS) >> np.uint64(32)).astype(np.uint32)
    least = np.full(BANDS * ROWS, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(ngrams), _BLOCK):
        block = ngrams[None, start : start + _BLOCK] * _FACTORS[:, None]
        block += _OFFSETS[:, None]
        np.minimum(least, block.min(axis=1), out=least)
    rows = least.reshape(BANDS, ROWS)
    bands = np.zeros(BANDS, np.uint64)
    for row in range(ROWS):
        bands = bands * GOLDEN_GAMMA + rows[:, row]
    return bands


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Return which documents are held out for validation, bool [d], by the first half of their hashes, uint64 [d]."""
    return hashes % np.uint64(_BUCKETS) < round(share * _BUCKETS)


def evaluation_ngrams(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Return the hashes of all n-grams of evaluation text, sorted uint64 [n]. Shorter texts would match by chance."""
    ngrams = [ngram_hashes(d, CONTAMINATION_TOKENS) for d in documents if len(d) >= CONTAMINATION_TOKENS]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *ngrams]))


def is_contaminated(tokens: np.ndarray, evaluation: np.ndarray) -> bool:
    """Return whether a document shares an n-gram with evaluation text. ``evaluation`` is from `evaluation_ngrams`."""
    if not len(evaluation) or len(tokens) < CONTAMINATION_TOKENS:
        return False
    hashes = ngram_hashes(tokens, CONTAMINATION_TOKENS)
    found = np.searchsorted(evaluation, hashes)
    return bool((evaluation[np.minimum(found, len(evaluation) - 1)] == hashes).any())
