"""The parallel half of preparing text: one part of the input to one file of tokens with what is known per document."""

import hashlib
import json
from pathlib import Path

import numpy as np

from glm46.data.readers import BadDocument, Part, read_part
from glm46.data.shards import map_tensors, write_tensors
from glm46.data.tokenizer import Tokenizer, load_tokenizer

# Places shown per reason in the report on what was dropped.
_SAMPLES = 3

_tokenizer: Tokenizer | None = None


def start_worker(tokenizer_path: str) -> None:
    """Load the tokenizer once per process."""
    global _tokenizer
    _tokenizer = load_tokenizer(tokenizer_path)


def make_part(part: Part, file: Path, key: str) -> int:
    """Write the tokens of a part unless they are there; returns the bytes of input it stands for.

    The file holds, per document: ``doc_ends`` I64, ``text_bytes`` I64, ``hashes`` U64 [d, 2] of its text, and the
    ``tokens`` U32 of all, each document with its end token. Its metadata holds ``key`` and what was dropped.
    """
    if file.exists() and map_tensors(file)[1].get("key") == key:
        return part.size_bytes
    tokens, lengths, text_bytes, hashes = [], [], [], []
    dropped: dict[str, list] = {}
    end = np.array([_tokenizer.eos_id], dtype=np.uint32)
    for document in read_part(part):
        if isinstance(document, BadDocument):
            reason, place = document.args
            entry = dropped.setdefault(reason, [0, []])
            entry[0] += 1
            entry[1] = (entry[1] + [place])[:_SAMPLES]
            continue
        encoded = document.text.encode()
        ids = _tokenizer.encode(document.text)
        tokens += [ids, end]
        lengths.append(len(ids) + 1)
        text_bytes.append(len(encoded))
        hashes.append(hashlib.blake2b(encoded, digest_size=16).digest())
    tensors = {
        "doc_ends": np.cumsum(np.array(lengths, np.int64)),
        "text_bytes": np.array(text_bytes, np.int64),
        "hashes": np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2),
        "tokens": np.concatenate([np.empty(0, np.uint32), *tokens]),
    }
    write_tensors(file, tensors, {"key": key, "dropped": json.dumps(dropped)})
    return part.size_bytes
