"""Speed of tokenising against Hugging Face `tokenizers` on one core."""

import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from glm46.benchmark.rounds import timed_rounds
from glm46.config.errors import UserError
from glm46.data.tokenizer import BUILTIN_PATH, load_tokenizer
from glm46.data.tokenizer_hf import GLM_PATTERN

_TEXT_BYTES = 4_000_000


def documents(total_bytes: int = _TEXT_BYTES) -> list[str]:
    """Sources of the Python standard library, about this many bytes or all that there are."""
    found, size = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        found.append(text)
        size += len(text)
        if size >= total_bytes:
            break
    return found


def build_peer_tokenizer():
    """`tokenizers` with the shipped vocabulary, made by transformers' converter.

    Raises:
        UserError: transformers or tokenizers is not installed.
    """
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise UserError("benchmark: transformers is not installed; pip install 'glm46[hf]'") from error
    return TikTokenConverter(vocab_file=str(BUILTIN_PATH), pattern=GLM_PATTERN).converted()


def tokenizer_speed(rounds: int | None, report: Callable[[str], None]) -> str:
    """Bytes per second of both tokenizers on the same documents, one at a time, interleaved by round.

    Raises:
        UserError: transformers is not installed, or the ids differ.
    """
    ours, peer, texts = load_tokenizer("builtin"), build_peer_tokenizer(), documents()
    size = sum(len(text.encode()) for text in texts)
    differing = sum(ours.encode(text).tolist() != peer.encode(text).ids for text in texts)
    if differing:
        raise UserError(
            f"benchmark: {differing} of {len(texts)} documents are tokenised differently, so times are not comparable"
        )
    seconds: dict[str, list[float]] = {"ours": [], "tokenizers": []}
    for _ in timed_rounds(rounds, report):
        for name, encode in (("ours", ours.encode), ("tokenizers", peer.encode)):
            start = time.perf_counter()
            for text in texts:
                encode(text)
            seconds[name].append(time.perf_counter() - start)
    ratio = statistics.median(slow / fast for slow, fast in zip(seconds["tokenizers"], seconds["ours"], strict=True))
    lines = [f"tokenising {size / 1e6:.1f} MB of Python source, {len(texts)} documents, equal ids, one core"]
    for name, times in seconds.items():
        lines.append(f"  {name:<12} {size / statistics.median(times) / 1e6:8.2f} MB/s")
    return "\n".join([*lines, f"  ours is {ratio:.2f} times as fast (median of {len(seconds['ours'])} rounds)"])
