"""Tokens of a run."""

from collections.abc import Sequence

from glm46.config.run_config import RunConfig
from glm46.run.curriculum import TextStage, stage_at
from glm46.run.schedule import batch_sequences


def budget_tokens(config: RunConfig, stages: Sequence[TextStage], rows_per_micro_batch: int) -> int:
    """Tokens of this run, from its first step on: [training] tokens, or the tokens of its steps.

    Args:
        stages: all stages of the run's text.
        rows_per_micro_batch: sequences that all ranks together take in one micro-batch.
    """
    training = config.training
    if training.tokens is not None:
        return training.tokens
    total, samples, start = 0, 0, config.lr_scheduler.start_tokens
    batch, left = training.global_batch_size, training.steps
    ramp_ends = batch[-1][0] if isinstance(batch, tuple) else 0
    while left:
        rows = batch_sequences(batch, start + total, rows_per_micro_batch)
        stage = stage_at(stages, samples)
        # After a ramp all steps of a stage are equal, except its last one.
        room = rows * left if stage.stop is None else stage.stop - samples
        steps = min(left, -(-room // rows)) if start + total >= ramp_ends else 1
        rows = min(rows * steps, room)
        samples, total, left = samples + rows, total + rows * stage.seq_len, left - steps
    return total
