"""Prints folders of shards in a terminal."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from glm46.config.faults import counted
from glm46.config.printable import printable
from glm46.operate.models.chat_documents import sampled_parts, shown_text
from glm46.storage.chats.chat_format import made_in
from glm46.storage.data.manifest import Manifest, describe_targets, load_manifest
from glm46.storage.data.mixing import permute
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import open_shard
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.huggingface.hub import fetch_options


def show_folder(arguments: Namespace) -> None:
    """Print a summary of a folder of shards, and some of its rows or documents.

    Raises:
        UserError: the folder is not a source, is damaged, or was made with another tokenizer.
    """
    fetch_options(arguments, "tokenizer")
    for line in describe(arguments.folder):
        print(printable(line))
    tokenizer = load_tokenizer(arguments.tokenizer)
    manifest = load_manifest(arguments.folder, full=False)
    manifest.require_tokenizer(tokenizer.fingerprint)
    if manifest.splits["train"].targets is None:
        for line in show_rows(manifest, tokenizer, rows=arguments.rows, seq_len=arguments.seq_len):
            print(printable(line))
        return
    console = Console(soft_wrap=True, highlight=False)
    for part in sampled_parts(manifest, tokenizer, rows=arguments.rows):
        text = shown_text(part, tokenizer, max_tokens=arguments.seq_len, brackets=not console.is_terminal)
        console.print(Text(f"── {printable(part.title)}", "dim"))
        console.print(text)


def describe(folder: Path) -> Iterator[str]:
    """Yield lines about a source: totals, document lengths, skipped documents. Checks the hash of every shard.

    Raises:
        UserError: the folder is not a source, or is damaged.
    """
    manifest = load_manifest(folder, full=True)
    yield f"{manifest.source} in {folder}, every shard verified"
    end = f", documents end with {manifest.eos_id}" if manifest.splits["train"].targets is None else ""
    yield f"tokenizer {manifest.tokenizer[:12]}…, ids below {manifest.vocab_size}{end}"
    for name, split in manifest.splits.items():
        if not split.documents:
            yield f"{name}: empty"
            continue
        yield (
            f"{name}: {counted(split.tokens, 'token')}, {counted(split.documents, 'document')}, "
            f"{counted(split.text_bytes, 'byte')} of text "
            f"({split.text_bytes / max(1, split.tokens - split.documents):.2f} per token), "
            f"{counted(len(split.shards), 'shard')}"
        )
        if split.targets is not None:
            yield f"  {describe_targets(split)}, chat format of {made_in(manifest.settings)}"
        files = [manifest.folder / shard.file for shard in split.shards]
        lengths = np.concatenate([np.diff(open_shard(file).doc_ends, prepend=0) for file in files])
        marks = ", ".join(f"{share}% {int(np.percentile(lengths, share)):,}" for share in (1, 10, 50, 90, 99))
        yield f"  tokens per document: mean {lengths.mean():,.0f}, {marks}, longest {lengths.max():,}"
    for reason, number in manifest.dropped.items():
        yield f"skipped, {reason}: {number:,}"
    for what, number in manifest.noted.items():
        yield f"{what}: {number:,}"


def show_rows(manifest: Manifest, tokenizer: Tokenizer, *, rows: int, seq_len: int) -> Iterator[str]:
    """Yield rows of training tokens as text, with document boundaries, as a run with this seq_len reads them."""
    split = manifest.splits["train"]
    stream = TokenStream(manifest.folder, split, manifest.vocab_size)
    count = max(1, split.tokens // seq_len)
    for row in permute(np.arange(min(rows, count)), count, "inspect 0").tolist():
        tokens = np.empty(seq_len, np.int64)
        used, pieces = stream.read(row * seq_len, tokens)
        ends = np.concatenate([np.empty(0, np.int64), *pieces]).tolist()
        yield f"── row {row} of {count}: tokens {row * seq_len:,} to {row * seq_len + used:,}"
        start = 0
        for number, end in enumerate([*ends, *([used] if not ends or ends[-1] < used else [])]):
            is_end = end in ends
            state = "ends here, its last position has no target" if is_end else "continues after the row"
            yield f"   document {number}, {end - start} tokens, {state}"
            yield tokenizer.decode(tokens[start : end - is_end])
            start = end
