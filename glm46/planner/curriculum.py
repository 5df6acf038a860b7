"""The stages of a run's text: which samples have which length and come from which mixture.

A stage ends behind a number of samples that follows from the configuration alone, so that layouts, batch sizes and
resumes cannot move it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from glm46.config.run_config import RunConfig


class TextStage(NamedTuple):
    """A range of global sample numbers and what they are."""

    first: int
    """The first sample."""
    stop: int | None
    """The one behind the last sample; None: until the run ends."""
    seq_len: int
    """Tokens per sample."""
    weights: tuple[float, ...]
    """Share of each source in the order of data.sources; 0 leaves it out."""
    documents: tuple[float, float]
    """The share of every source's documents that is read."""


def plan_stages(config: RunConfig) -> list[TextStage]:
    """The stages of a run in their order, those without a sample left out."""
    weights = tuple(source.weight for source in config.data.sources)
    if not config.data.stages:
        return [TextStage(0, None, config.training.seq_len, weights, (0.0, 1.0))]
    stages: list[TextStage] = []
    clock, first = config.lr_scheduler.start_tokens, 0
    for number, stage in enumerate(config.data.stages):
        seq_len, stop = stage.seq_len or config.training.seq_len, None
        if number + 1 < len(config.data.stages):
            samples = max(0, -(-(config.data.stages[number + 1].start_tokens - clock) // seq_len))
            clock, stop = clock + samples * seq_len, first + samples
        if stop != first:
            stages.append(TextStage(first, stop, seq_len, stage.weights or weights, stage.documents))
        first = stop or first
    return stages


def stage_at(stages: Sequence[TextStage], sample: int) -> TextStage:
    """The stage that a global sample number belongs to."""
    return next(stage for stage in stages if stage.stop is None or sample < stage.stop)
