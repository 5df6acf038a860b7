"""The stream of batches: the same samples in the same order for any number of ranks, workers or rows per batch.

The only state is the global number of the next sample, so a run resumes at any sample under any layout. torchdata's
StatefulDataLoader provides worker processes and prefetching.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from glm46.compat import quiet_libraries
from glm46.config.errors import raise_if
from glm46.storage.data.batches import Batch, BatchBuilder
from glm46.storage.data.best_fit import concatenate, plan_groups
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.mixing import integer_weights, permute, source_and_sample
from glm46.storage.data.pack_plans import plan_of
from glm46.storage.data.packing import ConcatenatedRows, PackedRows, full_rows, open_tokens

# Samples located per call: for small arrays the calls cost more than the arithmetic. The first block is small, so that
# the first batch after a seek does not wait for later ones.
_FIRST_ORDER_BLOCK = 1
_ORDER_BLOCK = 1024


@dataclass(frozen=True)
class BatchLayout:
    """Shape of a batch, and the share of the samples that this rank reads."""

    seq_len: int
    mtp_depth: int
    """Multi-token prediction layers to make inputs and labels for."""
    local_batch_size: int
    dp_rank: int
    """Data-parallel rank; ranks of one dp_rank read the same samples."""
    dp_degree: int
    document_mask: bool
    """Restart positions at each document."""

    @property
    def global_rows(self) -> int:
        """Samples in one micro-batch over all ranks."""
        return self.local_batch_size * self.dp_degree

    def builder(self, eos_id: int) -> BatchBuilder:
        """Make an empty batch of this layout."""
        return BatchBuilder(self.local_batch_size, self.seq_len, self.mtp_depth, self.document_mask, eos_id)


class TrainSource(NamedTuple):
    """One source of a mixture."""

    name: str
    """Part of the key that shuffles the samples."""
    manifest: Manifest
    weight: float
    """Share of the rows, which is also the share of the tokens."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"


class SampleSpan(NamedTuple):
    """The samples of one stage of a run; by default the samples of a whole run."""

    first: int = 0
    """Global number of the stage's first sample."""
    stop: int | None = None
    """Exclusive end of its sample numbers; rows from there on are padding. None means no end."""
    rows_before: tuple[int, ...] = ()
    """Rows of each source that earlier stages or runs have read; empty means none."""
    documents: tuple[float, float] = (0.0, 1.0)
    """Range of each source's documents that is read, as shares."""


WHOLE_RUN = SampleSpan()


