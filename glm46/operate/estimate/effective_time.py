"""The share of its time in which a run trains, from failures, restarts and the interval between checkpoints."""

import math
from dataclasses import dataclass

from glm46.operate.estimate.run_cost import SECONDS_PER_DAY, RunCost
from glm46.run.plan import Plan

GPU_HOURS_PER_FAILURE = 50_700
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5)."""
RESTART_SECONDS = 315.0
"""Of a failure until the first step: 15 s to notice it, 5 min to start the ranks and load."""
STALL_SECONDS = 5.0
"""For which steps wait at each checkpoint, while it is copied to host memory."""


@dataclass(frozen=True)
class EffectiveTime:
    """Checkpoints of a run on a cluster that fails at a given rate."""

    failure_seconds: float
    """Mean time between two failures."""
    interval_seconds: float
    """Between two checkpoints, as configured."""
    ratio: float
    """Of the time that is spent on steps which are not lost, with this interval."""
    best_steps: int
    """Interval with the highest ratio, in steps."""
    best_ratio: float


def effective_time(plan: Plan, cost: RunCost) -> EffectiveTime | None:
    """The effective time of a run; None without checkpoints, and for rollouts, whose time is not predicted."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.enable or plan.config.rl is not None:
        return None
    between, step = GPU_HOURS_PER_FAILURE / cost.cluster.gpus * 3600, cost.days * SECONDS_PER_DAY / cost.steps
    interval = min(checkpoint.interval, cost.steps) * step
    best = min(max(round(math.sqrt(2 * STALL_SECONDS * between) / step), 1), cost.steps)
    ratios = (effective_ratio(seconds, between) for seconds in (interval, best * step))
    return EffectiveTime(between, interval, next(ratios), best, next(ratios))


def effective_ratio(interval: float, between: float) -> float:
    """Share of the time spent on steps that are not lost, with failures at random (Daly, FGCS 22(3), 2006).

    Args:
        interval: seconds between two checkpoints.
        between: mean seconds between two failures.
    """
    exponent = (interval + STALL_SECONDS) / between
    if exponent > 500:  # no interval ever ends
        return 0.0
    return interval / (between * math.exp(RESTART_SECONDS / between) * math.expm1(exponent))
