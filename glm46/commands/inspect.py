"""``python -m glm46 inspect``: verify a folder of shards and show rows of text, documents of chats, or pairs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from glm46.config.faults import counted
from glm46.config.options import integer, positive, verb_parser, whole
from glm46.storage.chats.pairs import BEGIN
from glm46.storage.data.manifest import Manifest, describe_targets, load_manifest
from glm46.storage.data.mixing import permute
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import NOT_A_TARGET, open_shard
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.huggingface.hub import fetch_options


def inspect_command(argv: Sequence[str]) -> int:
    """Print what a folder of shards holds; returns the exit code.

    Raises:
        UserError: the folder is not a source, is damaged, or was made with another tokenizer.
    """
    parser = verb_parser("inspect", description="Verify a folder of shards and show its text.")
    parser.add_argument("folder", type=Path, help="a folder that prepare has made")
    parser.add_argument(
        "--rows", type=whole(0), default=2, help="rows of text, documents of chats or pairs to show, picked at random"
    )
    parser.add_argument(
        "--seq_len", type=positive, default=512, help="tokens per row; of chats, most tokens shown of a document"
    )
    parser.add_argument("--seed", type=integer, default=0, help="another one shows other rows")
    parser.add_argument("--tokenizer", default="builtin", help="what the shards were made with, as in their recipe")
    arguments = parser.parse_args(argv)
    fetch_options(arguments, "tokenizer")
    for line in describe(arguments.folder):
        print(line)
    tokenizer = load_tokenizer(arguments.tokenizer)
    manifest = load_manifest(arguments.folder, full=False)
    manifest.require_tokenizer(tokenizer.fingerprint)
    sizes = {"rows": arguments.rows, "seq_len": arguments.seq_len, "seed": arguments.seed}
    if manifest.splits["train"].targets is None:
        for line in show_rows(manifest, tokenizer, **sizes):
            print(line)
        return 0
    console = Console(soft_wrap=True)
    for text in show_chats(manifest, tokenizer, **sizes, brackets=not console.is_terminal):
        console.print(text)
    return 0


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
            yield f"  {describe_targets(split)}"
        files = [manifest.folder / shard.file for shard in split.shards]
        lengths = np.concatenate([np.diff(open_shard(file).doc_ends, prepend=0) for file in files])
        marks = ", ".join(f"{share}% {int(np.percentile(lengths, share)):,}" for share in (1, 10, 50, 90, 99))
        yield f"  tokens per document: mean {lengths.mean():,.0f}, {marks}, longest {lengths.max():,}"
    for reason, number in manifest.dropped.items():
        yield f"skipped, {reason}: {number:,}"
    for what, number in manifest.noted.items():
        yield f"{what}: {number:,}"


def show_rows(manifest: Manifest, tokenizer: Tokenizer, *, rows: int, seq_len: int, seed: int) -> Iterator[str]:
    """Yield rows of training tokens as text, with the boundaries of documents, as a run with this seq_len reads
    them."""
    split = manifest.splits["train"]
    stream, count = TokenStream(manifest.folder, split, manifest.vocab_size), max(1, split.tokens // seq_len)
    for row in permute(np.arange(min(rows, count)), count, f"inspect {seed}").tolist():
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


def show_chats(
    manifest: Manifest, tokenizer: Tokenizer, *, rows: int, seq_len: int, seed: int, brackets: bool
) -> Iterator[Text]:
    """Yield documents of chats from the training split, their targets in colour and, with ``brackets``, in [[ ]]; of
    pairs each half.

    Args:
        rows: documents.
        seq_len: most tokens shown of each document, or half.
    """
    stream = TokenStream(manifest.folder, manifest.splits["train"], manifest.vocab_size, marked=True)
    starts = np.concatenate([[0], stream.doc_ends()])
    count = len(starts) - 1
    for number in permute(np.arange(min(rows, count)), count, f"inspect {seed}").tolist():
        tokens = np.empty(starts[number + 1] - starts[number], np.int64)
        stream.read(int(starts[number]), tokens)
        is_target = tokens < NOT_A_TARGET
        what = "pair" if manifest.is_preference else "document"
        yield Text(f"── {what} {number} of {count}: {_targets(is_target)}", "dim")
        ids = tokens & ~NOT_A_TARGET
        begins = np.flatnonzero(ids == tokenizer.special[BEGIN])[1:] if manifest.is_preference else []
        halves = zip(("chosen", "rejected"), np.split(np.arange(len(tokens)), begins), strict=False)
        for name, half in halves:
            if manifest.is_preference:
                yield Text(f"─ {name}: {_targets(is_target[half])}", "dim")
            yield _shown(ids[half], is_target[half], tokenizer, seq_len, brackets)


def _shown(ids: np.ndarray, is_target: np.ndarray, tokenizer: Tokenizer, most: int, brackets: bool) -> Text:
    """The first tokens of a document as text, see `show_chats`."""
    shown = Text()
    bounds = np.flatnonzero(np.diff(is_target[:most])) + 1
    for run in np.split(np.arange(min(len(ids), most)), bounds):
        text, learned = tokenizer.decode(ids[run]), is_target[run[0]]
        shown.append(f"[[{text}]]" if brackets and learned else text, "bold green" if learned else None)
    if len(ids) > most:
        shown.append(f"\n… {len(ids) - most} more tokens", "dim")
    return shown


def _targets(is_target: np.ndarray) -> str:
    return f"{counted(len(is_target), 'token')}, {counted(int(is_target.sum()), 'target')}"
