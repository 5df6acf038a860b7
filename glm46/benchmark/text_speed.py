"""Tokenising against Hugging Face `tokenizers`, and the loader: both on one core."""

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from glm46.config.errors import UserError
from glm46.data.loader import build_train_loader
from glm46.data.manifest import Manifest, ShardEntry, Split, save_manifest
from glm46.data.shards import write_shard
from glm46.data.tokenizer import BUILTIN_PATH, load_tokenizer
from glm46.data.tokenizer_hf import GLM_PATTERN

_TEXT_BYTES = 4_000_000
_SHARD_TOKENS = 20_000_000
_MEAN_DOCUMENT_TOKENS = 800
_BATCHES = 200


def documents(total_bytes: int = _TEXT_BYTES) -> list[str]:
    """Sources of the Python standard library, up to about so many bytes."""
    found, size = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        found.append(text)
        size += len(text)
        if size >= total_bytes:
            break
    return found


def build_peer_tokenizer():
    """`tokenizers` with the shipped vocabulary, through transformers' own converter.

    Raises:
        UserError: transformers or tokenizers is not installed.
    """
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise UserError("benchmark: transformers is not installed; pip install 'glm46[hf]'") from error
    return TikTokenConverter(vocab_file=str(BUILTIN_PATH), pattern=GLM_PATTERN).converted()


def tokenizer_speed(rounds: int, report: Callable[[str], None]) -> str:
    """Bytes per second of both tokenizers on the same documents, in alternation, one document at a time."""
    ours, peer, texts = load_tokenizer("builtin"), build_peer_tokenizer(), documents()
    size = sum(len(text.encode()) for text in texts)
    differing = sum(ours.encode(text).tolist() != peer.encode(text).ids for text in texts)
    if differing:
        raise UserError(
            f"benchmark: {differing} of {len(texts)} documents are tokenised differently; nothing to compare"
        )
    seconds: dict[str, list[float]] = {"ours": [], "tokenizers": []}
    for number in range(rounds):
        for name, encode in (("ours", ours.encode), ("tokenizers", peer.encode)):
            start = time.perf_counter()
            for text in texts:
                encode(text)
            seconds[name].append(time.perf_counter() - start)
        report(f"round {number + 1} of {rounds}")
    ratio = statistics.median(slow / fast for slow, fast in zip(seconds["tokenizers"], seconds["ours"], strict=True))
    lines = [f"tokenising {size / 1e6:.1f} MB of Python source, {len(texts)} documents, equal ids, one core"]
    for name, times in seconds.items():
        lines.append(f"  {name:<12} {size / statistics.median(times) / 1e6:8.2f} MB/s")
    return "\n".join([*lines, f"  ours is {ratio:.2f} times as fast (median of {rounds} rounds)"])


def synthetic_source(folder: Path) -> None:
    """A source of random tokens in documents of random length, for speed alone."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 8000, _SHARD_TOKENS, dtype=np.uint32)
    lengths = generator.geometric(1 / _MEAN_DOCUMENT_TOKENS, 2 * _SHARD_TOKENS // _MEAN_DOCUMENT_TOKENS)
    ends = lengths.cumsum()
    ends = np.append(ends[ends < _SHARD_TOKENS], _SHARD_TOKENS).astype(np.int64)
    name, metadata = "train-000000.safetensors", {"tokenizer": "synthetic"}
    digest = write_shard(folder / name, tokens, ends, metadata)
    split = Split.of((ShardEntry(name, len(ends), len(tokens), 4 * len(tokens), digest),))
    save_manifest(Manifest(folder, "synthetic", "synthetic", 8192, 0, {"train": split, "validation": Split.of(())}))


def loader_speed(batch: int, seq_len: int, rounds: int) -> str:
    """Tokens per second of the loader in this process, labels and one prediction depth included."""
    with tempfile.TemporaryDirectory() as folder:
        synthetic_source(Path(folder))
        loader = build_train_loader(
            [("synthetic", folder, 1.0)],
            seq_len=seq_len,
            mtp_depth=1,
            local_batch_size=batch,
            dp_rank=0,
            dp_degree=1,
            seed=0,
            document_mask=False,
            start_sample=0,
        )
        batches = iter(loader)
        next(batches)
        rates = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(_BATCHES):
                next(batches)
            rates.append(_BATCHES * batch * seq_len / (time.perf_counter() - start))
    return (
        f"loader, {batch} x {seq_len} tokens per batch, one process: {statistics.median(rates) / 1e6:.1f} M tokens/s "
        f"(median of {rounds} rounds of {_BATCHES} batches)"
    )
