#!/usr/bin/env python3
"""Train a byte-level BPE vocabulary for GLM's pattern and write it as a .tiktoken rank file.

    python scripts/train_tokenizer.py --ranks 8156 --output vocabulary.tiktoken FOLDER_OR_FILE ...

Of folders, .py, .txt, .rst and .md files are read. Loading the file adds GLM's 36 special tokens after the ranks, so
--ranks is the size of the vocabulary minus 36. Needs tokenizers: pip install 'glm46[hf]'
"""

import argparse
import base64
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glm46.storage.data.tokenizer_hf import GLM_PATTERN, byte_characters

SUFFIXES = {".py", ".txt", ".rst", ".md"}


def texts(paths: list[Path]):
    """Yield the text of every file in sorted order. Files that are not UTF-8 are skipped."""
    for path in paths:
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                print(f"skipped, not UTF-8: {file}")


def train(paths: list[Path], count: int) -> list[bytes]:
    """Train a BPE; return the bytes of its `count` tokens by rank, the 256 single bytes first."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(GLM_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts(paths), trainers.BpeTrainer(vocab_size=count, initial_alphabet=alphabet))
    byte = {character: byte for byte, character in byte_characters().items()}
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    return [bytes(byte[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="number of tokens, including the 256 bytes")
    parser.add_argument("--output", type=Path, required=True, help="the .tiktoken file to write")
    parser.add_argument("paths", type=Path, nargs="+", help="text to train on")
    arguments = parser.parse_args()
    if arguments.ranks < 256:
        parser.error(f"--ranks {arguments.ranks}: must be at least 256, one per byte")
    if missing := [path for path in arguments.paths if not path.exists()]:
        parser.error(f"{missing[0]}: file or folder not found; correct the path")
    try:
        tokens = train(arguments.paths, arguments.ranks)
    except ImportError:
        parser.error("tokenizers is not installed; pip install 'glm46[hf]'")
    arguments.output.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)))
    print(f"wrote {len(tokens)} ranks to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
