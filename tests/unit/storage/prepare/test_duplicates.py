"""Duplicates equal those of the plain algorithm, within the memory setting, in one reading and in many."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.files.array_file import write_arrays
from glm46.storage.prepare import duplicates as duplicates_module
from glm46.storage.prepare.duplicates import BANDS, Duplicates, join, links, numbers_on_disk


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
