"""Filters of documents: evaluation text, duplicates within the memory setting, prose and parsing."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.text_recipe import TextRecipe
from glm46.files.array_file import write_arrays
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare import duplicates as duplicates_module
from glm46.storage.prepare.contamination import evaluation_text, word_hashes
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
    Duplicates,
    band_hashes,
    is_held_out,
    join,
    links,
    ngram_hashes,
    numbers_on_disk,
)
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import call_here


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


def first_occurrences(hashes):
    """Documents without an equal earlier one, by the plain algorithm."""
    seen = set()
    return np.array([not (key in seen or seen.add(key)) for key in map(tuple, hashes.tolist())], bool)


def first_of_similar(bands):
    """Documents without a similar earlier one: the lowest number spreads until nothing changes."""
    lowest, before = np.arange(bands.shape[1]), None
    while before is None or not np.array_equal(before, lowest):
        before = lowest.copy()
        for values in bands:
            _, group = np.unique(values, return_inverse=True)
            least = np.full(group.max(initial=0) + 1, len(lowest))
            np.minimum.at(least, group, lowest)
            lowest = least[group]
    return lowest == np.arange(bands.shape[1])


@settings(max_examples=60)
@given(st.data(), st.integers(1, 2), st.sampled_from([1, 4, 9, 64]), st.integers(1, 9))
def test_every_document_with_a_known_key_is_linked_once_to_the_first(data, columns, capacity, block):
    numbers = st.integers(0, 3) | st.integers(0, 2**64 - 1)
    rows = data.draw(st.lists(st.tuples(*[numbers] * columns), max_size=60))
    keys = np.array(rows, np.uint64).reshape(-1, columns).T
    found = [
        pair
        for later, firsts in links(
            lambda: (keys[:, i : i + block] for i in range(0, len(rows), block)), len(rows), capacity
        )
        for pair in zip(later.tolist(), firsts.tolist(), strict=True)
    ]
    expected = [(number, rows.index(row)) for number, row in enumerate(rows) if rows.index(row) < number]
    assert sorted(found) == expected


def write_pieces(folder, hashes, bands, cuts):
    pieces = []
    for number, (first, stop) in enumerate(zip([0, *cuts], [*cuts, len(hashes)], strict=True)):
        tensors = {"doc_ends": np.arange(stop - first, dtype=np.int64), "hashes": hashes[first:stop]}
        if bands is not None:
            tensors["bands"] = bands[:, first:stop]
        pieces.append(folder / f"{number}.safetensors")
        write_arrays(pieces[-1], tensors, {})
    return pieces


@pytest.mark.parametrize("seed, groups", [(0, 3), (1, 300), (2, 1_500), (3, 30_000)])
@pytest.mark.parametrize("capacity", [300, 10**6])
def test_duplicates_are_those_of_the_plain_algorithm(tmp_path, seed, groups, capacity):
    rng, documents = np.random.default_rng(seed), 4_000
    hashes = rng.integers(0, 2, (documents, 2)).astype(np.uint64) * 7 + rng.integers(0, groups, (documents, 1)).astype(
        np.uint64
    )
    # Few documents share a band with the same others: long chains, which is the hard case.
    bands = rng.integers(0, 2**63, (BANDS, documents)).astype(np.uint64)
    shared = rng.random((BANDS, documents)) < 0.08
    bands[shared] = rng.integers(0, groups, int(shared.sum()))
    pieces = write_pieces(tmp_path, hashes, bands, [1, 900, 900, 3_500])
    duplicates = Duplicates(pieces, capacity * duplicates_module._KEY_BYTES, tmp_path)
    taken = [duplicates.take(n) for n in (1, 899, 0, 2_600, 500)]
    equal, alike = (np.concatenate(parts) for parts in zip(*taken, strict=True))
    assert np.array_equal(~equal, first_occurrences(hashes))
    expected = first_of_similar(bands)
    assert np.array_equal(~alike, expected)
    if groups in (300, 1_500):
        assert 0 < expected.sum() < documents


def test_a_chain_of_documents_ends_at_its_first():
    documents = 5_000
    bands = np.arange(BANDS * documents, dtype=np.uint64).reshape(BANDS, documents) + np.uint64(documents)
    order = np.random.default_rng(0).permutation(documents)
    # Neighbours in the chain share a key, of one band and of another in turn.
    for place in range(documents - 1):
        bands[place % 2, order[place : place + 2]] = place
    firsts = numbers_on_disk(documents, None)
    for band in bands:
        for later, first in links(lambda band=band: [band[None]], documents, 1_000):
            join(firsts, later, first)
    assert np.flatnonzero(firsts != np.arange(documents)).tolist() == list(range(1, documents))


def test_a_chain_in_one_step_ends_at_its_first():
    firsts = np.arange(5_000, dtype=np.uint32)
    order = np.random.default_rng(0).permutation(5_000)
    join(firsts, order[1:], order[:-1])
    assert np.flatnonzero(firsts == np.arange(5_000)).tolist() == [0]


def test_without_bands_only_equal_texts_are_duplicates(tmp_path):
    hashes = np.array([[1, 2], [1, 3], [1, 2], [0, 9], [1, 3]], np.uint64)
    duplicates = Duplicates(write_pieces(tmp_path, hashes, None, [2]), 10**6, tmp_path)
    equal, alike = duplicates.take(5)
    assert equal.tolist() == [False, False, True, False, True] and not alike.any()
    assert Duplicates([], 10**6, tmp_path).take(0)[0].tolist() == []


_PEAK = """
import sys
import numpy as np
from pathlib import Path
from glm46.storage.prepare.duplicates import Duplicates
from glm46.storage.prepare.duplicates import BANDS
documents, memory, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
PIECE = 3_000
def peak():
    # Of this program alone; getrusage also knows the process that started it.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
