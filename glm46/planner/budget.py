"""Tokens, steps and days of a run."""

from dataclasses import dataclass

from glm46.config.presets import resolve_shape
from glm46.config.run import Run
from glm46.config.section import Schedule
from glm46.planner.curriculum import plan_stages
from glm46.planner.flops import training_flops_per_token

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Budget:
    """What a run trains on and what that takes."""

    tokens: float | None
    """None when the config states steps and the batch has a ramp, so that only running tells."""
    step_tokens: float | None
    """Tokens of one optimizer step; None under a ramp."""
    flops: float | None


def plan_budget(run: Run, batch_ranks: int) -> Budget:
    """Tokens and FLOPs of the whole run.

    Args:
        batch_ranks: ranks that read different sequences.
    """
    sequences = constant(run.training.global_batch_size)
    if run.training.global_batch_size is None:
        sequences = float(run.training.local_batch_size * batch_ranks)
    stages = plan_stages(run)
    lengths = {stage.seq_len for stage in stages}
    step_tokens = None if sequences is None or len(lengths) > 1 else sequences * lengths.pop()
    tokens = run.training.tokens
    if tokens is None and run.training.steps is not None and step_tokens is not None:
        tokens = run.training.steps * step_tokens
    if tokens is None:
        return Budget(None, step_tokens, None)
    left, flops = tokens, 0.0
    for stage in stages:
        here = left if stage.stop is None else min(left, (stage.stop - stage.first) * stage.seq_len)
        flops += here * training_flops_per_token(resolve_shape(run.model), stage.seq_len)
        left -= here
    return Budget(tokens, step_tokens, flops)


def constant(schedule: Schedule | None) -> float | None:
    """The value of a schedule that never changes, else None."""
    if isinstance(schedule, tuple):
        values = {value for _, value in schedule}
        return float(values.pop()) if len(values) == 1 else None
    return None if schedule is None else float(schedule)


def days(flops: float, devices: int, peak_flops: float, mfu: float) -> float:
    """Days that so many FLOPs take on devices that reach `mfu` of their peak."""
    return flops / (devices * peak_flops * mfu) / SECONDS_PER_DAY
