"""Train a byte-pair vocabulary for GLM's pattern and write it as a .tiktoken rank file.

Made glm46/data/builtin_8k.tiktoken (see builtin_8k.NOTICE.txt beside it). Needs ``pip install rustbpe``.

    python scripts/train_tokenizer.py --ranks 8156 --output vocabulary.tiktoken FOLDER_OR_FILE ...

Folders are searched for .py, .txt, .rst and .md files. The 36 special tokens of GLM follow the ranks when the file is
loaded, so ask for 36 fewer than the vocabulary is to have.
"""

import argparse
import base64
from pathlib import Path

import rustbpe

from glm46.data.tokenizer_hf import GLM_PATTERN

SUFFIXES = {".py", ".txt", ".rst", ".md"}


def texts(paths: list[Path]):
    """Yield the text of every file in sorted order; what is not UTF-8 is passed over."""
    for path in paths:
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                print(f"passed over, not UTF-8: {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="tokens to learn, the 256 bytes included")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("paths", type=Path, nargs="+")
    arguments = parser.parse_args()

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts(arguments.paths), vocab_size=arguments.ranks, pattern=GLM_PATTERN)
    ranks = sorted((rank, bytes(token)) for token, rank in trainer.get_mergeable_ranks())
    arguments.output.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in ranks))
    print(f"wrote {len(ranks)} ranks to {arguments.output}")


if __name__ == "__main__":
    main()
