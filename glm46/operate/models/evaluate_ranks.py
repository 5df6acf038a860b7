"""The work of ``python -m glm46 evaluate`` on one rank."""

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from glm46.compute.distributed.environment import launched_rank, launched_world_size
from glm46.config.errors import UserError
from glm46.config.faults import nearest
from glm46.engine.evaluation.answers import Answers
from glm46.engine.evaluation.drafts import Drafts, draft_scores
from glm46.engine.evaluation.loss import Loss
from glm46.engine.evaluation.needle import Needle
from glm46.engine.evaluation.position import Position
from glm46.engine.evaluation.report import table
from glm46.engine.evaluation.results import Results, measure_rows
from glm46.engine.evaluation.rows import Measure
from glm46.engine.evaluation.task_names import TASKS
from glm46.engine.inference.loading import Loaded
from glm46.files.progress import tokens_progress
from glm46.operate.models.evaluate_options import PICTURE, RESULTS
from glm46.operate.models.evaluate_start import require_prediction, row_lengths
from glm46.operate.models.loaded_model import digest, files_of, joined, load_model, on_all_ranks
from glm46.run.curriculum import plan_stages
from glm46.run.function import config_of_meta
from glm46.storage.chats.chat_template import find_format, raise_for_source
from glm46.storage.checkpoint.integrity import read_meta
from glm46.storage.data.manifest import Manifest, load_manifest

if TYPE_CHECKING:
    from glm46.engine.evaluation.standard import StandardTasks

_SEED = 0
"""Chooses documents and needles. One for all calls, so that their figures can be compared."""
_TASKS_SECONDS = 3600
"""Longest time for rank 0 to read the tasks of lm-eval and their data, while the other ranks wait."""


class _Training(NamedTuple):
    """Facts about the training of the model."""

    window: int | None = None
    """Longest sequence so far."""
    seq_len: int | None = None
    """Sequence length of the validation."""
    document_mask: bool = False
    depths: int | None = None
    """`mtp.depths`."""
    sources: Mapping[str, Path] = MappingProxyType({})


def evaluate(arguments: argparse.Namespace, sources: dict[str, Path]) -> None:
    """Run the evaluation on this rank. Collective."""
    with joined() if set(arguments.tasks) <= set(TASKS) else joined(_TASKS_SECONDS):
        _evaluate(arguments, sources)


def _evaluate(arguments: argparse.Namespace, sources: dict[str, Path]) -> None:
    work = on_all_ranks(lambda: _read(arguments, sources))
    is_first = work.loaded.mesh.rank == 0
    results = work.results
    training = work.training
    if work.loaded.mesh.layout.world_size > 1:
        results.share()
    total = sum(row.length for measure in work.measures.values() for row in results.missing(measure))
    scores: dict[str, Any] = {}
    try:
        with (
            tokens_progress("evaluating", total, partial(print, file=sys.stderr))
            if is_first
            else nullcontext(lambda _: None)
        ) as advance:
            for task, measure in work.measures.items():
                measure_score = draft_scores if task == "drafts" else None
                scores[task] = measure_rows(
                    work.loaded, measure, results, training.document_mask, advance, measure_score
                )
        if work.has_standard:
            scores["standard"] = on_all_ranks(lambda: _standard(work))
    finally:
        results.save(scores)
    if not is_first:
        return
    for task, result in scores.items():
        print("\n".join(table(task, result, training.window)), end="\n\n")
    _show(arguments, scores, training.window)


def _standard(work: "_Work") -> dict[str, Any] | None:
    """Run the lm-eval tasks: return the result on rank 0, None on the other ranks. Collective."""
    answers = Answers(work.loaded, work.results)
    if work.standard is None:
        answers.follow()
        return None
    model, tokenizer, _ = work.loaded
    try:
        return work.standard.run(answers, tokenizer, model.shape.max_position_embeddings)
    finally:
        answers.end()


class _Work(NamedTuple):
    """The work of one call."""

    loaded: Loaded
    training: _Training
    measures: dict[str, Measure]
    results: Results
    """Stored in a file on rank 0 only."""
    has_standard: bool
    standard: "StandardTasks | None"
    """None on ranks other than 0."""


def _read(arguments: argparse.Namespace, sources: dict[str, Path]) -> _Work:
    """Load the model, the measures and earlier results. Collective."""
    standard = _find_standard(arguments)
    loaded = load_model(arguments, drafts="drafts" in arguments.tasks)
    model, tokenizer, mesh = loaded
    if arguments.apply_chat_template:
        find_format(tokenizer)
    if "drafts" in arguments.tasks:
        require_prediction(model.shape, arguments.model or arguments.checkpoint)
    training = _training(arguments.checkpoint)
    if set(arguments.tasks).isdisjoint(TASKS):
        sources = {}
        training = training._replace(sources={})
    try:
        manifests = {name: load_manifest(folder) for name, folder in (sources or training.sources).items()}
    except UserError as error:
        raise error if sources else UserError(*(f"{fault}; or give --data" for fault in error.faults)) from error
    for manifest in manifests.values():
        manifest.require_tokenizer(tokenizer.fingerprint)
        raise_for_source(manifest, tokenizer)
    lengths = row_lengths(arguments.lengths, training.window, model.shape.max_position_embeddings)
    measures = _measures(arguments, manifests, loaded, training, lengths)
    held_out = ([shard.sha256 for shard in manifest.splits["validation"].shards] for manifest in manifests.values())
    text = [tokenizer.fingerprint, training.document_mask, *held_out]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    identity: dict[str, Any] = {"text": digest(text), "dtype": dtype}
    if model.router_temperature != 1.0:  # results of earlier versions were computed at 1
        identity["router_temperature"] = model.router_temperature
    results = _open_results(arguments, identity, keeps=mesh.rank == 0)
    return _Work(loaded, training, measures, results, not set(arguments.tasks) <= set(TASKS), standard)


