"""Convert a Hugging Face ``tokenizer.json`` to tiktoken ranks, exactly or with an error.

tiktoken merges any adjacent pair whose concatenation is a token, lowest rank first. A Hugging Face BPE merges listed
pairs in listed order. The two agree if the ids are in the order of the merges and every token is built by its own
listed pair. This holds for tokenizers converted from tiktoken (GLM, Qwen) and for trained byte-level BPEs, whatever the
ids of the special tokens are.
"""

from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.files.file_content import read_json_object

# GLM-4, 4.5 and 4.6 (and Llama 3). Source: tokenization_chatglm.py of GLM-4-9B.
GLM_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2, and ByteLevel where it is the only pre-tokenizer. Source: pre_tokenizers/byte_level.rs of tokenizers.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Only patterns on which the two regex engines were tested to agree. Qwen 2 and 3: GLM's with single digits.
_PATTERNS = (GLM_PATTERN, GLM_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"), GPT2_PATTERN)

_MAX_ID = 1 << 24
"""Exclusive upper bound of ids, above any real vocabulary: a table of this size still fits in memory."""


class TokenizerJson(NamedTuple):
    """The content of a ``tokenizer.json`` that tiktoken needs."""

    pattern: str
    ranks: dict[bytes, int]
    """Id by the bytes of each ordinary token, in the order of the ids."""
    special: dict[str, int]
    """Id by name of each added token."""
    control: frozenset[str]
    """Names of the added tokens that are marked as special."""
    prefix_space: bool
    """True if a space is added before text that does not begin with one."""


def read_tokenizer_json(file: Path) -> TokenizerJson:
    """Read a ``tokenizer.json``. Raises UserError if the file is damaged, or tiktoken would not give the same ids for
    every text."""
    content = read_json_object(file, "copy it anew")
    try:
        return _read(content)
    except _NotRepresentable as error:
        raise UserError(f"{file}: cannot be used exactly: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: damaged tokenizer.json ({type(error).__name__}: {error})") from error


class _NotRepresentable(Exception):
    """The reason why tiktoken would not give the same ids."""


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _NotRepresentable(reason)


def _read(content: dict[str, Any]) -> TokenizerJson:
    model = content["model"]
    kind = model.get("type", "BPE")
    # tiktoken merges bytes by rank. WordPiece takes the longest piece from the left, Unigram the most probable pieces;
    # each would need another encoder and decoder.
    _require(
        kind == "BPE",
        f"its model is {kind}, which is not a list of byte merges; train a byte-level BPE on the same text "
        "(scripts/train_tokenizer.py, or BpeTrainer of tokenizers)",
    )
    _require(content.get("normalizer") is None, "it normalises text before encoding; remove its normalizer")
    _require(not model.get("byte_fallback"), "byte_fallback is set: its tokens are characters, not bytes")
    _require(model.get("dropout") is None, "dropout is set; remove it")
    _require(not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix"), "it marks subwords")
    pattern, prefix_space = _pre_tokenizer(content.get("pre_tokenizer"))
    added = content.get("added_tokens") or ()
    special = {token["content"]: token["id"] for token in added}
    control = frozenset(token["content"] for token in added if token.get("special"))
    _require(all(name.strip() for name in special), "an added token is white space, which occurs in text")
    # A vocabulary may also hold the added tokens, which merging never produces.
    vocabulary = {token: token_id for token, token_id in model["vocab"].items() if token not in special}
    ids = [*vocabulary.values(), *special.values()]
    _require(all(type(i) is int and 0 <= i < _MAX_ID for i in ids), f"an id is not in 0 to {_MAX_ID - 1}")
    _require(len(set(ids)) == len(ids), "two tokens share an id")
    return TokenizerJson(pattern, _ranks(vocabulary, model["merges"]), special, control, prefix_space)


def _ranks(vocabulary: dict[str, int], merges: list[str | list[str]]) -> dict[bytes, int]:
    """Return ids by token bytes, after checking that merging by id equals merging by the list."""
    to_byte = {character: byte for byte, character in byte_characters().items()}
    _require(all(c in to_byte for token in vocabulary for c in token), "a token holds characters outside byte level")

    def token_bytes(token: str) -> bytes:
        return bytes(to_byte[c] for c in token)

    ranks = {token_bytes(token): rank for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])}
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    _require(
        not missing,
        f"{len(missing)} bytes have no token, such as {missing[:1]}; train it with "
        "initial_alphabet = ByteLevel.alphabet()",
    )
    # Older files hold each pair as one string.
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
    _require(all(a + b in vocabulary for a, b in pairs), "a merge makes a token that is not in the vocabulary")
    merged_ids = [vocabulary[a + b] for a, b in pairs]
    _require(all(a <= b for a, b in zip(merged_ids, merged_ids[1:], strict=False)), "merge order differs from id order")
    listed = {(token_bytes(a), token_bytes(b)) for a, b in pairs}
    for token, rank in ranks.items():
        if len(token) > 1:
            split = parts_below(ranks, token, rank)
            _require(len(split) == 2 and split in listed, f"token {rank} ({token!r}) is not built by a listed merge")
    return ranks


def _pre_tokenizer(pre_tokenizer: dict[str, Any] | None) -> tuple[str, bool]:
    """Return the regex, and whether a space is added before the text. Only forms that cut text equally are accepted."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    kinds = [step["type"] for step in steps]
    _require(
        kinds in (["ByteLevel"], ["Split", "ByteLevel"]),
        f"its pre-tokenizer is {' + '.join(kinds) or 'absent'}; it must be ByteLevel, or a Split and ByteLevel",
    )
    # A key that an older file lacks has the default value of tokenizers.
    own_regex = steps[-1].get("use_regex", True)
    prefix_space = steps[-1].get("add_prefix_space", True)
    if len(steps) == 1:
        _require(own_regex, "its pre-tokenizer does not cut text into words (use_regex is false)")
        return GPT2_PATTERN, prefix_space
    _require(not own_regex and not prefix_space, "its ByteLevel cuts again (use_regex) or adds a space after a Split")
    split = steps[0]
    _require(split["behavior"] == "Isolated" and not split.get("invert"), "its Split is not Isolated, or inverted")
    pattern = split["pattern"].get("Regex")
    _require(pattern in _PATTERNS, f"its Split has the pattern {pattern!r}, which is not that of GLM, Qwen or GPT-2")
    return pattern, False


def parts_below(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, ...]:
    """Return the parts of a token after all merges with a rank below ``limit``, lowest rank first."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        candidates = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(candidates)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


def byte_characters() -> dict[int, str]:
    """Return the printable character of each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
