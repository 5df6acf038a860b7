"""Tokens, steps and days of a run."""

from collections.abc import Iterator
from dataclasses import dataclass

from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.planner.curriculum import TextStage, plan_stages, stage_at
from glm46.planner.flops import training_flops_per_token
from glm46.planner.schedule import batch_sequences

SECONDS_PER_DAY = 86_400


def budget_tokens(config: RunConfig, rows_per_micro_batch: int) -> int:
    """Tokens of this run, from its first step on: [training] tokens, or the tokens of its steps.

    Args:
        rows_per_micro_batch: sequences that all ranks together take in one micro-batch.
    """
    training = config.training
    if training.tokens is not None:
        return training.tokens
    total, samples, start, stages = 0, 0, config.lr_scheduler.start_tokens, plan_stages(config)
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


def stage_tokens(config: RunConfig, total: int) -> Iterator[tuple[TextStage, int]]:
    """Each stage of a run with its number of tokens."""
    for stage in plan_stages(config):
        here = total if stage.stop is None else min(total, (stage.stop - stage.first) * stage.seq_len)
        total -= here
        yield stage, here


@dataclass(frozen=True)
class Budget:
    """Tokens and FLOPs of a run."""

    tokens: int
    step_tokens: int | None
    """Tokens of one optimizer step; None if steps differ."""
    flops: float


def plan_budget(config: RunConfig, dp_degree: int) -> Budget:
    """Tokens and FLOPs of the whole run.

    Args:
        dp_degree: ranks that read different sequences, `Layout.dp_degree`.
    """
    rows, batch = config.training.local_batch_size * dp_degree, config.training.global_batch_size
    tokens, shape = budget_tokens(config, rows), resolve_shape(config.model)
    lengths = {stage.seq_len for stage in plan_stages(config)}
    differ = isinstance(batch, tuple) or len(lengths) > 1
    return Budget(
        tokens,
        None if differ else batch_sequences(batch, 0, rows) * lengths.pop(),
        sum(here * training_flops_per_token(shape, stage.seq_len) for stage, here in stage_tokens(config, tokens)),
    )


def days(flops: float, devices: int, peak_flops: float, mfu: float) -> float:
    """Days that this many FLOPs take on devices that reach `mfu` of their peak."""
    return flops / (devices * peak_flops * mfu) / SECONDS_PER_DAY
