"""The section [data] and its sources."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from glm46.config.field_rules import OF_TEXT, AtMost, Excludes
from glm46.config.hub_address import OnHub
from glm46.config.indexer import IndexerTraining
from glm46.config.model import ModelShape, RopeScalingConfig
from glm46.config.section import CountOrAll, Section, StoredPath
from glm46.config.text_recipe import Recipe


class SourceConfig(Section):
    """[[data.sources]]: one folder of shards and its share of the training tokens."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in logs and metrics."""

    path: Annotated[StoredPath, OnHub("dataset")] = Field(min_length=1)
    """Folder with manifest.json and the shards that ``python -m glm46 prepare`` wrote; or its URL in an object store,
    which is read by range through a cache."""

    weight: float = Field(1.0, gt=0.0)
    """Share of the training tokens, relative to the other sources. Exact in tokens, not in documents."""

    max_epochs: float | None = Field(None, gt=0.0)
    """Largest number of passes over the source; a run that needs more is refused before the start. Absent: no limit."""

    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """concatenate: documents end to end, cut every seq_len tokens, as GLM pre-trains. best_fit: rows of whole documents
    that are cut only if longer than a row, for long contexts."""

    recipe: Recipe | None = None
    """How to make the shards when ``path`` does not exist. Absent: the shards must exist."""


def _shares(weights: tuple[float, ...]) -> tuple[float, ...]:
    if weights and (min(weights) < 0 or not sum(weights)):
        raise ValueError("no weight may be negative, and at least one must be above 0; correct it")
    return weights


def _range(documents: tuple[float, float]) -> tuple[float, float]:
    low, high = documents
    if not 0.0 <= low < high <= 1.0:
        raise ValueError("must be [low, high] with 0 <= low < high <= 1; correct it")
    return documents


class DataStageConfig(Section):
    """[[data.stages]]: the sequence length, the mixture and the attention from a token count on."""

    start_tokens: int = Field(ge=0)
    """Start of the stage, in tokens since the start of the curriculum. It takes effect at the next sample."""

    seq_len: Annotated[int | None, AtMost("training.seq_len")] = Field(None, ge=2)
    """Tokens per sequence; validation uses training.seq_len. Absent: training.seq_len."""

    sliding_window: CountOrAll | None = None
    """Each token attends to at most this many tokens, itself included. -1: to all previous tokens, also where
    model.shape.sliding_window is set. Absent: model.shape.sliding_window."""

    rope_scaling: RopeScalingConfig | None = None
    """Stretching of positions, a table like [model.shape.rope_scaling]. A factor of 1 stretches nothing, also where
    model.shape.rope_scaling is set. Absent: model.shape.rope_scaling."""

    indexer: IndexerTraining | None = None
    """What the stage trains, see indexer.train. Absent: indexer.train."""

    weights: Annotated[tuple[float, ...], AfterValidator(_shares)] | None = None
    """Share of each source in the order of data.sources; 0 skips a source. Absent: the weights of the sources."""

    documents: Annotated[tuple[float, float], AfterValidator(_range)] = (0.0, 1.0)
    """Part of each source's documents to read, as a range of shares; a hash places each document in [0, 1). Stages with
    different sequence lengths that read the same source need ranges that do not overlap."""

    def shape_of(self, model: ModelShape) -> ModelShape:
        """Return the shape of a model with the sliding window and the rope scaling of this stage."""
        changes: dict[str, Any] = {}
        if self.sliding_window is not None:
            changes["sliding_window"] = None if self.sliding_window == -1 else self.sliding_window
        if self.rope_scaling is not None:
            changes["rope_scaling"] = None if self.rope_scaling.factor == 1.0 else self.rope_scaling
        return model.model_copy(update=changes) if changes else model


class DataConfig(Section):
    """[data]: the stream of tokens, as a pure function of the global sample number."""

    sources: Annotated[tuple[SourceConfig, ...], OF_TEXT] = ()
    """The mixture. Training needs at least one source."""

    stages: Annotated[tuple[DataStageConfig, ...], OF_TEXT] = ()
    """Mixtures, sequence lengths and attention by token count. Absent: one stage with training.seq_len and the weights
    of the sources."""

    document_mask: Annotated[
        bool, Excludes("rl", when=False, reason="whose samples would read each other where they share a row")
    ] = False
    """Attend only within a document and restart positions at its first token. Labels never cross documents
    either way."""

    num_workers: int = Field(0, ge=0)
    """Worker processes of the loader on each rank. 0 reads in the training process, which is fast enough for memory
    maps."""

    def stage_clocks(self, seq_len: int, clock: int) -> list[int]:
        """Return the token count at which each stage begins, since the start of the curriculum: after whole samples of
        the previous stages.

        Args:
            seq_len: training.seq_len.
            clock: start of the run.
        """
        clocks = [clock][: len(self.stages)]
        for stage, following in pairwise(self.stages):
            length = stage.seq_len or seq_len
            clocks.append(clocks[-1] + max(0, -(-(following.start_tokens - clocks[-1]) // length)) * length)
        return clocks
