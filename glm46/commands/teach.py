"""``python -m glm46 teach``: store what a teacher says of the prepared chats of a run."""

from collections.abc import Sequence

from glm46.operate.launch.config_options import config_parser, load_fetched, parse_with_overrides
from glm46.operate.launch.ranks import add_model_options, start_ranks


def teach_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: the config asks for no stored values, the data is not prepared, or the teacher is of another family.
    """
    parser = config_parser("teach")
    parser.epilog = f"The same command goes on after a stop. {parser.epilog}"
    add_model_options(parser).add_argument(
        "--server", action="append", metavar="URL", help="running server of the teacher; again for more of the same"
    )
    parser.add_argument("--kind", choices=["vllm", "sglang"], default="vllm", help="of --server; default: vllm")
    arguments, overrides = parse_with_overrides(parser, argv)
    # Imported here: --help needs no torch.
    from glm46.operate.models.loaded_model import joined
    from glm46.operate.models.teach_ranks import teach
    from glm46.storage.huggingface.hub import fetch_options, with_folders

    folders = fetch_options(arguments, "model", "adapter", "tokenizer")
    if (code := start_ranks("teach", with_folders(argv, folders), arguments)) is not None:
        return code
    with joined():
        teach(arguments, load_fetched(arguments.config, overrides, world_size=None))
    return 0
