"""Predicts the cost of a run (steps, days, GPU-hours, energy, money), and the share of its time spent on training,
given failures, restarts and the interval between checkpoints."""

import math
from dataclasses import dataclass, replace

from glm46.operate.estimate.plan_sizes import batches_of, run_flops
from glm46.operate.estimate.step_time import StepTime, step_time
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.plan import Plan
from glm46.run.schedule import batch_sequences

SECONDS_PER_DAY = 86_400
GPU_HOURS_PER_FAILURE = 50_700
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5)."""
RESTART_SECONDS = 315.0
"""Time from a failure to the first step: 15 s to detect it, 5 min to start the ranks and load."""
STALL_SECONDS = 5.0
"""Time that steps wait at each checkpoint, while it is copied to host memory."""
HOST_SHARE = 0.45
"""Power of CPUs, memory, network and fans of a busy node, relative to its GPUs. The maximum is 0.82: a DGX H100 takes
10.2 kW with eight GPUs of 700 W (NVIDIA's user guide)."""
PUE = 1.25
"""Power of a data centre relative to its computers. The survey of the Uptime Institute of 2024 has 1.56 on average;
large new ones report 1.1 to 1.2."""
_VARIED = (
    "products",
    "experts",
    "attention",
    "memory",
    "link",
    "network",
    "overlap",
    "launch_seconds",
    "call_seconds",
)
"""Efficiencies whose effect on a run is shown."""
_ASSUMED_RATIOS = {
    "products": (0.7, 1.6),
    "experts": (0.6, 2.2),
    "attention": (0.6, 2.0),
    "memory": (0.7, 1.7),
    "recomputation": (0.6, 1.9),
    "waiting for ep": (0.1, 2.0),
    "waiting for tp": (0.3, 2.0),
    "waiting for weights and gradients": (0.1, 2.0),
    "pipeline bubble": (0.4, 2.2),
}
"""Lowest and highest ratio of true to predicted time of a part of a step, if its efficiency is assumed: estimated from
runs that others published (docs/planner.md)."""
_OTHER_RATIO = (0.5, 2.5)
"""The same for a part that `_ASSUMED_RATIOS` does not have."""
_MEASURED_RATIO = (0.87, 1.15)
"""The same for a part whose efficiencies are measured."""
_UNMODELLED = 0.15, 0.3
"""How much shorter and how much longer than the sum of its parts a step may be, as shares of it. Overlaps and fusions
that are not modelled shorten it; host work, uneven ranks and nodes lengthen it. These shares are never measured."""
_EFFICIENCIES_OF_PART = {
    "recomputation": ("products", "experts", "attention", "memory"),
    "waiting for ep": ("link", "network"),
    "waiting for tp": ("link", "network"),
    "waiting for cp": ("link", "network"),
    "optimizer": ("memory",),
    "waiting for weights and gradients": ("link", "network", "overlap"),
    "launches": ("launch_seconds",),
    "copies of weights and gradients": ("memory",),
    "waiting for the host": ("host_bytes_per_second",),
    "waiting for the disk": ("disk_bytes_per_second",),
    "pipeline bubble": ("products", "experts", "attention"),
}
"""Efficiencies that a part depends on; a kernel depends on the one of its own name."""


@dataclass(frozen=True)
class StageCost:
    """The predicted steps of a stage of text."""

    steps: int
    seconds: float
    largest: StepTime
    """Time of its largest step."""


@dataclass(frozen=True)
class RunCost:
    """The predicted cost of a run on a cluster, without the time of starts, checkpoints, validation and faults."""

    cluster: TargetCluster
    stages: list[StageCost]
    tokens: int
    flops: float
    """Model FLOPs of the complete run."""

    @property
    def longest(self) -> StageCost:
        """The stage that takes most time."""
        return max(self.stages, key=lambda stage: stage.seconds)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def days(self) -> float:
        return sum(stage.seconds for stage in self.stages) / SECONDS_PER_DAY

    @property
    def spread(self) -> tuple[float, float, list[str]]:
        """Lowest and highest ratio of true to predicted time, and the three parts of a step that contribute most.

        The parts deviate independently, so their squared deviations add up.
        """
        step = self.longest.largest
        measured = self.cluster.efficiencies.measured
        squares: dict[str, tuple[float, float]] = {}
        for name, seconds in step.parts.items():
            is_measured = measured.issuperset(_EFFICIENCIES_OF_PART.get(name, (name,)))
            share = seconds / step.seconds
            low, high = _MEASURED_RATIO if is_measured else _ASSUMED_RATIOS.get(name, _OTHER_RATIO)
            squares[name] = ((1 - low) * share) ** 2, ((high - 1) * share) ** 2
        low_square = sum(low for low, _ in squares.values())
        high_square = sum(high for _, high in squares.values())
        largest = sorted(squares, key=lambda name: -sum(squares[name]))[:3]
        shorter, longer = _UNMODELLED
        return 1 - math.sqrt(low_square + shorter**2), 1 + math.sqrt(high_square + longer**2), largest

    @property
    def gpu_hours(self) -> float:
        return self.cluster.gpus * self.days * 24

    @property
    def megawatt_hours(self) -> float | None:
        """Energy of GPUs at rated power, their hosts and the data centre; None for a GPU of unknown power."""
        watts = self.cluster.gpu.watts
        return self.gpu_hours * watts * (1 + HOST_SHARE) * PUE / 1e6 if watts else None

    @property
    def dollars(self) -> float | None:
        """Cost at the cluster's price; None without a price."""
        return None if self.cluster.price is None else self.gpu_hours * self.cluster.price

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.days * SECONDS_PER_DAY)

    @property
    def mfu(self) -> float:
        """Share of the BF16 peak of all GPUs over the complete run."""
        return self.flops / (self.cluster.gpus * self.cluster.gpu.bf16_flops * self.days * SECONDS_PER_DAY)


