"""``python -m glm46 inspect``: verify a folder of shards and show rows of it as text."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm46.data.inspect_source import describe, show_rows
from glm46.data.manifest import load_manifest
from glm46.data.tokenizer import load_tokenizer


def inspect_command(argv: Sequence[str]) -> int:
    """Print what a folder of shards holds; returns the exit code.

    Raises:
        UserError: the folder is not a source, is damaged, or was made with another tokenizer.
    """
    parser = argparse.ArgumentParser(
        prog="python -m glm46 inspect", allow_abbrev=False, description="Verify a folder of shards and show its text.",
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="a folder that prepare has made")
    parser.add_argument("--rows", type=int, default=2, help="rows to show as text, picked at random")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens per row")
    parser.add_argument("--seed", type=int, default=0, help="another one shows other rows")
    parser.add_argument("--tokenizer", default="builtin", help="what the shards were made with")
    arguments = parser.parse_args(argv)
    for line in describe(arguments.folder):
        print(line)
    tokenizer = load_tokenizer(arguments.tokenizer)
    manifest = load_manifest(arguments.folder, full=False)
    sizes = {"rows": max(0, arguments.rows), "seq_len": max(1, arguments.seq_len), "seed": arguments.seed}
    for line in show_rows(manifest, tokenizer, **sizes):
        print(line)
    return 0
