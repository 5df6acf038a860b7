"""``python -m glm46 checkpoint``: list, verify and show checkpoints, remove old ones."""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from glm46.checkpoint.folder_kind import Kind, require_kind
from glm46.checkpoint.inspection import CheckpointSummary, contents, summarise
from glm46.checkpoint.integrity import step_folder
from glm46.checkpoint.publish import Retention, remove, steps_to_remove
from glm46.commands.options import VerbParser, positive, verb_parser
from glm46.config.errors import UserError

_EXIT_DAMAGED = 1
_LONGEST_SHOWN = 200
"""Characters of a value of the meta; longer values are only counted."""


def checkpoint_command(argv: Sequence[str]) -> int:
    """Run the verb.

    Returns:
        Exit code: 0; 1 if a listed or verified checkpoint is incomplete or damaged.

    Raises:
        UserError: a folder is absent or holds no checkpoint, or prune would leave none that is complete and undamaged.
    """
    arguments = _parser().parse_args(list(argv))
    return arguments.run(arguments)


def _parser() -> VerbParser:
    parser = verb_parser("checkpoint")
    kinds = parser.add_subparsers(title="what", metavar="list|verify|show|prune", required=True)
    listing = kinds.add_parser("list", help="steps, tokens, loss, size, complete or why not")
    verify = kinds.add_parser("verify", help="read every byte and compare it with the manifest")
    for parser_of, read_contents in ((listing, False), (verify, True)):
        parser_of.add_argument("folder", type=Path, help="folder of a run, of its checkpoints, or of one step")
        parser_of.set_defaults(run=_list, read_contents=read_contents)
    show = kinds.add_parser("show", help="meta and tensors of one checkpoint")
    show.add_argument("folder", type=Path, help="a step folder")
    show.set_defaults(run=_show)
    prune = kinds.add_parser("prune", help="remove old checkpoints; only says which without --yes")
    prune.add_argument("folder", type=Path, help="the checkpoint folder of a run that is not training now")
    prune.add_argument("--keep-latest-k", type=positive, required=True, help="newest ones that stay")
    prune.add_argument("--keep-every", type=positive, default=0, help="multiples of this step stay")
    prune.add_argument("--keep-best-k", type=positive, default=0, help="lowest validation losses that stay")
    prune.add_argument("--yes", action="store_true", help="remove them")
    prune.set_defaults(run=_prune)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    summaries = summarise(arguments.folder, read_contents=arguments.read_contents)
    print(f"{'step':>10} {'saved':19} {'tokens':>18} {'val. loss':>9} {'size':>10}  state")
    for summary in summaries:
        _print_summary(summary, "verified" if arguments.read_contents else "complete")
    return _EXIT_DAMAGED if any(summary.faults for summary in summaries) else 0


def _print_summary(summary: CheckpointSummary, good: str) -> None:
    saved = "-" if summary.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved_at))
    tokens = "-" if summary.tokens is None else f"{summary.tokens:,}"
    loss = "-" if summary.validation_loss is None else f"{summary.validation_loss:.4f}"
    size = "-" if summary.bytes is None else _size(summary.bytes)
    state = "DAMAGED" if summary.faults else good if summary.is_good else f"{good}, but its last step was skipped"
    print(f"{summary.step:>10} {saved:19} {tokens:>18} {loss:>9} {size:>10}  {state}")
    for fault in summary.faults:
        print(f"{'':>10} {fault}")


def _size(count: int) -> str:
    power = min(int(math.log(count, 1024)), 5) if count else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def _show(arguments: argparse.Namespace) -> int:
    meta, tensors = contents(arguments.folder)
    for key, value in meta.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if "\n" in text or len(text) > _LONGEST_SHOWN:
            text = f"{len(text):,} characters, in {arguments.folder / 'meta.json'}"
        print(f"{key:20} {text}")
    width = max((len(tensor.name) for tensor in tensors), default=0)
    for tensor in tensors:
        shape = " x ".join(str(extent) for extent in tensor.shape) or "scalar"
        print(f"{tensor.name:{width}}  {tensor.dtype:9} {shape:24} {_size(tensor.bytes):>10}  {tensor.parts} part(s)")
    print(f"{len(tensors)} tensors, {_size(sum(tensor.bytes for tensor in tensors))}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    require_kind(arguments.folder, Kind.STEPS)
    rule = Retention(arguments.keep_latest_k, arguments.keep_every, arguments.keep_best_k)
    complete = {one.step: one for one in summarise(arguments.folder, read_contents=False) if not one.faults}
    losses = {step: one.validation_loss for step, one in complete.items()}
    removed = steps_to_remove(losses, rule, doubtful=[step for step, one in complete.items() if not one.is_good])
    if not removed:
        print("nothing to remove")
        return 0
    newest = step_folder(arguments.folder, max(complete))
    faults = summarise(newest, read_contents=True)[0].faults
    if faults:
        raise UserError(
            *faults, f"{newest}: the newest checkpoint is damaged, so no older one is removed; remove it first"
        )
    for step in removed:
        print(f"{'removed' if arguments.yes else 'would remove'} {complete[step].path} ({_size(complete[step].bytes)})")
        if arguments.yes:
            remove(complete[step].path)
    if not arguments.yes:
        print("nothing was removed; add --yes to remove them")
    return 0
