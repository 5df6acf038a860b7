"""Micro-batches of a run: stages of sequence length and mixture in order, each sample once."""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from glm46.data.loader import Span, TrainSource, build_train_loader
from glm46.data.mixing import integer_weights, taken
from glm46.observe.report import Report
from glm46.planner.curriculum import TextStage, plan_stages, stage_at
from glm46.reliability.workers import begin_worker, starting_workers
from glm46.training.build import Parts
from glm46.training.state import Progress


class StepBatches(NamedTuple):
    """Micro-batches of this rank for one optimizer step."""

    micro_batches: list[dict[str, Tensor]]
    sequences: int
    """Samples over all ranks. Fewer than requested at the end of a stage; the rest is padding."""
    seq_len: int
    read_seconds: float
    """Time to read them."""


class DataStream:
    """Reads the micro-batches step by step. The position depends on `Progress` alone."""

    def __init__(self, parts: Parts, report: Report):
        self._parts, self._report = parts, report
        self._stages = plan_stages(parts.config)
        self._loader: Iterator[dict[str, Tensor]] | None = None
        self._stage: TextStage | None = None
        self._next = -1

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """Read the next micro-batches of this rank, for a step of `sequences` samples over all ranks."""
        began = time.perf_counter()
        stage = stage_at(self._stages, progress.samples)
        if stage != self._stage or progress.samples != self._next:
            self._open(stage, progress)
        left = sequences if stage.stop is None else min(sequences, stage.stop - progress.samples)
        rows = self._parts.rows_per_micro_batch
        # A pipeline schedule needs a fixed number of micro-batches; those without samples are padding.
        count = sequences // rows if self._parts.pipeline is not None else -(-left // rows)
        self._next = progress.samples + left
        micro_batches = [next(self._loader) for _ in range(count)]
        return StepBatches(micro_batches, left, stage.seq_len, time.perf_counter() - began)

    def _open(self, stage: TextStage, progress: Progress) -> None:
        config, parts = self._parts.config, self._parts
        if stage != self._stage and len(self._stages) > 1:
            number, last = self._stages.index(stage) + 1, "on" if stage.stop is None else f"to {stage.stop - 1:,}"
            self._report.message(
                f"stage {number} of {len(self._stages)}: {stage.seq_len:,} tokens per sequence, "
                f"{_mixture(parts, stage)}; samples {stage.first:,} {last}"
            )
        self._stage = stage
        chosen = [i for i, weight in enumerate(stage.weights) if weight > 0]
        before = rows_before(parts, self._stages, stage, progress.read_before)
        sources = [config.data.sources[i] for i in chosen]
        plans = Path(config.data.plan_folder) if config.data.plan_folder is not None else None
        with starting_workers():
            self._loader = iter(
                build_train_loader(
                    [TrainSource(s.name, parts.manifests[s.name], stage.weights[i], s.packing, plans)
                     for i, s in zip(chosen, sources, strict=True)],
                    seq_len=stage.seq_len,
                    mtp_depth=parts.shape.num_nextn_predict_layers,
                    local_batch_size=config.training.local_batch_size,
                    dp_rank=parts.dp_rank,
                    dp_degree=parts.layout.dp_degree,
                    seed=config.debug.seed,
                    document_mask=config.data.document_mask,
                    start_sample=progress.samples,
                    num_workers=config.data.num_workers,
                    prefetch_factor=config.data.prefetch_factor,
                    span=Span(stage.first, stage.stop, tuple(before[i] for i in chosen), stage.documents),
                    begin_worker=begin_worker,
                )
            )  # fmt: skip


def rows_read(parts: Parts, progress: Progress) -> list[list]:
    """Rows of each source that this run and earlier phases have read, for the next phase.

    Returns:
        Lists of source identity, sequence length, first and last bound of the documents, and number of rows.
    """
    counts = {tuple(entry[:-1]): entry[-1] for entry in progress.read_before}
    for stage in plan_stages(parts.config):
        stop = progress.samples if stage.stop is None else min(stage.stop, progress.samples)
        if stop <= stage.first:
            continue
        for i, rows in _taken(stage, stop - stage.first).items():
            key = _grid(parts, i, stage)
            counts[key] = counts.get(key, 0) + rows
    return [[*key, rows] for key, rows in sorted(counts.items())]


def rows_before(parts: Parts, stages: list[TextStage], stage: TextStage, read_before: list[list]) -> list[int]:
    """Rows of each source that earlier stages and phases have read from the same rows as this stage."""
    counts = {tuple(entry[:-1]): entry[-1] for entry in read_before}
    before = []
    for i in range(len(stage.weights)):
        same = [
            s for s in stages if s.first < stage.first and (s.seq_len, s.documents) == (stage.seq_len, stage.documents)
        ]
        earlier = sum(_taken(s, s.stop - s.first).get(i, 0) for s in same)
        before.append(earlier + counts.get(_grid(parts, i, stage), 0))
    return before


def _taken(stage: TextStage, samples: int) -> dict[int, int]:
    """Rows of each source, by its index, in the first samples of a stage."""
    chosen = [i for i, weight in enumerate(stage.weights) if weight > 0]
    counts = taken(samples, integer_weights([stage.weights[i] for i in chosen]))
    return dict(zip(chosen, counts, strict=True))


def _grid(parts: Parts, source: int, stage: TextStage) -> tuple:
    """Identity of a source's rows: its text, packing and order, sequence length and range of documents."""
    described = parts.config.data.sources[source]
    shards = [shard.sha256 for shard in parts.manifests[described.name].splits["train"].shards]
    facts = [described.name, described.packing, parts.config.debug.seed, parts.shape.num_nextn_predict_layers, shards]
    identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return (f"{described.name}:{identity}", stage.seq_len, *stage.documents)


def _mixture(parts: Parts, stage: TextStage) -> str:
    total = sum(stage.weights)
    pairs = zip(parts.config.data.sources, stage.weights, strict=True)
    return ", ".join(f"{source.name} {weight / total:.1%}" for source, weight in pairs if weight > 0)
