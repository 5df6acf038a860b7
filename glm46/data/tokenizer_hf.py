"""A Hugging Face ``tokenizer.json`` as tiktoken ranks: exactly, or refused with the reason.

tiktoken merges any adjacent pair whose concatenation is a token, lowest rank first. A Hugging Face BPE merges listed
pairs in listed order. The two agree when ids, ranks and merge order are one sequence and when every token can be built
by its own listed pair, which is what tokenizers converted from tiktoken (GLM, Qwen) satisfy.
"""

import json
from pathlib import Path

from glm46.config.errors import UserError

# GLM-4, 4.5 and 4.6 (and Llama 3). Source: tokenization_chatglm.py of GLM-4-9B.
GLM_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen 2 and 3: the same with single digits. Only patterns whose two regex engines were shown to agree are accepted.
_QWEN_PATTERN = GLM_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def read_tokenizer_json(file: Path) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """Pattern, rank by token bytes, and id by special token name.

    Raises:
        UserError: the file is not JSON, or tiktoken would not give the same ids for every text.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        model = content["model"]
        vocabulary, merges = model["vocab"], model["merges"]
        pattern = _pattern(content["pre_tokenizer"])
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: no byte-level BPE tokenizer.json ({type(error).__name__}: {error})") from error

    def require(holds: bool, reason: str) -> None:
        if not holds:
            raise UserError(f"{file}: cannot be used exactly: {reason}")

    require(model.get("type", "BPE") == "BPE", f"the model is {model.get('type')}, not BPE")
    require(content.get("normalizer") is None, "it normalises text before encoding")
    require(not model.get("byte_fallback") and model.get("dropout") is None, "byte_fallback or dropout is set")
    require(not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix"), "it marks subwords")
    require(pattern in (GLM_PATTERN, _QWEN_PATTERN), f"pre-tokenizer {pattern!r} is not that of GLM (or Qwen)")
    to_byte = {character: byte for byte, character in byte_characters().items()}
    require(all(c in to_byte for token in vocabulary for c in token), "a token holds characters outside byte level")

    def token_bytes(token: str) -> bytes:
        return bytes(to_byte[c] for c in token)

    # A converted vocabulary may hold the special tokens too; they are never the result of merging text.
    ranks = {token_bytes(token): rank for token, rank in vocabulary.items() if token not in special}
    require(sorted(ranks.values()) == list(range(len(ranks))), "ids of ordinary tokens are not 0, 1, 2 ...")
    require(all(bytes([byte]) in ranks for byte in range(256)), "some bytes have no token")
    require(all(token_id >= len(ranks) for token_id in special.values()), "an added token has the id of text")
    require(len(set(special.values())) == len(special), "two added tokens share an id")
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
    require(all(a + b in vocabulary for a, b in pairs), "a merge makes a token that is not in the vocabulary")
    merged_ids = [vocabulary[a + b] for a, b in pairs]
    require(all(a <= b for a, b in zip(merged_ids, merged_ids[1:], strict=False)), "merge order differs from id order")
    listed = {(token_bytes(a), token_bytes(b)) for a, b in pairs}
    for token, rank in ranks.items():
        if len(token) > 1:
            split = parts_below(ranks, token, rank)
            require(len(split) == 2 and split in listed, f"token {rank} ({token!r}) is not built by a listed merge")
    return pattern, ranks, special


def _pattern(pre_tokenizer: dict) -> str:
    """The regex of Sequence[Split(Regex, Isolated), ByteLevel(no prefix space, no regex)]; ValueError for any other."""
    split, byte_level = pre_tokenizer["pretokenizers"]
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split.get("invert"):
        raise ValueError("the first pre-tokenizer is not one isolated Split")
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"] or byte_level["use_regex"]:
        raise ValueError("the second pre-tokenizer is not a plain ByteLevel")
    return split["pattern"]["Regex"]


def parts_below(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, ...]:
    """The parts of a token when only merges of a rank below ``limit`` are made, lowest rank first."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        candidates = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(candidates)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
