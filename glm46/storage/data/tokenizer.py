"""Tokenizer: text to token ids and back through tiktoken, with the same ids as GLM's own tokenizer.

Three kinds of file are read: the shipped vocabulary, a ``.tiktoken`` rank file (base64 bytes and rank per line), and a
Hugging Face ``tokenizer.json``. Special tokens are added by id only: a literal ``<think>`` in a text is encoded as
ordinary characters.
"""

import base64
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from glm46.config.errors import UserError
from glm46.storage.data.tokenizer_hf import GLM_PATTERN, GPT2_PATTERN, read_tokenizer_json

BUILTIN_PATH = Path(__file__).with_name("builtin_8k.tiktoken")

END_OF_TEXT = "<|endoftext|>"

TOKENIZER_KEY = "tokenizer"
"""Key of a checkpoint's meta that holds the fingerprint of its run's tokenizer."""

# Added tokens of GLM-4.5 and 4.6 in the order of their ids. Source: tokenizer.json of the releases.
GLM_SPECIAL_TOKENS = (
    END_OF_TEXT,
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)

GLM_CONTROL_TOKENS = frozenset(GLM_SPECIAL_TOKENS[: GLM_SPECIAL_TOKENS.index("<|end_of_transcription|>") + 1])
"""GLM marks its first added tokens as special, so that decoding can skip them; the later ones are kept as text."""

# Longer runs of white space are cut out of the text before the regex: fancy-regex keeps one stack entry per character
# of a run and panics near a million. A tenth of the longest run that worked.
_MAX_RUN = 10_000

# Unicode White_Space, the meaning of \s in the pattern. Python's own \s has four more control characters.
_WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
# The lower bound keeps the search linear: a shorter run is rejected after that many steps.
_RUN = re.compile(_WHITE_SPACE + "{64,}")
_LEADING_NEWLINES = re.compile("[\r\n]+")

_UNKNOWN_ID = "\ufffd".encode()