def tensors(piece, remedy=""):
    # Made when asked for, so that only the algorithm can grow. A third of the documents repeat others.
    rng = np.random.default_rng(int(piece))
    bands = rng.integers(0, 2**63, (BANDS, PIECE)).astype(np.uint64)
    bands[:, ::3] = rng.integers(0, documents // 9, len(range(0, PIECE, 3)))
    return [{"bands": bands, "hashes": np.ascontiguousarray(bands[:2].T)}]
import glm46.storage.prepare.duplicates as module
module.map_arrays = tensors
for pair in module.links(lambda: [np.zeros((1, 9), np.uint64)], 9, 9):
    module.join(module.numbers_on_disk(9, folder), *pair)
tensors(0)
before = peak()
found = Duplicates([str(i) for i in range(documents // PIECE)], memory, folder)
duplicates_found = sum(int(found.take(PIECE)[1].sum()) for _ in range(documents // PIECE))
print(duplicates_found, peak() - before)
"""


@pytest.mark.slow
def test_memory_stays_within_the_setting_for_ten_times_the_documents(tmp_path):
    setting = 6_000_000
    peaks = []
    for documents in (30_000, 300_000):
        command = [sys.executable, "-c", _PEAK, str(documents), str(setting), str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        duplicates_found, peak = map(int, run.stdout.split())
        assert duplicates_found > documents // 5
        peaks.append(peak)
    # The plain algorithm holds 50 bytes per document, here 1.5 and 15 MB.
    # More than nothing, or the measurement would be broken.
    assert 10**6 < max(peaks) <= setting, peaks


WORDS = np.array([f"word{number}" for number in range(8_000)])
QUESTION = "Which of the seven rivers of Thuringia, if any, flows north-west before it reaches the Saale?"


def evaluation(*texts):
    return evaluation_text([(f"exam.jsonl line {line}", text) for line, text in enumerate(texts, start=1)])


def words(rng, count):
    return rng.choice(WORDS, count).tolist()


def test_long_evaluation_text_is_found_by_runs_of_thirteen_words():
    rng = np.random.default_rng(3)
    question, page = words(rng, 40), words(rng, 600)
    exam = evaluation(" ".join(question))
    assert [(length, len(runs)) for length, runs in exam.runs.items()] == [(13, 40 - 12)]
    assert not exam.is_in(" ".join(page))
    assert exam.is_in(" ".join([*page, *question[5:18], *page]))
    assert not exam.is_in(" ".join([*page, *question[5:17], *page]))


@pytest.mark.parametrize("length", range(8, 14))
def test_short_evaluation_text_is_found_as_a_whole(length):
    rng = np.random.default_rng(length)
    question, page = words(rng, length), words(rng, 600)
    exam = evaluation(" ".join(question))
    assert exam.short == [] and [*exam.runs] == [length]
    assert exam.is_in(" ".join([*page, *question, *page])) and exam.is_in(" ".join(question))
    assert not exam.is_in(" ".join([*page, *question[1:], *page]))
    assert not exam.is_in(" ".join([*page, *question[:-1], *page]))


@pytest.mark.parametrize("copy", [
    QUESTION, QUESTION.upper(), QUESTION.replace(" ", "  "), QUESTION.replace(" ", "\u00a0"),
    QUESTION.replace(" ", "\r\n"), QUESTION.replace(",", "").rstrip("?"), QUESTION.replace("seven", "*seven*"),
    QUESTION.replace("north-west", "north\u2011west"), f"({QUESTION})",
])  # fmt: skip
def test_case_punctuation_and_white_space_do_not_hide_evaluation_text(copy):
    assert evaluation(QUESTION).is_in(f"A page. {copy} And more of it.")


def test_texts_below_eight_words_are_not_looked_for_but_named():
    exam = evaluation("2 + 2 = ?", QUESTION, "Who wrote Faust?", "one two three four five six seven")
    assert exam.short == ["exam.jsonl line 1", "exam.jsonl line 3", "exam.jsonl line 4"]
    assert not exam.is_in("Who wrote Faust?") and exam.is_in(QUESTION)


def test_each_character_of_a_script_without_blanks_counts_and_thirteen_are_needed():
    assert len(word_hashes("三角形ABCの面積, x1 = 7")) == 9
    assert evaluation("下列说法中正确的是哪一").short == ["exam.jsonl line 1"]
    question = "已知三角形的三条边长分别为三四五求它的面积"
    assert evaluation(question).is_in(f"题目:{question[:5]} {question[5:]}。")
    assert not evaluation(question).is_in(question[:12])


def test_a_preparation_names_the_texts_that_were_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)

    def write(name, texts):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(tmp_path / name)

    short = "The largest planet?"
    exam = write("exam.jsonl", [QUESTION, short])
    pages = [f"A page number {number} about trees and rivers and the way home." for number in range(3)]
    source = write("pages.jsonl", [*pages, f"Quiz: {QUESTION.lower()}", short])
    recipe = TextRecipe(
        input=(source,), output=str(tmp_path / "out"), decontaminate=(exam,), held_out=0.0, processes=1,
        deduplicate="exact",
    )  # fmt: skip
    lines = []
    manifest = prepare_text(recipe, report=lines.append)
    assert manifest.dropped == {"holds evaluation text": 1} and manifest.splits["train"].documents == 4
    assert list(manifest.noted.values()) == [1]
    assert any("too short to be looked for" in line and "exam.jsonl line 2" in line for line in lines)
