"""``python -m glm46 inspect``: verify a folder of shards and show rows of text or documents of chats; or show the first
chats of a run before anything is made."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import integer, positive, verb_parser, whole


def inspect_command(argv: Sequence[str]) -> int:
    """Print what a folder of shards holds, or the first conversations of a run; returns the exit code.

    Raises:
        UserError: the folder is not a source, is damaged, or was made with another tokenizer; the run reads no chats.
    """
    parser = verb_parser("inspect", description="Verify a folder of shards and show its text; or show chats.")
    parser.add_argument("folder", type=Path, nargs="?", help="a folder that prepare has made")
    parser.add_argument(
        "--chat", type=Path, metavar="CONFIG_OR_FOLDER",
        help="show the first conversations of such a folder, or of the sources of a run, which need not be prepared, "
        "token by token, targets in colour",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="with --chat: write them as a page")
    parser.add_argument(
        "--rows", type=whole(0), default=2, help="rows of text, documents of chats or pairs to show, picked at random"
    )
    parser.add_argument(
        "--seq_len", type=positive, default=512, help="tokens per row; of chats, most tokens shown of a document"
    )
    parser.add_argument("--seed", type=integer, default=0, help="another one shows other rows")
    parser.add_argument("--tokenizer", default="builtin", help="what the shards were made with, as in their recipe")
    arguments = parser.parse_args(argv)
    if (arguments.folder is None) == (arguments.chat is None):
        parser.error("give a folder, or --chat CONFIG_OR_FOLDER")
    if arguments.html is not None and arguments.chat is None:
        parser.error("--html: has no effect without --chat")
    # Imported here: --help needs no numpy.
    from glm46.operate.models.inspection import show_first_chats, show_folder
    from glm46.storage.huggingface.hub import fetch_options

    fetch_options(arguments, "tokenizer")
    if arguments.chat is not None:
        show_first_chats(arguments)
    else:
        show_folder(arguments)
    return 0
