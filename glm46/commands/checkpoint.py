"""``python -m glm46 checkpoint``: list, verify and show checkpoints, remove old ones."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import VerbParser, positive, verb_parser
from glm46.operate.models.checkpoint_steps import list_steps, prune, show
from glm46.storage.checkpoint.store_mirror import local_folder


def checkpoint_command(argv: Sequence[str]) -> int:
    """Run the verb.

    Returns:
        Exit code: 0; 1 if a listed or verified checkpoint is incomplete or damaged.

    Raises:
        UserError: a folder is absent or holds no checkpoint, or prune would leave no complete, undamaged checkpoint.
    """
    arguments = _parser().parse_args(list(argv))
    with local_folder(arguments.folder) as arguments.folder:
        code: int = arguments.run(arguments)
        return code


def _parser() -> VerbParser:
    parser = verb_parser("checkpoint")
    kinds = parser.add_subparsers(title="what", metavar="list|verify|show|prune", required=True)
    listing = kinds.add_parser("list", help="steps, tokens, loss, size, complete or why not")
    verify = kinds.add_parser("verify", help="read every byte and compare it with the manifest")
    for parser_of, read_contents in ((listing, False), (verify, True)):
        parser_of.add_argument(
            "folder", type=Path, help="folder of a run, of its checkpoints, or of one step; or a URL"
        )
        parser_of.set_defaults(run=list_steps, read_contents=read_contents)
    showing = kinds.add_parser("show", help="meta and tensors of one checkpoint")
    showing.add_argument("folder", type=Path, help="a step folder, or a URL")
    showing.set_defaults(run=show)
    pruning = kinds.add_parser("prune", help="remove old checkpoints; only says which without --yes")
    pruning.add_argument("folder", type=Path, help="the checkpoint folder of a run that is not training now")
    pruning.add_argument("--keep-latest-k", type=positive, required=True, help="newest ones that stay")
    pruning.add_argument("--keep-every", type=positive, default=0, help="multiples of this step stay")
    pruning.add_argument("--keep-best-k", type=positive, default=0, help="lowest validation losses that stay")
    pruning.add_argument("--yes", action="store_true", help="remove them")
    pruning.set_defaults(run=prune)
    return parser