class Tokenizer:
    """A byte-pair vocabulary with its special tokens.

    Attributes:
        path: argument of `load_tokenizer`; another process loads the same tokenizer from it.
        pattern: regular expression that cuts text into the pieces that are merged.
        ranks: id of every ordinary token by its bytes; lower ids are merged first.
        longest_token: bytes of the longest ordinary token.
        vocab_size: highest id plus one. A model may have more embedding rows, not fewer.
        special: id of every special token by its name.
        control_ids: ids of the special tokens that are not part of a text: transformers skips them on request.
        eos_id: id of ``<|endoftext|>``, which ends every document.
        prefix_space: whether a space is added before text that does not begin with one.
        flavor: preset of the model that reads its ids, if known; it gives the chat format if the tokenizer's folder has
            no template.
        fingerprint: SHA-256 in hex of pattern, ranks and special tokens. Equal fingerprints give equal ids.
    """

    def __init__(
        self,
        path: str,
        pattern: str,
        ranks: dict[bytes, int],
        special: dict[str, int],
        control: Collection[str] = GLM_CONTROL_TOKENS,
        prefix_space: bool = False,
    ):
        self.path = path
        self.pattern = pattern
        self.ranks = ranks
        self.prefix_space = prefix_space
        self.flavor = ""
        self.special = dict(special)
        self.control_ids = frozenset(token_id for name, token_id in special.items() if name in control)
        self._names = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})")
        self.eos_id = special[END_OF_TEXT]
        self.longest_token = max(map(len, ranks))
        self.vocab_size = max(max(ranks.values()), max(special.values())) + 1
        self.fingerprint = _fingerprint(pattern, ranks, special, prefix_space)
        self._encoding = tiktoken.Encoding("glm46", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        # Encodes its text as one piece: for long runs of white space, on which the pattern overflows the stack.
        self._whole = tiktoken.Encoding("glm46-whole", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={})
        self._bytes_by_id: list[bytes] = [_UNKNOWN_ID] * self.vocab_size
        for piece, rank in ranks.items():
            self._bytes_by_id[rank] = piece
        for name, token_id in special.items():
            self._bytes_by_id[token_id] = name.encode()

    def encode(self, text: str) -> np.ndarray:
        """Encode ordinary text, uint32 [tokens]. The result never holds special tokens.

        Lone surrogates, which UTF-8 cannot hold, become U+FFFD as in tiktoken.
        """
        if self.prefix_space and text and text[0] != " ":
            text = " " + text
        if len(text) < _MAX_RUN:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        parts = [
            (self._whole if whole else self._encoding).encode_to_numpy(piece, disallowed_special=())
            for piece, whole in _split_long_runs(text, self.pattern)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode_with_special(self, text: str) -> np.ndarray:
        """Encode text like `encode`, but turn the name of a special token into that token, as transformers does."""
        parts = [part for part in self._names.split(text) if part]
        ids = [[self.special[part]] if part in self.special else self.encode(part) for part in parts]
        return np.concatenate([np.empty(0, np.uint32), *ids]).astype(np.uint32, copy=False)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids, a sequence or array of integers. Ids without a token and invalid UTF-8 become U+FFFD."""
        bytes_by_id = self._bytes_by_id
        size = self.vocab_size
        if not isinstance(ids, list):
            ids = np.asarray(ids, dtype=np.int64).ravel().tolist()
        return b"".join(bytes_by_id[i] if 0 <= i < size else _UNKNOWN_ID for i in ids).decode("utf-8", "replace")

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes of each id, int64 [vocab_size]; 0 for special tokens and ids without a token.

        Bits per byte = loss in nats summed over targets / ln 2 / these bytes summed over the same targets.
        """
        lengths = np.array([0 if piece is _UNKNOWN_ID else len(piece) for piece in self._bytes_by_id], dtype=np.int64)
        lengths[list(self.special.values())] = 0
        return lengths


def load_tokenizer(path: str, flavor: str = "") -> Tokenizer:
    """Load ``"builtin"``, a ``.tiktoken`` rank file, or a Hugging Face ``tokenizer.json`` (or its folder), for a model
    of this flavor.

    A rank file holds neither pattern nor special tokens: GLM's pattern is used, and GLM's special tokens follow the
    highest rank in GLM's order, as in GLM-4's own tokenizer.

    Raises:
        UserError: the file is missing or damaged, or tiktoken cannot represent it exactly.
    """
    file = tokenizer_file(path)
    if not file.is_file():
        raise UserError(
            f"tokenizer '{path}': {'' if str(file) == path else f'{file}: '}no such file; give the model's own "
            "tokenizer.json by model.tokenizer_path or --tokenizer (on the hub that of zai-org/GLM-4.5-Air, for "
            "example), or for a new model 'builtin' or a .tiktoken file"
        )
    if file.suffix != ".json":
        ranks = read_rank_file(file)
        special = {name: len(ranks) + i for i, name in enumerate(GLM_SPECIAL_TOKENS)}
        tokenizer = Tokenizer(path, GLM_PATTERN, ranks, special)
    else:
        content = read_tokenizer_json(file)
        if END_OF_TEXT not in content.special:
            fault = f"no added token {END_OF_TEXT}, which ends every document; add it to the special ones"
            raise UserError(f"{file}: {fault}")
        tokenizer = Tokenizer(path, *content)
    tokenizer.flavor = flavor
    return tokenizer


def tokenizer_file(path: str) -> Path:
    """Return the file of a tokenizer path: the shipped one, the file itself, or the ``tokenizer.json`` of a folder."""
    file = BUILTIN_PATH if path == "builtin" else Path(path)
    return file / "tokenizer.json" if file.is_dir() else file


def read_rank_file(file: Path) -> dict[bytes, int]:
    """Read a ``.tiktoken`` file: rank by token bytes. Raises UserError if a line is not ``base64 rank``, the ranks are
    not 0, 1, 2 ..., or a byte has no token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{file} line {number}: expected 'base64 rank', got {line[:60]!r}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{file}: ranks are not 0 to {len(ranks) - 1}, each once; the file is damaged")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{file}: no token for byte {missing[0]} and {len(missing) - 1} more, so text has no encoding")
    return ranks


def _split_long_runs(text: str, pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield (piece, whole). Cuts are only where the pattern always ends a match, so the tokens do not change.

    The pattern matches a run of white space as follows: punctuation before it takes the newlines that follow directly;
    ``\\s*[\\r\\n]+`` takes everything up to the last newline; ``\\s+(?!\\S)`` takes the rest, except the last character
    if a non-space follows. GPT-2's pattern has only the last of these rules.
    """
    position = 0
    has_newline_rules = pattern != GPT2_PATTERN
    for run in _RUN.finditer(text):
        start, end = run.span()
        if end - start <= _MAX_RUN:
            continue
        before = text[start - 1] if start else "a"  # at the start there is no punctuation either
        if has_newline_rules and not before.isalnum() and (newlines := _LEADING_NEWLINES.match(text, start, end)):
            start = newlines.end()
        last_newline = max(text.rfind("\n", start, end), text.rfind("\r", start, end))
        middle = last_newline + 1 if has_newline_rules and last_newline >= 0 else start
        # The last character belongs to the non-space after the run, or is a piece of its own.
        stop = end if end == len(text) else max(end - 1, middle)
        if position < start:
            yield text[position:start], False
        if start < middle:
            yield text[start:middle], True
        if middle < stop:
            yield text[middle:stop], True
        position = stop
    if position < len(text):
        yield text[position:], False


def _fingerprint(pattern: str, ranks: dict[bytes, int], special: dict[str, int], prefix_space: bool) -> str:
    digest = hashlib.sha256()
    for part in (pattern.encode(), *sorted(ranks, key=ranks.__getitem__)):
        digest.update(len(part).to_bytes(4, "little") + part)
    for name, token_id in sorted(special.items(), key=lambda item: item[1]):
        digest.update(f"\0{token_id} {name}".encode())
    ids = sorted(ranks.values())
    # Only where they are unusual: most fingerprints are older than these two facts.
    if prefix_space or ids != list(range(len(ids))):
        digest.update(f"\0{prefix_space} {ids}".encode())
    return digest.hexdigest()
