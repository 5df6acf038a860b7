"""Measure the way from text to batches on one core, each result beside its goal.

    python scripts/measure/measure_data.py                          # tokenise, prepare, find duplicates, read: minutes
    python scripts/measure/measure_data.py --megabytes 1 --rounds 1         # a trial

Temporary files are removed. Exit code 1 if a goal is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.config.text_recipe import TextRecipe
from glm46.files.array_file import write_arrays
from glm46.storage.data.loader import BatchLayout, TrainSource, build_train_loader
from glm46.storage.data.manifest import Manifest, ShardEntry, Split, load_manifest
from glm46.storage.data.tokenizer import BUILTIN_PATH, load_tokenizer
from glm46.storage.data.tokenizer_hf import GLM_PATTERN
from glm46.storage.prepare.duplicates import (
    Duplicates,
    band_hashes,
)
from glm46.storage.prepare.input_files import embedded_files
from glm46.storage.prepare.pipeline import prepare_text
from glm46.storage.prepare.sharding import save_manifest, write_shard

_MEAN_DOCUMENT_TOKENS = 1_000
_SECONDS = 0.5  # of each timed loop over batches
_SEEKS = 200
_FAR = 10**9
_SOURCES = 8


class Result(NamedTuple):
    """One measured number and its goal."""

    what: str
    value: float
    unit: str
    goal: float
    at_most: bool = False
    """The goal is an upper limit; False: a lower limit."""

    @property
    def is_held(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def line(self) -> str:
        """A line of the table: name, number, goal, "held" or "MISSED"."""
        bound = f"at most {self.goal:g}" if self.at_most else f"at least {self.goal:g}"
        return f"  {self.what:<58} {self.value:9.3f} {self.unit:<13} {bound:<14} {'held' if self.is_held else 'MISSED'}"


def main() -> int:
    """Measure everything and print a table of results and goals; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--megabytes", type=int, default=32, help="of text to tokenise and prepare")
    parser.add_argument("--shard-tokens", type=int, default=20_000_000, help="of made-up text to read")
    work = parser.parse_args()
    texts, results = real_texts(10**6 * work.megabytes), []
    print(f"text to batches on one core: {sum(map(len, texts)) / 1e6:.1f} MB of Python source, {len(texts)} documents")
    with tempfile.TemporaryDirectory() as folder:
        parts = (
            lambda: _tokenizer(texts, work.rounds), lambda: _preparation(texts, Path(folder)),
            lambda: _deduplication(texts, Path(folder)), lambda: _reading(work, Path(folder)),
        )  # fmt: skip
        for measure in parts:
            for result in measure():
                results.append(result)
                print(result.line(), flush=True)
    if find_spec("transformers") is None:
        print("  transformers is not installed, so `tokenizers` was not measured; pip install 'glm46[hf]'")
    return int(not all(result.is_held for result in results))


def real_texts(total_bytes: int) -> list[str]:
    """Sources of the Python library and of installed packages, about this many bytes or all that there are."""
    found, size = [], 0
    for source in ("python_stdlib", "python_packages"):
        for file in embedded_files(source):
            if size >= total_bytes:
                return found
            found.append(file.read_text(encoding="utf-8", errors="replace"))
            size += len(found[-1])
    return found