def run_cost(plan: Plan, cluster: TargetCluster) -> RunCost:
    """Predict the cost of a run on a cluster.

    A step takes a fixed time plus a time per sequence. Both are derived from the smallest and the largest step of a
    stage, so even a ramp of the batch size needs only two predicted steps.
    """
    stages = []
    for index, steps in enumerate(count_steps(plan)):
        if not plan.stage_tokens[index]:
            break
        smallest, largest = batches_of(plan, index)
        largest_step = step_time(plan, index, largest, cluster)
        seconds = largest_step.seconds
        sequences = plan.stage_tokens[index] / plan.text_stages[index].seq_len
        per_sequence = seconds / largest
        fixed = 0.0
        if smallest < largest:
            min_seconds = step_time(plan, index, smallest, cluster).seconds
            per_sequence = (seconds - min_seconds) / (largest - smallest)
            fixed = seconds - per_sequence * largest
        stages.append(StageCost(steps, fixed * steps + per_sequence * sequences, largest_step))
    return RunCost(cluster, stages, plan.budget_tokens, run_flops(plan))


def sensitivity(plan: Plan, cost: RunCost) -> dict[str, tuple[float, float]]:
    """Return the days of a run with 20 % less and 20 % more of each efficiency, scaled by its longest stage. Times are
    divided instead of multiplied, and shares are limited to 1."""
    index = cost.stages.index(cost.longest)
    sequences = batches_of(plan, index)[1]
    days = {}
    base = step_time(plan, index, sequences, cost.cluster).seconds
    for name in _VARIED:
        value = getattr(cost.cluster.efficiencies, name)
        days_by_factor = []
        for factor in (0.8, 1.2):
            changed = value / factor if name.endswith("seconds") else min(value * factor, 1.0)
            cluster = replace(cost.cluster, efficiencies=replace(cost.cluster.efficiencies, **{name: changed}))
            days_by_factor.append(cost.days * (step_time(plan, index, sequences, cluster).seconds / base))
        days[name] = days_by_factor[0], days_by_factor[1]
    return days


def count_steps(plan: Plan) -> list[int]:
    """Return the optimizer steps of each stage of text."""
    counts = []
    batch = plan.config.training.global_batch_size
    begins = plan.config.lr_scheduler.start_tokens
    ramp_ends = batch[-1][0] if isinstance(batch, tuple) else 0
    for stage, tokens in zip(plan.text_stages, plan.stage_tokens, strict=True):
        clock = begins
        remaining = tokens // stage.seq_len
        count = 0
        while remaining > 0:
            rows = batch_sequences(batch, clock, plan.rows_per_micro_batch)
            steps = -(-remaining // rows) if clock >= ramp_ends else 1  # all of equal size
            count += steps
            remaining -= rows * steps
            clock += rows * steps * stage.seq_len
        counts.append(count)
        begins += tokens
    return counts


@dataclass(frozen=True)
class EffectiveTime:
    """Predicted checkpoints and losses of a run on a cluster that fails at a given rate."""

    failure_seconds: float
    """Mean time between two failures."""
    interval_seconds: float
    """Time between two checkpoints, as configured."""
    ratio: float
    """Share of the time spent on steps that are not lost, with this interval."""
    best_steps: int
    """Interval with the highest ratio, in steps."""
    best_ratio: float
    days: float | None
    """Days of the run including failures, checkpoints and restarts; None if no interval ever completes."""
    gpu_hours: float | None
    dollars: float | None


def effective_time(plan: Plan, cost: RunCost) -> EffectiveTime | None:
    """Predict the effective time of a run; None without checkpoints, and with rollouts, whose time is not predicted."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.enable or plan.config.rl is not None:
        return None
    between_failures = GPU_HOURS_PER_FAILURE / cost.cluster.gpus * 3600
    step_seconds = cost.days * SECONDS_PER_DAY / cost.steps
    interval = min(checkpoint.interval, cost.steps) * step_seconds
    # First-order optimum. Source: Young, CACM 17(9), 1974.
    best_seconds = math.sqrt(2 * STALL_SECONDS * between_failures)
    best_steps = min(max(round(best_seconds / step_seconds), 1), cost.steps)
    ratio = effective_ratio(interval, between_failures)
    best_ratio = effective_ratio(best_steps * step_seconds, between_failures)

    def with_losses(total: float | None) -> float | None:
        return None if total is None or not ratio else total / ratio

    return EffectiveTime(
        failure_seconds=between_failures,
        interval_seconds=interval,
        ratio=ratio,
        best_steps=best_steps,
        best_ratio=best_ratio,
        days=with_losses(cost.days),
        gpu_hours=with_losses(cost.gpu_hours),
        dollars=with_losses(cost.dollars),
    )


def effective_ratio(interval: float, between: float) -> float:
    """Return the share of time spent on steps that are not lost, with random failures (Daly, FGCS 22(3), 2006).

    Args:
        interval: seconds between two checkpoints.
        between: mean seconds between two failures.
    """
    exponent = (interval + STALL_SECONDS) / between
    if exponent > 500:  # no interval ever completes
        return 0.0
    return interval / (between * math.exp(RESTART_SECONDS / between) * math.expm1(exponent))
