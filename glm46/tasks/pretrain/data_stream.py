"""Micro-batches of a run: the stages of its curriculum in order, each sample once."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import parent_process
from typing import Any

from glm46.compute.distributed.mesh import Cluster
from glm46.compute.distributed.process_control import die_with_parent
from glm46.engine.reliability.stop import SIGNALS
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches
from glm46.files.threads import start_daemon
from glm46.run.curriculum import TextStage, describe_attention, stage_at
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch
from glm46.storage.data.loader import BatchLayout, SampleSpan, TrainSource, build_train_loader
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.mixing import integer_weights, samples_by_source


class DataStream:
    """Reads the micro-batches of each step. The position depends only on `Progress`."""

    def __init__(self, plan: Plan, cluster: Cluster, manifests: dict[str, Manifest]):
        self._plan = plan
        self._cluster = cluster
        self._manifests = manifests
        self._loader: Iterator[Batch] = iter(())
        self._stage: TextStage | None = None
        self._next_sample = -1

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """Read the next micro-batches of this rank, for a step of `sequences` samples over all ranks."""
        started = time.perf_counter()
        stage = stage_at(self._plan.text_stages, progress.samples)
        note = ""
        if stage != self._stage and len(self._plan.text_stages) > 1:
            note = self._describe(stage)
        if stage != self._stage or progress.samples != self._next_sample:
            self._open(stage, progress)
        samples = sequences if stage.stop is None else min(sequences, stage.stop - progress.samples)
        rows = self._plan.rows_per_micro_batch
        # A pipeline schedule needs a fixed number of micro-batches; micro-batches without samples are padding.
        count = sequences // rows if self._cluster.meshes.pipeline is not None else -(-samples // rows)
        self._next_sample = progress.samples + samples
        micro_batches = [next(self._loader) for _ in range(count)]
        return StepBatches(micro_batches, samples, stage.seq_len, time.perf_counter() - started, note)

    def _describe(self, stage: TextStage) -> str:
        stages = self._plan.text_stages
        total = sum(stage.weights)
        pairs = zip(self._plan.config.data.sources, stage.weights, strict=True)
        mixture = ", ".join(f"{source.name} {weight / total:.1%}" for source, weight in pairs if weight > 0)
        window, scaling = describe_attention(stage.shape)
        is_plain = all(describe_attention(other.shape) == ("none", "none") for other in stages)
        attention = "" if is_plain else f"window {window}, RoPE scaling {scaling}, "
        trained = f"indexers {stage.indexer}, " if self._plan.trains_indexers else ""
        return (
            f"stage {stages.index(stage) + 1} of {len(stages)}: {stage.seq_len:,} tokens per sequence, "
            f"{attention}{trained}{mixture}; "
            f"samples {stage.first:,} {'on' if stage.stop is None else f'to {stage.stop - 1:,}'}"
        )

    def _open(self, stage: TextStage, progress: Progress) -> None:
        plan = self._plan
        config = self._plan.config
        self._stage = stage
        active = [i for i, weight in enumerate(stage.weights) if weight > 0]
        rows_of_sources = rows_before(plan, self._manifests, stage, progress.read_before)
        sources = [config.data.sources[i] for i in active]
        with starting_workers():
            self._loader = iter(
                build_train_loader(
                    [
                        TrainSource(s.name, self._manifests[s.name], stage.weights[i], s.packing)
                        for i, s in zip(active, sources, strict=True)
                    ],
                    batch_layout(plan, self._cluster, stage.seq_len),
                    seed=config.debug.seed,
                    start_sample=progress.samples,
                    num_workers=config.data.num_workers,
                    span=SampleSpan(
                        stage.first, stage.stop, tuple(rows_of_sources[i] for i in active), stage.documents
                    ),
                    begin_worker=begin_worker,
                )
            )


def batch_layout(plan: Plan, cluster: Cluster, seq_len: int) -> BatchLayout:
    """Return the shape of this rank's micro-batches for rows of this length, and its share of the samples."""
    return BatchLayout(
        seq_len=seq_len,
        mtp_depth=plan.mtp_depths,
        local_batch_size=plan.config.training.local_batch_size,
        dp_rank=cluster.dp_rank,
        dp_degree=plan.layout.dp_degree,
        document_mask=plan.config.data.document_mask,
    )


def rows_read(plan: Plan, manifests: dict[str, Manifest], progress: Progress) -> list[list[Any]]:
    """Count the rows of each source that this run and earlier phases have read, for the next phase.

    Returns:
        Lists of source identity, sequence length, lower and upper bound of the documents, and number of rows.
    """
    counts = {tuple(entry[:-1]): entry[-1] for entry in progress.read_before}
    for stage in plan.text_stages:
        stop = progress.samples if stage.stop is None else min(stage.stop, progress.samples)
        if stop <= stage.first:
            continue
        for i, rows in _taken(stage, stop - stage.first).items():
            key = _identity_of_rows(plan, manifests, i, stage)
            counts[key] = counts.get(key, 0) + rows
    return [[*key, rows] for key, rows in sorted(counts.items())]


def rows_before(
    plan: Plan, manifests: dict[str, Manifest], stage: TextStage, read_before: list[list[Any]]
) -> list[int]:
    """Count for each source how many of the stage's rows earlier stages and phases have read."""
    phase_counts = {tuple(entry[:-1]): entry[-1] for entry in read_before}
    same_rows = (stage.seq_len, stage.documents)
    earlier = [other for other in plan.text_stages if other.first < stage.first]
    stages = [other for other in earlier if (other.seq_len, other.documents) == same_rows]
    totals = []
    for i in range(len(stage.weights)):
        counts = [_taken(other, other.stop - other.first).get(i, 0) for other in stages if other.stop is not None]
        totals.append(sum(counts) + phase_counts.get(_identity_of_rows(plan, manifests, i, stage), 0))
    return totals


def _taken(stage: TextStage, samples: int) -> dict[int, int]:
    """Count the rows of each source, by its index, in the first samples of a stage."""
    active = [i for i, weight in enumerate(stage.weights) if weight > 0]
    counts = samples_by_source(samples, integer_weights([stage.weights[i] for i in active]))
    return dict(zip(active, counts, strict=True))


def _identity_of_rows(plan: Plan, manifests: dict[str, Manifest], source: int, stage: TextStage) -> tuple[Any, ...]:
    """Return the identity of a source's rows: its text, packing and order, sequence length and range of documents."""
    source_config = plan.config.data.sources[source]
    config = plan.config
    shards = [shard.sha256 for shard in manifests[source_config.name].splits["train"].shards]
    facts = [source_config.name, source_config.packing, config.debug.seed, plan.mtp_depths, shards]
    identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return (f"{source_config.name}:{identity}", stage.seq_len, *stage.documents)


@contextmanager
def starting_workers() -> Iterator[None]:
    """Block signals while worker processes start, which inherit this.

    torchrun and job systems signal every process of a rank. A worker that died of such a signal would end the run
    before it saves.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def begin_worker(_number: int) -> None:
    """Initialise a worker process started within `starting_workers`, so that it exits only if its rank ends it or
    dies."""
    die_with_parent()
    rank = parent_process()
    assert rank is not None and rank.pid is not None, "called outside of a worker"
    start_daemon(partial(_end_with, rank.pid), "signals")


def _end_with(rank_pid: int) -> None:
    while True:
        signal_info = signal.sigwaitinfo(SIGNALS)
        if signal_info.si_pid == rank_pid and signal_info.si_signo == signal.SIGTERM:  # the loader closes its workers
            os._exit(0)