def build_peer_tokenizer():
    """`tokenizers` with the shipped vocabulary, made by transformers' converter, which must be installed."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return TikTokenConverter(vocab_file=str(BUILTIN_PATH), pattern=GLM_PATTERN).converted()


def _tokenizer(texts: Sequence[str], rounds: int) -> list[Result]:
    """Tokens per second, and the ratio to `tokenizers` on the same documents, interleaved."""
    ours = load_tokenizer("builtin")
    tokens = sum(len(ours.encode(text)) for text in texts)
    whole = statistics.median(_timed(lambda: [ours.encode(text) for text in texts]) for _ in range(rounds))
    results = [Result("tokenise", tokens / whole / 1e6, "M tokens/s", 2.5)]
    if find_spec("transformers") is not None:
        peer = build_peer_tokenizer()
        # The peer takes seconds per round; a tenth of the documents is enough for the ratio.
        some = texts[::10]
        assert all(ours.encode(text).tolist() == peer.encode(text).ids for text in some), "different ids"
        ratios = []
        for _ in range(rounds):
            seconds = _timed(lambda: [ours.encode(text) for text in some])
            ratios.append(_timed(lambda: [peer.encode(text) for text in some]) / seconds)
        results.append(Result("tokenise, against `tokenizers`, interleaved", statistics.median(ratios), "times", 4.0))
    return results


def _preparation(texts: Sequence[str], folder: Path) -> list[Result]:
    """From JSON lines to shards in one process, as the `prepare` command does it."""
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = TextRecipe(input=(str(file),), output=str(folder / "prepared"), processes=1)
    manifests = []
    seconds = _timed(lambda: manifests.append(prepare_text(recipe, report=lambda _: None)))
    tokens = sum(split.tokens for split in manifests[0].splits.values())
    return [Result("prepare, JSON lines to shards, near duplicates removed", tokens / seconds / 1e6, "M tokens/s", 0.7)]


def _deduplication(texts: Sequence[str], folder: Path) -> list[Result]:
    """Hashes of all documents, and the search for duplicates by them; tokenising is not timed."""
    tokenizer = load_tokenizer("builtin")
    documents = [tokenizer.encode(text) for text in texts if text]
    hashes = np.random.default_rng(0).integers(0, 2**63, (len(documents), 2)).astype(np.uint64)

    def work() -> None:
        bands = np.array([band_hashes(document) for document in documents]).T
        write_arrays(folder / "piece", {"hashes": hashes, "bands": bands}, {})
        Duplicates([folder / "piece"], 10**9, folder).take(len(documents))

    return [
        Result(
            "find duplicates (MinHash, equal hashes)", sum(map(len, documents)) / _timed(work) / 1e6, "M tokens/s", 2.0
        )
    ]


def synthetic_source(folder: Path, tokens: int) -> None:
    """Write a source of random tokens in documents of random length."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 8000, tokens, dtype=np.uint32)
    lengths = generator.geometric(1 / _MEAN_DOCUMENT_TOKENS, 2 * tokens // _MEAN_DOCUMENT_TOKENS)
    ends = lengths.cumsum()
    ends = np.append(ends[ends < tokens], tokens).astype(np.int64)
    name, metadata = "train-000000.safetensors", {"tokenizer": "synthetic"}
    digest = write_shard(folder / name, ids, ends, metadata)
    split = Split.of((ShardEntry(name, len(ends), tokens, 4 * tokens, digest),))
    save_manifest(Manifest(folder, "synthetic", "synthetic", 8192, 0, {"train": split, "validation": Split.of(())}))


def _reading(work: argparse.Namespace, parent: Path) -> list[Result]:
    """The loader of one rank in this process, with labels, document mask and one prediction depth."""
    folder = parent / "synthetic"
    folder.mkdir()
    synthetic_source(folder, work.shard_tokens)
    manifest = load_manifest(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())

    def build(sources: int, start_sample: int = 0):
        return build_train_loader(
            [TrainSource(f"s{i}", manifest, 1.0) for i in range(sources)],
            BatchLayout(work.seq_len, 1, work.batch, 0, 1, True),
            seed=0,
            start_sample=start_sample,
        )

    loader = build(1)
    paths = {"with": iter(loader), "without": iter(loader.dataset)}
    rates = {name: [] for name in paths}
    for _ in range(work.rounds):
        for name, batches in paths.items():
            rates[name].append(work.batch * work.seq_len * _batches_per_second(batches))
    stream = build(_SOURCES).dataset
    seeks = []
    for number in np.random.default_rng(1).integers(0, _FAR, _SEEKS).tolist():
        stream.start_sample = number
        seeks.append(1e3 * _timed(lambda: next(iter(stream))))
    name = f"loader, {work.batch} x {work.seq_len} tokens"
    return [
        Result(f"{name}, through StatefulDataLoader", statistics.median(rates["with"]) / 1e6, "M tokens/s", 20.0),
        Result(f"{name}, without", statistics.median(rates["without"]) / 1e6, "M tokens/s", 40.0),
        Result(f"disk, {_MEAN_DOCUMENT_TOKENS}-token documents", size / work.shard_tokens, "bytes/token", 4.02, True),
        Result(f"seek to a sample and read its batch, {_SOURCES} sources", statistics.median(seeks), "ms", 5.0, True),
        Result("the same, 99th percentile", float(np.quantile(seeks, 0.99)), "ms", 5.0, True),
    ]  # fmt: skip


def _batches_per_second(batches) -> float:
    next(batches)
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _SECONDS:
        next(batches)
        count += 1
    return count / seconds


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
