"""``python -m glm46 evaluate``: loss, loss by position and needle in a haystack of a checkpoint or a folder."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tomli

from glm46.checkpoint.integrity import META
from glm46.commands.model_options import add_model_options, load_model
from glm46.commands.options import VerbParser, positive, verb_parser
from glm46.commands.ranks import joined, on_all_ranks, start_ranks
from glm46.config.errors import UserError
from glm46.config.faults import nearest
from glm46.config.validation import validate_table
from glm46.data.manifest import Manifest, load_manifest
from glm46.data.tokenizer import Tokenizer
from glm46.evaluation.loss import Loss
from glm46.evaluation.needle import Needle
from glm46.evaluation.position import Position
from glm46.evaluation.report import draw, table
from glm46.evaluation.results import Results, measure_rows
from glm46.evaluation.rows import TASKS, Measure
from glm46.files.progress import tokens_progress
from glm46.inference.loading import Loaded
from glm46.planner.curriculum import plan_stages

_LENGTHS = (1024, 2048, 4096)
"""Of a model whose training is unknown."""
_RESULTS, _PICTURE = "evaluation.json", "evaluation.png"


class _Training(NamedTuple):
    """What is known of the training of the model."""

    window: int | None = None
    """Longest sequence so far."""
    seq_len: int | None = None
    """Of its validation."""
    document_mask: bool = False
    sources: Mapping[str, Path] = MappingProxyType({})


def evaluate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is out of range, a folder cannot be used, or the text has no rows of these lengths.
    """
    arguments = _parser().parse_args(list(argv))
    sources = _stated_sources(arguments)
    code = start_ranks("evaluate", argv, arguments)
    if code is not None:
        return code
    with joined():
        _evaluate(arguments, sources)
    return 0


def _evaluate(arguments: argparse.Namespace, sources: dict[str, Path]) -> None:
    """Evaluate on this rank. Collective."""
    work = on_all_ranks(lambda: _read(arguments, sources))
    is_first, results, training = work.loaded.mesh.rank == 0, work.results, work.training
    if work.loaded.mesh.layout.world_size > 1:
        results.share()
    total = sum(row.length for measure in work.measures.values() for row in results.missing(measure))
    found: dict[str, Any] = {}
    try:
        with (
            tokens_progress("evaluating", total, partial(print, file=sys.stderr))
            if is_first
            else nullcontext(lambda _: None)
        ) as advance:
            for task, measure in work.measures.items():
                found[task] = measure_rows(work.loaded, measure, results, training.document_mask, advance)
    finally:
        results.save(found)
    if not is_first:
        return
    for task, result in found.items():
        print("\n".join(table(task, result, training.window)), end="\n\n")
    _show(arguments, found, training.window)


class _Work(NamedTuple):
    """What is to be computed."""

    loaded: Loaded
    training: _Training
    measures: dict[str, Measure]
    results: Results
    """With a file on rank 0."""


def _read(arguments: argparse.Namespace, sources: dict[str, Path]) -> _Work:
    """The model, the measures and earlier results. Collective."""
    loaded = load_model(arguments, drafts=False)
    model, tokenizer, mesh = loaded
    training = _training(arguments.checkpoint)
    try:
        manifests = {name: load_manifest(folder) for name, folder in (sources or training.sources).items()}
    except UserError as error:
        raise error if sources else UserError(*(f"{fault}; or give --data" for fault in error.faults)) from error
    for manifest in manifests.values():
        manifest.require_tokenizer(tokenizer.fingerprint)
    lengths = _lengths(arguments.lengths, training.window, model.shape.max_position_embeddings)
    measures = _measures(arguments, manifests, tokenizer, training, lengths)
    text = [tokenizer.fingerprint, training.document_mask, *map(_held_out_hashes, manifests.values())]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    identity = {"text": _digest(text), "dtype": dtype}
    return _Work(loaded, training, measures, _open_results(arguments, identity, keeps=mesh.rank == 0))


def _parser() -> VerbParser:
    parser = verb_parser(
        "evaluate",
        description="Measures a model on held-out text: its loss, its loss by position in long documents, and whether "
        "it finds a sentence in long text.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--tasks", type=_tasks, default=TASKS, metavar="NAMES", help=f"with commas, of {','.join(TASKS)}; default: all"
    )
    parser.add_argument(
        "--data", type=Path, action="append", default=[], metavar="FOLDER",
        help="a source that prepare has made; again for more; default: the sources of the checkpoint's config",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=_list_of(positive), metavar="N,N,…",
        help="tokens of a row; default: once, twice and four times the training.seq_len of the checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--depths", type=_list_of(_share), default=(0.0, 0.25, 0.5, 0.75, 1.0), metavar="X,X,…",
        help="places of the needle, from 0, the begin of the text, to 1; default: 0,0.25,0.5,0.75,1",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=positive, default=32, metavar="N",
        help="most rows of each source (loss), documents (position), and rows of each length and depth (needle); "
        "default: 32",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="another one takes other documents and needles")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER",
        help=f"write {_RESULTS} and {_PICTURE}; a call with the same folder computes only what is missing",
    )  # fmt: skip
    return parser


