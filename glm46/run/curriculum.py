"""Stages of a run's text: the sequence length, the mixture and the model's shape of each range of samples.

The number of samples of a stage depends only on the config, not on layout, batch size and resumes.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from glm46.config.indexer import IndexerTraining
from glm46.config.model import ModelShape
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig


class TextStage(NamedTuple):
    """A range of global sample numbers with its sequence length, mixture and shape."""

    first: int
    """Number of the first sample."""
    stop: int | None
    """Number after the last sample; None: until the run ends."""
    seq_len: int
    """Tokens per sample."""
    weights: tuple[float, ...]
    """Share of each source in the order of data.sources; 0 skips it."""
    documents: tuple[float, float]
    """Part of every source's documents that is read, as a range within 0 to 1."""
    shape: ModelShape
    """Shape of the model with the sliding window and the RoPE scaling of the stage."""
    indexer: IndexerTraining
    """What the stage trains of a model with sparse attention."""


def plan_stages(config: RunConfig) -> tuple[TextStage, ...]:
    """Compute the stages of a run in order, without empty stages."""
    weights = tuple(source.weight for source in config.data.sources)
    shape = resolve_shape(config.model)
    default = config.indexer.train
    if not config.data.stages:
        return (TextStage(0, None, config.training.seq_len, weights, (0.0, 1.0), shape, default),)
    stages: list[TextStage] = []
    clocks = config.data.stage_clocks(config.training.seq_len, config.lr_scheduler.start_tokens)
    first = 0
    for stage, clock, next_clock in zip_longest(config.data.stages, clocks, clocks[1:]):
        seq_len = stage.seq_len or config.training.seq_len
        stop = None if next_clock is None else first + (next_clock - clock) // seq_len
        if stop != first:
            mixture = stage.weights or weights
            own_shape = stage.shape_of(shape)
            training = stage.indexer or default
            stages.append(TextStage(first, stop, seq_len, mixture, stage.documents, own_shape, training))
        first = stop or first  # None: no stage follows
    return tuple(stages)


def stage_at(stages: Sequence[TextStage], sample: int) -> TextStage:
    """Return the stage of a global sample number."""
    return next(stage for stage in stages if stage.stop is None or sample < stage.stop)


def describe_attention(shape: ModelShape) -> tuple[str, str]:
    """Describe the sliding window and the RoPE scaling of a shape."""
    window = shape.sliding_window
    scaling = shape.rope_scaling
    original_length = (
        "" if scaling is None or scaling.rope_type == "linear" else f" of {scaling.original_max_position_embeddings:,}"
    )
    scaling_text = "none" if scaling is None else f"{scaling.rope_type} x {scaling.factor:g}{original_length}"
    return "none" if window is None else f"{window:,}", scaling_text
