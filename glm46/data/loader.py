"""The stream of batches: any number of ranks, workers or rows per batch reads the same samples in the same order.

Nothing is remembered but the global number of the next sample, so a run resumes anywhere, under any layout, by
stating that number. torchdata's StatefulDataLoader brings worker processes and prefetch; order and state are ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from glm46.compat import quiet_libraries
from glm46.config.errors import UserError
from glm46.data.batches import BatchBuilder
from glm46.data.manifest import Manifest
from glm46.data.mixing import integer_weights, order, permute
from glm46.data.pack_plans import plan_of
from glm46.data.packing import ConcatenatedRows, PackedRows, SelectedTokens, TokenStream, full_rows, open_tokens

# Samples whose places are computed at once: small arrays cost more in calls than in arithmetic. The first batch after a
# seek does not wait for those behind it.
_FIRST_ORDER_BLOCK, _ORDER_BLOCK = 1, 1024


@dataclass(frozen=True)
class BatchLayout:
    """What a batch looks like, and which part of the samples this rank takes."""

    seq_len: int
    mtp_depth: int
    local_batch_size: int
    dp_rank: int
    dp_degree: int
    document_mask: bool

    @property
    def global_rows(self) -> int:
        """Samples that all ranks together take in one micro-batch."""
        return self.local_batch_size * self.dp_degree

    def builder(self, eos_id: int) -> BatchBuilder:
        """An empty batch of this layout."""
        return BatchBuilder(self.local_batch_size, self.seq_len, self.mtp_depth, self.document_mask, eos_id)


class TrainSource(NamedTuple):
    """One source of a mixture."""

    name: str
    """Decides the order in which its samples come."""
    manifest: Manifest
    """Of its shards, loaded and so verified once."""
    weight: float
    """Share of the rows, and so of the tokens."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    plan_folder: Path | None = None
    """Where plans of best-fit packing are kept. None: in the folder of the source."""


class Span(NamedTuple):
    """The samples of one stage of a run."""

    first: int = 0
    """Global number of the stage's first sample."""
    stop: int | None = None
    """The number behind its last; rows from there on are padding. None: it has no end."""
    rows_before: tuple[int, ...] = ()
    """Rows of each source that earlier stages or runs have read; empty: none."""
    documents: tuple[float, float] = (0.0, 1.0)
    """The share of each source's documents that is read."""


WHOLE_RUN = Span()


