"""Schedules: pure functions of the tokens seen since the start of the curriculum.

No function has state, so a resumed run or a later phase gets the same values at the same token count. A phase that
starts at ``lr_scheduler.start_tokens`` adds this number to its own tokens.
"""

import math

from glm46.config.optimizer import LRSchedulerConfig
from glm46.config.section import Schedule


def schedule_value(schedule: Schedule, tokens: int) -> float:
    """Return the value of ``schedule`` after ``tokens`` tokens of the curriculum.

    Points are interpolated linearly. Two points with the same token count are a jump; the second one holds from that
    count on. Before the first and after the last point the nearest value holds.
    """
    if not isinstance(schedule, tuple):
        return float(schedule)
    if tokens < schedule[0][0]:
        return float(schedule[0][1])
    start, start_value = schedule[0]
    for end, end_value in schedule[1:]:
        if tokens < end:
            return start_value + (end_value - start_value) * ((tokens - start) / (end - start))
        start = end
        start_value = end_value
    return float(start_value)


def learning_rate_factor(tokens: int, scheduler: LRSchedulerConfig, total_tokens: int, step_tokens: int = 0) -> float:
    """Return the learning rate after ``tokens`` tokens of the curriculum, relative to its peak.

    Args:
        tokens: tokens since the start of the curriculum, ``scheduler.start_tokens`` included.
        total_tokens: end of the decay if ``scheduler.total_tokens`` is absent: the end of this run, counted from
            the start of the curriculum.
        step_tokens: tokens of the step that the rate is for. The warm-up counts them, so that the rate of the first
            step is not 0.

    The rate rises linearly over the warm-up, stays at its peak until the decay begins, and stays at
    ``min_lr_factor`` after the decay ends.
    Source: cosine, GLM-4.5 (arXiv 2508.06471, section 2.4); constant then linear or 1-sqrt, Hägele et al.
    (arXiv 2405.18392).
    """
    warmup = scheduler.warmup_tokens
    if tokens < warmup:
        return min(1.0, (tokens + step_tokens) / warmup)
    end = total_tokens if scheduler.total_tokens is None else scheduler.total_tokens
    begin = warmup if scheduler.decay_ratio is None else max(warmup, end - scheduler.decay_ratio * end)
    if tokens >= end:
        return scheduler.min_lr_factor
    if tokens <= begin:
        return 1.0
    progress = (tokens - begin) / (end - begin)
    remaining = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
    }[scheduler.decay_type]
    return scheduler.min_lr_factor + (1.0 - scheduler.min_lr_factor) * remaining


def batch_sequences(schedule: Schedule | None, tokens: int, multiple: int) -> int:
    """Return the sequences of the next optimizer step: the schedule's value rounded down to ``multiple``, but at least
    ``multiple``.

    ``multiple`` is the number of sequences of one micro-batch over all ranks. Without a schedule a step is one
    micro-batch.
    """
    if schedule is None:
        return multiple
    # The small term corrects integers that interpolation misses by a rounding error.
    micro_batches = math.floor(schedule_value(schedule, tokens) / multiple + 1e-9)
    return max(1, micro_batches) * multiple
