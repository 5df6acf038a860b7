"""Loss by position: how well a model predicts the tokens of long documents, by how much of the document it has read.

The loss decreases with the position as long as the model uses the context, and increases after the longest sequence
that it can handle. All positions are measured on the same documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

from glm46.config.errors import UserError
from glm46.engine.evaluation.rows import Figures, Row, held_out, one_document
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.mixing import permute
from glm46.storage.data.packing import TokenStream

_FIRST_BUCKET = 16
"""Positions of the first bucket; each further bucket ends at twice the end of the previous one."""


def bucket_edges(length: int) -> list[int]:
    """Return the first position of each bucket, and finally the length: 0, 16, 32, 64, ... Training windows are usually
    powers of two, so that a bucket begins where a window ends."""
    edges = [0]
    edge = _FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


class Position:
    """A `Measure`, see the module. The figures of a row are the mean losses of the buckets in nats per token."""

    def __init__(self, manifests: Mapping[str, Manifest], *, lengths: Sequence[int], samples: int, seed: int):
        """Choose the documents. Raises UserError if no held-out document of any source is long enough.

        Args:
            manifests: sources, by name.
            lengths: tokens to read of each document; the largest length for which there is a document is used.
            samples: maximum number of documents.
        """
        self._eos_id = next(iter(manifests.values())).eos_id
        streams = {name: held_out(manifest) for name, manifest in manifests.items()}
        ends = {name: stream.doc_ends() for name, stream in streams.items()}
        sizes = {name: np.diff(values, prepend=0) for name, values in ends.items()}
        longest = max(int(values.max()) for values in sizes.values())
        # Each position needs a target.
        length = max((length for length in lengths if length < longest), default=None)
        if length is None:
            raise UserError(
                f"position: a length of {min(lengths)}: the longest held-out document of {', '.join(manifests)} has "
                f"{longest} tokens; take a shorter length, or a source with longer documents"
            )
        starts = {name: (ends[name] - sizes[name])[sizes[name] > length] for name in streams}
        candidates = [(name, start) for name, values in starts.items() for start in values.tolist()]
        chosen = permute(np.arange(min(samples, len(candidates))), len(candidates), f"position {seed}")
        self._edges = bucket_edges(length)
        self.width = len(self._edges) - 1
        self.rows = [
            Row(f"position/{length}/{name}/{start}", length, partial(self._row, streams[name], start, length))
            for name, start in (candidates[i] for i in chosen.tolist())
        ]

    def _row(self, stream: TokenStream, start: int, length: int) -> Batch:
        tokens = np.empty(length + 1, np.int64)
        stream.read(start, tokens)
        return one_document(tokens, self._eos_id)

    def figures(self, labels_S: np.ndarray, logprobs_S: np.ndarray, predictions_S: np.ndarray) -> list[float]:
        """Compute the figures of a row, see the class."""
        assert (labels_S != IGNORE).all()
        return [-float(logprobs_S[first:end].mean()) for first, end in self._buckets()]

    def _buckets(self) -> Iterator[tuple[int, int]]:
        return pairwise(self._edges)

    def result(self, figures: Figures) -> dict[str, Any]:
        """Return ``buckets`` with positions ``first`` to ``last``, their ``tokens``, mean ``loss`` in nats per token,
        and its ``standard_error`` with documents as independent samples (None for one document), and further
        results."""
        buckets = list[dict[str, Any]]()
        documents = len(self.rows)
        for i, (first, end) in enumerate(self._buckets()):
            losses = [figures[row.key][i] for row in self.rows]
            bucket = {"first": first, "last": end - 1, "tokens": documents * (end - first), "loss": fmean(losses)}
            error = stdev(losses) / sqrt(documents) if documents > 1 else None
            buckets.append(bucket | {"standard_error": error})
        length = self._edges[-1]
        mean = sum(bucket["loss"] * bucket["tokens"] for bucket in buckets) / (documents * length)
        columns = {f"position/{bucket['first']}-{bucket['last']}": bucket["loss"] for bucket in buckets}
        return {"documents": documents, "length": length, "buckets": buckets, "columns": {"position": mean} | columns}