class TrainStream(IterableDataset[Batch]):
    """Endless micro-batches; `__iter__` starts at ``start_sample``.

    Micro-batch q of dp_rank r holds the samples start_sample + (q * dp_degree + r) * rows + (0 ... rows - 1).
    With n workers, each yields every n-th one.
    """

    def __init__(
        self, sources: Sequence[TrainSource], seed: int, layout: BatchLayout, start_sample: int, span: SampleSpan
    ):
        self.sources = tuple(sources)
        self.seed = seed
        self.layout = layout
        self.start_sample = start_sample
        self.span = span
        self.weights = integer_weights([source.weight for source in self.sources])
        self._plans = []
        self.rows_per_source = []
        short = []
        for source in self.sources:
            tokens = open_tokens(source.manifest, "train", span.documents).length
            is_packed = source.packing == "best_fit"
            plan = plan_of(source.manifest, layout.seq_len, span.documents) if is_packed else None
            rows = full_rows(tokens, layout.seq_len, layout.mtp_depth) if plan is None else plan.rows
            if not rows:
                short.append(
                    f"{source.manifest.folder}: {tokens} training tokens, fewer than one row of {layout.seq_len} with "
                    "targets; add text, remove the source, or lower training.seq_len"
                )
            self._plans.append(plan)
            self.rows_per_source.append(rows)
        raise_if(short)

    def _open_rows(self) -> list[ConcatenatedRows | PackedRows]:
        """Open the rows of each source, in the process that reads them."""
        length = self.layout.seq_len
        opened = []
        for source, plan in zip(self.sources, self._plans, strict=True):
            tokens = open_tokens(source.manifest, "train", self.span.documents)
            opened.append(ConcatenatedRows(tokens, length) if plan is None else PackedRows(tokens, length, plan))
        return opened

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each global sample number and the row within the source, both int64 [n]."""
        names = [source.name for source in self.sources]
        places = numbers - self.span.first
        rows_before = self.span.rows_before
        return source_and_sample(places, self.weights, names, self.rows_per_source, self.seed, rows_before)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        layout = self.layout
        stop = self.span.stop
        index = worker.id if worker else 0
        workers = worker.num_workers if worker else 1
        rows_by_source = self._open_rows()
        builder = layout.builder(self.sources[0].manifest.eos_id)
        buffer = np.empty(layout.seq_len + 1 + layout.mtp_depth, np.int64)
        stride = workers * layout.global_rows
        block = _FIRST_ORDER_BLOCK
        start = self.start_sample + index * layout.global_rows
        while True:
            # First samples, over all ranks, of the next micro-batches of this worker; then the samples of this rank.
            starts = start + stride * np.arange(max(1, block // layout.local_batch_size))
            numbers = starts[:, None] + layout.dp_rank * layout.local_batch_size + np.arange(layout.local_batch_size)
            located = (column.reshape(numbers.shape).tolist() for column in self.locate(numbers.ravel()))
            for batch in zip(numbers.tolist(), *located, strict=True):
                for number, source, row in zip(*batch, strict=True):
                    if stop is not None and number >= stop:
                        builder.add_padding()
                        continue
                    rows = rows_by_source[source]
                    builder.add(number, buffer, *rows.read(row, buffer), is_marked=rows.is_marked)
                yield builder.finish()
            start = start + stride * len(starts)
            block = _ORDER_BLOCK


def validation_rows(manifest: Manifest, seq_len: int) -> tuple[ConcatenatedRows | PackedRows, list[int]]:
    """Return the rows of a source's held-out text, and their numbers in the order of validation.

    Rows of chats hold whole documents, whatever the packing: a piece of a cut document would lack its prompt.
    """
    split = manifest.splits["validation"]
    tokens = open_tokens(manifest, "validation")
    if split.targets is None:
        rows: ConcatenatedRows | PackedRows = ConcatenatedRows(tokens, seq_len)
        count = -(-split.tokens // seq_len)
    else:
        plan = concatenate(plan_groups(tokens.doc_ends_by_shard(), seq_len))
        rows = PackedRows(tokens, seq_len, plan)
        count = plan.rows
    return rows, permute(np.arange(count), count, "validation").tolist()


class ValidationStream(IterableDataset[Batch]):
    """Micro-batches with every held-out token once as an input, in a random order so that the first ones are a fair
    sample."""

    def __init__(self, manifest: Manifest, layout: BatchLayout, max_batches: int | None):
        self.manifest = manifest
        self.layout = layout
        self._rows, self._order = validation_rows(manifest, layout.seq_len)
        batches = -(-len(self._order) // layout.global_rows)
        self.batches = batches if max_batches is None else min(batches, max_batches)

    def __len__(self) -> int:
        """Number of batches, equal on every rank."""
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        layout = self.layout
        builder = self.layout.builder(self.manifest.eos_id)
        buffer = np.empty(layout.seq_len + 1 + layout.mtp_depth, np.int64)
        for batch in range(self.batches):
            first = batch * layout.global_rows + layout.dp_rank * layout.local_batch_size
            for place in range(first, first + layout.local_batch_size):
                if place < len(self._order):
                    row = self._order[place]
                    builder.add(row, buffer, *self._rows.read(row, buffer), is_marked=self._rows.is_marked)
                else:
                    builder.add_padding()
            yield builder.finish()


def _batch_loader(
    stream: TrainStream | ValidationStream,
    *,
    num_workers: int = 0,
    begin_worker: Callable[[int], None] | None = None,
) -> StatefulDataLoader:
    """Build the loader of a stream whose items are whole batches."""
    quiet_libraries()
    return StatefulDataLoader(
        stream,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=begin_worker,
        # Each iterator takes a seed. Taking it from the global generator would change its state, and a resumed run,
        # which makes more iterators, would differ from an uninterrupted one.
        generator=torch.Generator(),
    )


def build_train_loader(
    sources: Sequence[TrainSource],
    layout: BatchLayout,
    *,
    seed: int,
    start_sample: int,
    span: SampleSpan = WHOLE_RUN,
    num_workers: int = 0,
    begin_worker: Callable[[int], None] | None = None,
) -> StatefulDataLoader:
    """Build the endless training stream of one rank: a loader of dicts of tensors (see docs/data.md). Raises UserError
    if a weight is invalid, or a source is shorter than one row.

    Args:
        sources: at least one, with different names, which decide the order of samples.
        start_sample: global number of the first sample, under any number of ranks and workers.
        num_workers: processes that read ahead; 0 reads in this process.
        begin_worker: called first in each worker, with its number.
    """
    stream = TrainStream(sources, seed, layout, start_sample, span)
    return _batch_loader(stream, num_workers=num_workers, begin_worker=begin_worker)


def build_validation_loader(
    manifest: Manifest, layout: BatchLayout, *, max_batches: int | None = None
) -> StatefulDataLoader:
    """Build the loader of one source's held-out text: every token once over all ranks, equal batch counts per rank.

    Padding, in the last row with text and after it, has document id -1 and no labels.
    """
    return _batch_loader(ValidationStream(manifest, layout, max_batches))