def _tasks(text: str) -> tuple[str, ...]:
    for name in text.split(","):
        if name not in TASKS:
            near = nearest(name, TASKS, 0.5)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(TASKS)}"
            raise argparse.ArgumentTypeError(f"{name!r}: unknown task; {hint}")
    return tuple(dict.fromkeys(text.split(",")))


def _list_of(one: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Type of an option: values with commas between them."""
    return lambda text: tuple(one(part) for part in text.split(","))


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0.0 <= float(text) <= 1.0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected numbers between 0 and 1")


def _stated_sources(arguments: argparse.Namespace) -> dict[str, Path]:
    if arguments.model and not arguments.data:
        raise UserError("--data: required with --model, whose folder names no text; give a source made by prepare")
    sources = {folder.absolute().name: folder for folder in arguments.data}
    if len(sources) < len(arguments.data):
        raise UserError(f"--data {' --data '.join(map(str, arguments.data))}: two folders of one name; rename one")
    return sources


def _training(checkpoint: Path | None) -> _Training:
    if checkpoint is None:
        return _Training()
    meta = json.loads((checkpoint / META).read_bytes())
    config, _ = validate_table(tomli.loads(meta["config"]))
    stages, samples = plan_stages(config), meta["progress"]["samples"]
    return _Training(
        window=max((stage.seq_len for stage in stages if stage.first < samples), default=stages[0].seq_len),
        seq_len=config.training.seq_len,
        document_mask=config.data.document_mask,
        sources={source.name: Path(source.path) for source in config.data.sources},
    )


def _lengths(stated: tuple[int, ...] | None, window: int | None, positions: int) -> tuple[int, ...]:
    too_long = [length for length in stated or () if length > positions]
    if too_long:
        raise UserError(
            f"--lengths {','.join(map(str, too_long))}: the model has {positions} positions (max_position_embeddings); "
            "take at most that"
        )
    usual = _LENGTHS if window is None else (window, 2 * window, 4 * window)
    return stated or tuple(length for length in usual if length <= positions) or (positions,)


def _measures(
    arguments: argparse.Namespace,
    manifests: Mapping[str, Manifest],
    tokenizer: Tokenizer,
    training: _Training,
    lengths: tuple[int, ...],
) -> dict[str, Measure]:
    """The tasks, in the order of `TASKS`."""
    usual = {"samples": arguments.samples, "seed": arguments.seed}
    make = {
        "loss": lambda: Loss(
            manifests,
            tokenizer,
            length=training.seq_len or min(lengths),
            samples=arguments.samples,
            document_mask=training.document_mask,
        ),
        "position": lambda: Position(manifests, lengths=lengths, **usual),
        "needle": lambda: Needle(manifests, tokenizer, lengths=lengths, depths=arguments.depths, **usual),
    }
    return {task: make[task]() for task in TASKS if task in arguments.tasks}


def _open_results(arguments: argparse.Namespace, identity: dict[str, Any], *, keeps: bool) -> Results:
    """The results of an earlier call, or empty ones; ``identity`` beside the model and the seed. Without ``keeps`` no
    file is read or written."""
    folders = [folder for folder in (arguments.model or arguments.checkpoint, arguments.adapter) if folder]
    files = [(file, file.stat()) for folder in folders for file in sorted(folder.iterdir())]
    digest = _digest([(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in files])
    names = " + ".join(str(folder.absolute()) for folder in folders)
    identity |= {"model": f"{names} {digest}", "seed": arguments.seed}
    if arguments.output is None or not keeps:
        return Results(None, identity)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {arguments.output}: {error.strerror}; give a folder that can be written") from error
    return Results(arguments.output / _RESULTS, identity)


def _held_out_hashes(manifest: Manifest) -> list[str]:
    return [shard.sha256 for shard in manifest.splits["validation"].shards]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _show(arguments: argparse.Namespace, found: Mapping[str, Any], window: int | None) -> None:
    """Print the files that were written, and draw the picture."""
    if arguments.output is None:
        return
    print(arguments.output / _RESULTS)
    if not found.keys() & {"position", "needle"}:
        return
    if find_spec("matplotlib") is None:
        print(f"no {_PICTURE}: matplotlib is not installed; pip install matplotlib, or glm46 with its extra [plot]")
        return
    picture = arguments.output / _PICTURE
    try:
        draw(found, str(arguments.model or arguments.checkpoint), window, picture)
    except OSError as error:
        raise UserError(f"{picture}: {error.strerror}; make room, or give another --output folder") from error
    print(picture)
