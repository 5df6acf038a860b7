"""``python -m glm46 inspect``: verify a folder of shards and show rows of text or documents of chats."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import positive, verb_parser, whole


def inspect_command(argv: Sequence[str]) -> int:
    """Print the contents of a folder of shards; returns the exit code.

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
    parser.add_argument("--tokenizer", default="builtin", help="what the shards were made with, as in their recipe")
    arguments = parser.parse_args(argv)
    from glm46.operate.models.inspection import show_folder  # numpy: --help needs none

    show_folder(arguments)
    return 0
