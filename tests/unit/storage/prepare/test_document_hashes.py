"""Filters of documents (duplicates, evaluation text, prose, parsing), and fill-in-the-middle."""

import random

import numpy as np
import pytest

from glm46.config.text_recipe import TextRecipe
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare.documents import (
    MIDDLE,
    PREFIX,
    SUFFIX,
    encode_document,
    json_fault,
    prose_fault,
    python_fault,
)
from glm46.storage.prepare.duplicates import (
    BANDS,
    band_hashes,
    is_held_out,
    join,
    links,
    ngram_hashes,
)


def document(rng, length=600):
    return rng.integers(0, 8_000, length).astype(np.uint32)


def edited(rng, tokens, edits):
    """A copy with single tokens replaced; each changes eight n-grams of eight tokens."""
    copy = tokens.copy()
    copy[rng.choice(len(copy), edits, replace=False)] = 8_001
    return copy


def jaccard(a, b):
    one, two = (set(ngram_hashes(x, 8).tolist()) for x in (a, b))
    return len(one & two) / len(one | two)


def similar_kept(documents):
    bands = np.array([band_hashes(d) for d in documents]).T.reshape(BANDS, len(documents))
    firsts = np.arange(len(documents), dtype=np.uint32)
    for band in bands:
        for later, first in links(lambda band=band: [band[None]], len(documents), 100):
            join(firsts, later, first)
    return (firsts == np.arange(len(documents))).tolist()


def test_ngram_hashes_depend_on_order_and_content():
    tokens = np.arange(100, dtype=np.uint32)
    assert len(ngram_hashes(tokens, 8)) == 93 and len(set(ngram_hashes(tokens, 8).tolist())) == 93
    assert ngram_hashes(tokens[::-1].copy(), 8)[0] != ngram_hashes(tokens[-8:], 8)[0]
    assert ngram_hashes(tokens[3:9], 8).tolist() == ngram_hashes(tokens[3:9], 6).tolist()
    # An n-gram hashes equally at every position.
    assert ngram_hashes(tokens, 8)[50] == ngram_hashes(tokens[50:58], 8)[0]


def test_near_duplicates_are_found_and_different_texts_are_not():
    rng = np.random.default_rng(0)
    found, total, confused = 0, 150, 0
    for _ in range(total):
        original = document(rng)
        copy = edited(rng, original, 5)
        assert jaccard(original, copy) >= 0.85
        keep = similar_kept([original, document(rng), copy])
        found += keep == [True, True, False]
        confused += not keep[1]
    # At a Jaccard share of 0.87 the bands catch 1 - (1 - 0.87^8)^14 = 0.998 of the pairs.
    assert found >= 0.95 * total
    assert confused == 0


def test_half_equal_texts_stay():
    rng = np.random.default_rng(1)
    pairs = [(a, np.concatenate([a[:330], document(rng, 270)])) for a in (document(rng) for _ in range(100))]
    # About 0.38 of the n-grams are shared: caught with probability 1 - (1 - 0.38^8)^14 = 0.006.
    assert sum(similar_kept([a, b]) == [True, True] for a, b in pairs) >= 95


def test_similarity_is_transitive():
    rng = np.random.default_rng(2)
    chain = [document(rng, 2_000)]
    for _ in range(6):
        chain.append(edited(rng, chain[-1], 5))
    # In any order, one of the chain remains.
    order = rng.permutation(7)
    assert sum(similar_kept([chain[i] for i in order])) == 1


def test_short_documents_are_similar_only_if_equal():
    a, b = np.array([1, 2, 3], np.uint32), np.array([1, 2, 4], np.uint32)
    assert similar_kept([a, b, a]) == [True, True, False]


def test_the_share_held_out_is_the_share_asked_for():
    hashes = np.random.default_rng(4).integers(0, 2**63, 100_000).astype(np.uint64)
    # The standard deviation of the count is 44 at two per cent of 100,000.
    assert abs(is_held_out(hashes, 0.02).sum() - 2_000) < 220
    assert not is_held_out(hashes, 0.0).any()


PROSE = "The people of the town went to the market, and they were happy that it was open again. "


@pytest.mark.parametrize("text, fault", [
    (PROSE * 5, None), (PROSE, "under 50 words"), ("the of " * 60_000, "over 100000 words"),
    ("a b " * 100, "mean word length"), ("pneumonoultramicroscopic " * 60, "mean word length"),
    (PROSE * 3 + "# together # whatever " * 20, "symbols"), ("\n".join("- " + PROSE for _ in range(9)), "bullets"),
    ("\n".join(PROSE + "and so on..." for _ in range(9)), "break off"), (PROSE * 2 + "1234 5678 " * 60, "letters"),
    ("lorem ipsum dolor sit amet " * 20, "stop words"), ("\n".join([PROSE] * 6), "repeated lines"),
])  # fmt: skip
def test_prose_is_distinguished_from_other_text(text, fault):
    found = prose_fault(text)
    assert found is None if fault is None else fault in found


def test_code_that_does_not_parse_is_found():
    assert python_fault("def f(x):\n    return x\n") is None
    assert python_fault(r"x = '\d'") is None
    for wrong in ("def f(:\n", "print 1", "x = \x00", "(" * 10_000):
        assert python_fault(wrong) == "does not parse as Python"
    assert json_fault('{"a": [1]}') is None and json_fault("{a: 1}") == "does not parse as JSON"


TOKENIZER = load_tokenizer("builtin")


def rearranged(text, digest, **keys):
    recipe = TextRecipe(input=("x",), output="y", **keys)
    return TOKENIZER.decode(encode_document(text, digest, recipe, TOKENIZER))


def test_fill_in_the_middle_keeps_every_character():
    rng, first = random.Random(0), set()
    for _ in range(300):
        text = "".join(rng.choices("abc é\n", k=rng.randint(0, 30)))
        digest = rng.randbytes(16)
        out = rearranged(text, digest, fim_rate=1.0)
        assert out == rearranged(text, digest, fim_rate=1.0), "the hash alone decides"
        head, middle = out.split(MIDDLE)
        prefix_first = head.startswith(PREFIX)
        if prefix_first:
            prefix, suffix = head.removeprefix(PREFIX).split(SUFFIX)
        else:
            suffix, prefix = head.removeprefix(SUFFIX).split(PREFIX)
        assert prefix + middle + suffix == text
        first.add(prefix_first)
    assert first == {True, False}


def test_fill_in_the_middle_happens_as_often_as_asked():
    rng = random.Random(1)
    outs = [rearranged("abcdef", rng.randbytes(16), fim_rate=0.3) for _ in range(2_000)]
    changed = [out for out in outs if out != "abcdef"]
    # The standard deviation of the count is 20.
    assert abs(len(changed) - 600) < 100
    # Half of them with the suffix first; the standard deviation is 12.
    assert abs(sum(out.startswith(SUFFIX) for out in changed) - 300) < 60