def _find_standard(arguments: argparse.Namespace) -> "StandardTasks | None":
    """Find the requested lm-eval tasks on rank 0; None on other ranks, or without such tasks."""
    names = [name for name in arguments.tasks if name not in TASKS]
    if not names:
        return None
    if launched_world_size() is not None and launched_rank() != 0:
        return None
    try:
        from glm46.engine.evaluation.standard import PromptForm, find_tasks  # lm-eval is optional: the extra [eval]
    except ImportError as error:
        near = nearest(names[0], TASKS, 0.5)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(TASKS)};"
        raise UserError(
            f"--tasks {names[0]}: unknown task; {hint} other tasks need lm-eval: pip install '.[eval]'"
        ) from error
    return find_tasks(
        names,
        arguments.task_folder,
        fewshot=arguments.fewshot,
        limit=arguments.limit,
        run_code=arguments.run_code,
        form=PromptForm(*(getattr(arguments, name) for name in PromptForm._fields)),
    )


def _training(checkpoint: Path | None) -> _Training:
    if checkpoint is None:
        return _Training()
    meta = read_meta(checkpoint)
    config = config_of_meta(meta, checkpoint)
    stages = plan_stages(config)
    samples = meta["progress"]["samples"]
    return _Training(
        window=max((stage.seq_len for stage in stages if stage.first < samples), default=stages[0].seq_len),
        seq_len=config.training.seq_len,
        document_mask=config.data.document_mask,
        depths=config.mtp.depths,
        sources={source.name: Path(source.path) for source in config.data.sources},
    )


def _measures(
    arguments: argparse.Namespace,
    manifests: Mapping[str, Manifest],
    loaded: Loaded,
    training: _Training,
    lengths: tuple[int, ...],
) -> dict[str, Measure]:
    """Create the measures of the requested tasks, in the order of `TASKS`."""
    tokenizer = loaded.tokenizer
    depths = arguments.draft_tokens or training.depths or loaded.model.shape.num_nextn_predict_layers
    usual: dict[str, Any] = {"samples": arguments.samples, "seed": _SEED}
    make_loss = partial(
        Loss,
        manifests,
        tokenizer,
        length=training.seq_len or min(lengths),
        samples=arguments.samples,
        document_mask=training.document_mask,
    )
    make: dict[str, Callable[[], Measure]] = {
        "loss": make_loss,
        "drafts": lambda: Drafts(make_loss(mtp_depth=depths), depths),
        "position": lambda: Position(manifests, lengths=lengths, **usual),
        "needle": lambda: Needle(manifests, tokenizer, lengths=lengths, depths=arguments.depths, **usual),
    }
    return {task: make[task]() for task in TASKS if task in arguments.tasks}


def _open_results(arguments: argparse.Namespace, identity: dict[str, Any], *, keeps: bool) -> Results:
    """Open the results of an earlier call, or empty ones. ``identity`` is extended by the model and `_SEED`. Without
    ``keeps`` no file is read or written."""
    folders = [folder for folder in (arguments.model or arguments.checkpoint, arguments.adapter) if folder]
    names = " + ".join(str(folder.absolute()) for folder in folders)
    identity |= {"model": f"{names} {digest(files_of(folders, (RESULTS, PICTURE)))}", "seed": _SEED}
    if arguments.output is None or not keeps:
        return Results(None, identity)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {arguments.output}: {error.strerror}; give a folder that can be written") from error
    return Results(arguments.output / RESULTS, identity)


def _show(arguments: argparse.Namespace, scores: Mapping[str, Any], window: int | None) -> None:
    """Print the names of the written files, and draw the picture."""
    if arguments.output is None:
        return
    print(arguments.output / RESULTS)
    if not scores.keys() & {"position", "needle"}:
        return
    if find_spec("matplotlib") is None:
        print(f"no {PICTURE}: matplotlib is not installed; pip install matplotlib, or glm46 with its extra [plot]")
        return
    from glm46.engine.evaluation.pictures import draw  # optional: the extra [plot]

    picture = arguments.output / PICTURE
    try:
        draw(scores, str(arguments.model or arguments.checkpoint), window, picture)
    except OSError as error:
        raise UserError(f"{picture}: {error.strerror}; make room, or give another --output folder") from error
    print(picture)
