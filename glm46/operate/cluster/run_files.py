"""Checks of a run's layout and of its inputs on one host: tokenizer, shards, checkpoints, weights to start from. Their
subject has a plan."""

from collections.abc import Iterator
from pathlib import Path

from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.engine.training.origin import refuse_origin
from glm46.operate.cluster.results import FAIL, PASS, SKIP, Result, Subject, limited
from glm46.operate.estimate.requirement import judge_config
from glm46.storage.chats.chat_template import raise_for_source
from glm46.storage.checkpoint.integrity import check_hash, published_steps, quick_faults, records_of, step_folder
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.weights.start_folders import refuse_weights

_SHOWN = 3


def layout(subject: Subject) -> Iterator[Result]:
    """Check that the degrees fit the ranks, and that the run fits the memory of this host."""
    config = subject.run.config
    world = subject.run.layout.world_size
    ranks = subject.processes * subject.nodes
    faults = check_config(config, world_size=ranks)
    if not faults and world != ranks:
        faults = [f"the plan has {counted(world, 'rank')}"]
    yield limited(
        "layout",
        not faults,
        "; ".join(faults) or counted(ranks, "rank"),
        "divides the ranks",
        "change the degrees in [parallelism], or the number of hosts",
    )
    if faults:
        return
    verdict = judge_config(config, subject.machine, ranks)
    remedy = "python -m glm46 plan shows where it goes; other degrees, or a smaller batch"
    yield limited("memory of the run", verdict.fits, "; ".join(verdict.faults) or verdict.margin, "fits", remedy)


def tokenizer(subject: Subject) -> Iterator[Result]:
    """Check that the tokenizer can be read here."""
    loaded = load_tokenizer(subject.run.config.model.tokenizer_path)
    rows = subject.run.shape.vocab_size
    path = subject.run.config.model.tokenizer_path
    yield limited(
        "tokenizer",
        loaded.vocab_size <= rows,
        f"{path}: {loaded.vocab_size:,} tokens, {loaded.fingerprint[:12]}",
        f"<= model.shape.vocab_size = {rows:,}",
        "set model.shape.vocab_size, or another model.tokenizer_path",
    )


def sources(subject: Subject) -> Iterator[Result]:
    """Check that the shards of each source are here and whole; ``--full`` reads and hashes all of them."""
    model = subject.run.config.model
    loaded = load_tokenizer(model.tokenizer_path, model.flavor)
    for source in subject.run.config.data.sources:
        name = f"data {source.name}"
        folder = Path(source.path)
        if not folder.exists() and source.recipe is not None:
            # The first node prepares the source, on storage that all nodes see.
            yield Result(name, SKIP, f"{folder} is not there yet: the start of the run makes it")
            continue
        try:
            manifest = load_manifest(folder, full=True if subject.is_full else None)
            manifest.require_tokenizer(loaded.fingerprint)
            raise_for_source(manifest, loaded)
        except UserError as error:
            value = "; ".join(error.faults[:_SHOWN])
            yield Result(name, FAIL, value, "readable and whole", "mount it here, or prepare it again")
        else:
            tokens = sum(split.tokens for split in manifest.splits.values())
            yield Result(name, PASS, f"{folder}: {tokens:,} tokens", "readable and whole")


def checkpoints(subject: Subject) -> Iterator[Result]:
    """Check that the checkpoint, or the weights, that the run would start from can be read; ``--full`` hashes it."""
    config = subject.run.config
    refuse_origin(config)
    refuse_weights(config)
    steps = published_steps(config.checkpoint_folder) if config.checkpoint.enable else []
    if not steps:
        start = config.checkpoint.load_path or config.checkpoint.initial_load_path
        yield Result("start", PASS, start or "new weights", "readable")
        return
    folder = step_folder(config.checkpoint_folder, steps[-1])
    body, faults = quick_faults(folder, steps[-1])
    if body is not None and not faults and subject.is_full:
        records = records_of(body).items()
        faults = [fault for name, record in records for fault in check_hash(folder / name, record)]
    remedy = "the run takes the one before; python -m glm46 checkpoint verify says more"
    yield limited("start", not faults, "; ".join(faults[:_SHOWN]) or str(folder), "whole", remedy)


RUN_CHECKS = {"layout": layout, "tokenizer": tokenizer, "data": sources, "start": checkpoints}