class TrainStream(IterableDataset):
    """Micro-batches without end; `__iter__` starts at ``start_sample``.

    Micro-batch q of rank r holds the global samples start + q * degree * rows + r * rows + (0 ... rows - 1).
    """

    def __init__(self, sources: Sequence[TrainSource], seed: int, layout: BatchLayout, start_sample: int, span: Span):
        self.sources, self.seed, self.layout, self.start_sample = tuple(sources), seed, layout, start_sample
        self.span = span
        self.manifests = [source.manifest for source in self.sources]
        self.weights = integer_weights([source.weight for source in self.sources])
        streams = [self._open(i) for i in range(len(self.sources))]
        self._plans = [
            plan_of(manifest, layout.seq_len, span.documents, folder=source.plan_folder)
            if source.packing == "best_fit"
            else None
            for source, manifest in zip(self.sources, self.manifests, strict=True)
        ]
        self._tokens = [stream.length for stream in streams]
        self.rows_per_source = [
            len(plan.row_starts) - 1 if plan else full_rows(tokens, layout.seq_len, layout.mtp_depth)
            for plan, tokens in zip(self._plans, self._tokens, strict=True)
        ]
        self._refuse_short()

    def _open(self, source: int) -> TokenStream | SelectedTokens:
        manifest = self.manifests[source]
        return open_tokens(manifest.folder, manifest.splits["train"], self.span.documents, manifest.vocab_size)

    def _refuse_short(self) -> None:
        facts = zip(self.manifests, self._tokens, self.rows_per_source, strict=True)
        short = [
            f"{manifest.folder}: {tokens} training tokens are fewer than one row of {self.layout.seq_len} with targets"
            for manifest, tokens, rows in facts
            if rows == 0
        ]
        if short:
            raise UserError(*short)

    def __iter__(self):
        worker = get_worker_info()
        return _TrainIterator(self, worker.id if worker else 0, worker.num_workers if worker else 1)

    def open_rows(self, source: int) -> ConcatenatedRows | PackedRows:
        """The rows of a source, opened in the process that reads them."""
        plan, length, tokens = self._plans[source], self.layout.seq_len, self._open(source)
        return PackedRows(tokens, length, plan) if plan else ConcatenatedRows(tokens, length)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and row within it of global sample numbers, both int64 [n]."""
        names = [source.name for source in self.sources]
        places = numbers - self.span.first
        return order(places, self.weights, names, self.rows_per_source, self.seed, self.span.rows_before)


class _TrainIterator:
    """Every ``workers``-th micro-batch of a rank. Its state is the number of the next micro-batch's first sample."""

    def __init__(self, stream: TrainStream, worker: int, workers: int):
        self._stream, self._layout = stream, stream.layout
        self._sources = [stream.open_rows(i) for i in range(len(stream.manifests))]
        self._builder = stream.layout.builder(stream.manifests[0].eos_id)
        self._row = np.empty(stream.layout.seq_len + 1 + stream.layout.mtp_depth, np.int64)
        self._stride = workers * stream.layout.global_rows
        self._next = stream.start_sample + worker * stream.layout.global_rows
        self._located: dict[int, tuple] = {}
        self._block = _FIRST_ORDER_BLOCK

    def __iter__(self):
        return self

    def __next__(self):
        if self._next not in self._located:
            self._locate_block()
        first = self._next + self._layout.dp_rank * self._layout.local_batch_size
        stop = self._stream.span.stop
        for j, (source, sample) in enumerate(self._located.pop(self._next)):
            if stop is not None and first + j >= stop:
                self._builder.add_padding()
                continue
            used, ends = self._sources[source].read(sample, self._row)
            self._builder.add(first + j, self._row, used, ends)
        self._next += self._stride
        return self._builder.finish()

    def _locate_block(self) -> None:
        rows = self._layout.local_batch_size
        starts = self._next + self._stride * np.arange(max(1, self._block // rows))
        self._block = _ORDER_BLOCK
        numbers = starts[:, None] + self._layout.dp_rank * rows + np.arange(rows)
        source, sample = self._stream.locate(numbers.ravel())
        pairs = list(zip(source.tolist(), sample.tolist(), strict=True))
        self._located = {start: pairs[i * rows : (i + 1) * rows] for i, start in enumerate(starts.tolist())}

    def state_dict(self) -> dict[str, int]:
        """Position of this worker."""
        return {"next_sample": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that `state_dict` gave, under the same number of workers and ranks."""
        self._next = state["next_sample"]


class ValidationStream(IterableDataset):
    """Every held-out token once as an input, in an order that makes the first batches a fair sample of the rest."""

    def __init__(self, manifest: Manifest, layout: BatchLayout, max_batches: int | None):
        self.manifest, self.layout = manifest, layout
        self.rows = -(-manifest.splits["validation"].tokens // layout.seq_len)
        batches = -(-self.rows // layout.global_rows)
        self.batches = batches if max_batches is None else min(batches, max_batches)

    def __len__(self) -> int:
        """Batches per rank, the same on each."""
        return self.batches

    def __iter__(self):
        layout = self.layout
        tokens = TokenStream(self.manifest.folder, self.manifest.splits["validation"], self.manifest.vocab_size)
        builder = layout.builder(self.manifest.eos_id)
        buffer = np.empty(layout.seq_len + 1 + layout.mtp_depth, np.int64)
        rows = permute(np.arange(self.rows), self.rows, "validation").tolist()
        for batch in range(self.batches):
            first = batch * layout.global_rows + layout.dp_rank * layout.local_batch_size
            for place in range(first, first + layout.local_batch_size):
                if place < self.rows:
                    used, ends = tokens.read(rows[place] * layout.seq_len, buffer)
                    builder.add(rows[place], buffer, used, ends)
                else:
                    builder.add_padding()
            yield builder.finish()


def build_train_loader(
    sources: Sequence[TrainSource], *, seq_len: int, mtp_depth: int, local_batch_size: int,
    dp_rank: int, dp_degree: int, seed: int, document_mask: bool, start_sample: int, num_workers: int = 0,
    prefetch_factor: int = 2, span: Span = WHOLE_RUN, begin_worker: Callable[[int], None] | None = None,
) -> StatefulDataLoader:  # fmt: skip
    """The endless training stream of one rank.

    Args:
        sources: at least one, with different names, which decide the order of samples.
        mtp_depth: multi-token prediction layers to make inputs and labels for.
        dp_rank, dp_degree: of the ranks that read different samples.
        document_mask: restart positions per document.
        start_sample: global number of the first sample; where a run resumes.
        num_workers: processes that read ahead; 0 reads in this one.
        prefetch_factor: micro-batches that each worker keeps ready.
        span: which part of the run this is; by default all of it.
        begin_worker: what each worker calls first, with its number.

    Returns:
        A loader of dicts of tensors, as docs/data.md lists them.

    Raises:
        UserError: weights, or too little text.
    """
    layout = BatchLayout(seq_len, mtp_depth, local_batch_size, dp_rank, dp_degree, document_mask)
    stream = TrainStream(sources, seed, layout, start_sample, span)
    return _carry(stream, num_workers, prefetch_factor, begin_worker)


def build_validation_loader(
    manifest: Manifest, *, seq_len: int, mtp_depth: int, local_batch_size: int, dp_rank: int, dp_degree: int,
    document_mask: bool, max_batches: int | None = None,
) -> StatefulDataLoader:  # fmt: skip
    """The held-out text of one source: every token once over all ranks, the same number of batches on each rank.

    Rows behind the last text have document id -1 and no labels, as has the rest of the last row with text.
    """
    layout = BatchLayout(seq_len, mtp_depth, local_batch_size, dp_rank, dp_degree, document_mask)
    return _carry(ValidationStream(manifest, layout, max_batches), 0, 0)


def _carry(
    stream: IterableDataset, num_workers: int, prefetch_factor: int, begin_worker: Callable[[int], None] | None = None
) -> StatefulDataLoader:
    quiet_libraries()
    # Each item of the stream is a whole batch already. An iterator draws a seed that nobody uses: not from the
    # generator of the process, which a resumed run, with its further iterators, must find where an unbroken one has it.
    return StatefulDataLoader(
        stream, batch_size=None, num_workers=num_workers, prefetch_factor=prefetch_factor if num_workers else None,
        generator=torch.Generator(), worker_init_fn=begin_worker,
    )  # fmt: skip
