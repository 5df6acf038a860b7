"""The manifest of a prepared source: counts, tokenizer, settings, and the hashes of its shards.

``manifest.json`` is in the folder of the shards and is written last: a folder without it is not a source.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError, raise_if
from glm46.files.durable import hash_file
from glm46.storage.data.shards import SHARD_REMEDY, open_shard

FILE_NAME = "manifest.json"
FORMAT = "glm46-data-1"

# Up to this size each load checks the hash of every shard; above it only sizes, headers and counts, because reading
# terabytes at every start would take too long. `load_manifest(full=True)` checks all hashes.
_HASHED_AT_LOAD_BYTES = 2**30

_USUAL_TARGETS = (0.01, 0.95)
"""Usual range of the share of target tokens in chats. Below: prompts are long for what they teach. Above: a wrong
format may make prompts targets."""


def held_out_remedy(documents: int, held_out: float | None) -> str:
    """Return the remedy for a source without training text or without held-out text, for its current ``held_out``. The
    hash of each document decides whether it is held out, so few documents are divided by chance."""
    share = round(min(0.5, 5 / max(documents, 1)), 3)
    if documents < 2 or share == held_out:
        return "give more documents: few of them are all held out, or none, by chance"
    return f"set held_out = {share:g}, which holds out about {share * documents:.0f} of {documents:,} documents"


@dataclass(frozen=True)
class ShardEntry:
    """One shard: its file name, its counts, and the SHA-256 of the file. ``targets``: tokens to learn, for chats
    only."""

    file: str
    documents: int
    tokens: int
    text_bytes: int
    sha256: str
    targets: int | None = None


@dataclass(frozen=True)
class Split:
    """Training or validation part of a source. The order of the shards is the order of the tokens."""

    documents: int
    tokens: int
    text_bytes: int
    shards: tuple[ShardEntry, ...]
    targets: int | None = None
    """Tokens to learn, for chats; None for text, where every token except the first of each document is a label."""

    @property
    def labels(self) -> int:
        """Tokens that are labels."""
        return self.tokens - self.documents if self.targets is None else self.targets

    @staticmethod
    def from_shards(shards: "tuple[ShardEntry, ...]") -> "Split":
        """Make a split from its shards."""
        has_targets = any(shard.targets is not None for shard in shards)
        return Split(
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            text_bytes=sum(shard.text_bytes for shard in shards),
            shards=tuple(shards),
            targets=sum(shard.targets or 0 for shard in shards) if has_targets else None,
        )


@dataclass(frozen=True)
class Manifest:
    """A prepared source.

    Attributes:
        folder: folder of the shards; not part of the file.
        source: name of the source.
        tokenizer: fingerprint of the tokenizer (`Tokenizer.fingerprint`).
        vocab_size: highest token id plus one; a model needs at least as many rows.
        eos_id: the id that ends every document.
        splits: "train" and "validation".
        settings: settings of the recipe; the same settings on the same text give the same bytes.
        dropped: number of skipped documents or conversations, by reason.
        noted: other counts of chats, by description.
    """

    folder: Path
    source: str
    tokenizer: str
    vocab_size: int
    eos_id: int
    splits: dict[str, Split]
    settings: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """Format of the rows that the source was made from, see `Recipe.format`."""
        name: str = self.settings.get("format", "text")
        return name

    def require_tokenizer(self, fingerprint: str) -> None:
        """Raise UserError unless the shards were made with the tokenizer of this fingerprint."""
        if fingerprint != self.tokenizer:
            raise UserError(
                f"{self.folder}: its tokens were made with another tokenizer ({self.tokenizer[:12]}…) than "
                f"model.tokenizer_path names ({fingerprint[:12]}…); set that tokenizer, or prepare the source again"
            )


def describe_targets(split: Split) -> str:
    """Describe the share of targets in a split of chats, with a warning if it is unusual."""
    share = split.labels / split.tokens
    low, high = _USUAL_TARGETS
    unusual = "" if low <= share <= high else f"; warning: outside {low:.0%} to {high:.0%}, look at them with inspect"
    return f"targets: {split.labels:,} of {split.tokens:,} tokens, {share:.1%}{unusual}"


def load_manifest(folder: Path, *, full: bool | None = None) -> Manifest:
    """Read a manifest and verify that its shards exist and have the listed size, counts and tokenizer.

    Args:
        folder: a folder made by ``python -m glm46 prepare``.
        full: also check the hash of each shard. None checks the hashes only if the source is small. Shards that are
            read by range from a store are not hashed: each block is compared when it is read.

    Raises:
        UserError: all faults, each with its file.
    """
    folder = Path(folder)
    manifest = _parse(folder)
    if full is None:
        token_bytes = 4 * sum(split.tokens for split in manifest.splits.values())
        full = token_bytes <= _HASHED_AT_LOAD_BYTES
    faults: list[str] = []
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        try:
            opened = open_shard(folder / shard.file)
        except UserError as error:
            faults += error.faults
            continue
        targets = opened.metadata.get("targets", "None")
        if (len(opened.tokens), len(opened.doc_ends), targets) != (shard.tokens, shard.documents, str(shard.targets)):
            faults.append(
                f"{folder / shard.file}: holds {len(opened.tokens)} tokens in {len(opened.doc_ends)} documents, "
                f"targets {targets}, where the manifest says {shard.tokens} in {shard.documents}, targets "
                f"{shard.targets}; {SHARD_REMEDY}"
            )
        elif opened.metadata.get("tokenizer") != manifest.tokenizer:
            faults.append(f"{folder / shard.file}: made with another tokenizer than its manifest says; {SHARD_REMEDY}")
        elif full and not (folder / shard.file).is_symlink() and hash_file(folder / shard.file).sha256 != shard.sha256:
            faults.append(f"{folder / shard.file}: was changed (SHA-256 differs); {SHARD_REMEDY}")
    raise_if(faults)
    return manifest


def _parse(folder: Path) -> Manifest:
    file = folder / FILE_NAME
    if not file.is_file():
        if folder.is_dir():
            state = f"no {FILE_NAME} in it"
        else:
            state = "a file, not a folder of shards" if folder.is_file() else "no such folder"
        raise UserError(
            f"{folder}: {state}; make it with 'python -m glm46 prepare' and the config of the run, or correct the path"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        format_name = content.pop("format", None)
        if format_name != FORMAT:
            raise UserError(f"{file}: format {format_name!r}, this version reads {FORMAT!r}; prepare the source again")
        splits = {
            name: Split(**{**split, "shards": tuple(ShardEntry(**shard) for shard in split["shards"])})
            for name, split in content.pop("splits").items()
        }
        manifest = Manifest(folder=folder, splits=splits, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not a manifest ({type(error).__name__}: {error}); {SHARD_REMEDY}") from error
    for name, split in splits.items():
        if split != Split.from_shards(split.shards):
            raise UserError(f"{file}: the totals of split {name} are not the sums over its shards; {SHARD_REMEDY}")
    return manifest
