"""The cost of a whole run: steps, days, GPU-hours, energy and money; and the share of its time in which it trains, from
failures, restarts and the interval between checkpoints."""

import math
from dataclasses import dataclass, replace

from glm46.operate.estimate.plan_sizes import batches_of, run_flops
from glm46.operate.estimate.step_time import OrderOf, StepTime, step_time
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.plan import Plan
from glm46.run.schedule import batch_sequences

SECONDS_PER_DAY = 86_400
GPU_HOURS_PER_FAILURE = 50_700
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5)."""
RESTART_SECONDS = 315.0
"""Of a failure until the first step: 15 s to notice it, 5 min to start the ranks and load."""
STALL_SECONDS = 5.0
"""For which steps wait at each checkpoint, while it is copied to host memory."""
HOST_SHARE = 0.45
"""Power of CPUs, memory, network and fans of a node at work over that of its GPUs. At most it is 0.82: a DGX H100 takes
10.2 kW with eight GPUs of 700 W (NVIDIA's user guide)."""
PUE = 1.25
"""Power of a data centre over that of its computers. Uptime Institute's survey of 2024 has 1.56 on average; large new
ones state 1.1 to 1.2."""
_SENSITIVE = (
    "products", "experts", "attention", "memory", "link", "network", "overlap", "launch_seconds", "call_seconds",
)  # fmt: skip
"""Efficiencies whose effect on a run is shown."""
_WIDE = {
    "products": (0.7, 1.6), "experts": (0.6, 2.2), "attention": (0.6, 2.0), "memory": (0.7, 1.7),
    "recomputation": (0.6, 1.9), "waiting for ep": (0.1, 2.0), "waiting for tp": (0.3, 2.0),
    "waiting for weights and gradients": (0.1, 2.0), "pipeline bubble": (0.4, 2.2),
}  # fmt: skip
"""True over predicted time of a part of a step whose efficiency is assumed: a judgement from runs that others
published (docs/planner.md)."""
_OTHERS = (0.5, 2.5)
_NARROW = (0.87, 1.15)
"""Of a part whose efficiencies are measured."""
_BESIDE = 0.15, 0.3
"""Of a step, less and more than its parts say: overlaps and fusions that are not planned; work of the host, uneven
ranks and nodes. It is never measured."""
_DECIDED_BY = {
    "recomputation": ("products", "experts", "attention", "memory"), "waiting for ep": ("link", "network"),
    "waiting for tp": ("link", "network"), "waiting for cp": ("link", "network"), "optimizer": ("memory",),
    "waiting for weights and gradients": ("link", "network", "overlap"), "launches": ("launch_seconds",),
    "copies of weights and gradients": ("memory",), "waiting for the host": ("host_bytes_per_second",),
    "waiting for the disk": ("disk_bytes_per_second",), "pipeline bubble": ("products", "experts", "attention"),
}  # fmt: skip
"""The efficiencies that a part depends on; of a kernel, that of its own name."""


@dataclass(frozen=True)
class StageCost:
    """A stage of text."""

    steps: int
    seconds: float
    largest: StepTime
    """Of its largest step."""


@dataclass(frozen=True)
class RunCost:
    """A run on a cluster, without the time of starts, checkpoints, validation and faults."""

    cluster: TargetCluster
    stages: list[StageCost]
    tokens: int
    flops: float
    """Of the whole run, as the model needs them."""

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
        """True time of the run over the predicted one, at least and at most, and the three parts that make most of it.

        The deviations of the parts are independent: the root of the sum of their squares is that of the step.
        """
        step, measured = self.longest.largest, self.cluster.efficiencies.measured
        squares: dict[str, tuple[float, float]] = {}
        for name, seconds in step.parts.items():
            is_measured, share = measured.issuperset(_DECIDED_BY.get(name, (name,))), seconds / step.seconds
            low, high = _NARROW if is_measured else _WIDE.get(name, _OTHERS)
            squares[name] = ((1 - low) * share) ** 2, ((high - 1) * share) ** 2
        low, high = (sum(each[side] for each in squares.values()) for side in (0, 1))
        largest = sorted(squares, key=lambda name: -sum(squares[name]))[:3]
        return 1 - math.sqrt(low + _BESIDE[0] ** 2), 1 + math.sqrt(high + _BESIDE[1] ** 2), largest

    @property
    def gpu_hours(self) -> float:
        return self.cluster.gpus * self.days * 24

    @property
    def megawatt_hours(self) -> float | None:
        """GPUs at their rated power, their hosts and the data centre; None for a GPU whose power is not known."""
        watts = self.cluster.gpu.watts
        return self.gpu_hours * watts * (1 + HOST_SHARE) * PUE / 1e6 if watts else None

    @property
    def dollars(self) -> float | None:
        """None without a price."""
        return None if self.cluster.price is None else self.gpu_hours * self.cluster.price

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.days * SECONDS_PER_DAY)

    @property
    def mfu(self) -> float:
        """Share of the BF16 peak of all GPUs over the whole run."""
        return self.flops / (self.cluster.gpus * self.cluster.gpu.bf16_flops * self.days * SECONDS_PER_DAY)


def run_cost(plan: Plan, cluster: TargetCluster, order_of: OrderOf | None) -> RunCost:
    """Predict the cost of a run; arguments of `step_time`.

    A step takes a fixed time and a time per micro-batch. Both follow from the smallest and the largest step of a stage,
    so a ramp of the batch size needs no more than two steps.
    """
    stages = []
    for index, steps in enumerate(count_steps(plan)):
        if not plan.stage_tokens[index]:
            break
        smallest, largest = batches_of(plan, index)
        time = step_time(plan, index, largest, cluster, order_of)
        seconds, sequences = time.seconds, plan.stage_tokens[index] / plan.text_stages[index].seq_len
        each, fixed = seconds / largest, 0.0
        if smallest < largest:
            least = step_time(plan, index, smallest, cluster, order_of).seconds
            each = (seconds - least) / (largest - smallest)
            fixed = seconds - each * largest
        stages.append(StageCost(steps, fixed * steps + each * sequences, time))
    return RunCost(cluster, stages, plan.budget_tokens, run_flops(plan))


def sensitivity(plan: Plan, cost: RunCost) -> dict[str, tuple[float, float]]:
    """Days of a run with 20 % less and with 20 % more of each efficiency, as its longest stage changes; a time is taken
    as its inverse, and a share ends at 1. Pipelines have the bubble of equal stages here."""
    index = cost.stages.index(cost.longest)
    sequences, days = batches_of(plan, index)[1], {}
    base = step_time(plan, index, sequences, cost.cluster, None).seconds
    for name in _SENSITIVE:
        value, found = getattr(cost.cluster.efficiencies, name), []
        for factor in (0.8, 1.2):
            changed = value / factor if name.endswith("seconds") else min(value * factor, 1.0)
            cluster = replace(cost.cluster, efficiencies=replace(cost.cluster.efficiencies, **{name: changed}))
            found.append(cost.days * (step_time(plan, index, sequences, cluster, None).seconds / base))
        days[name] = found[0], found[1]
    return days


def count_steps(plan: Plan) -> list[int]:
    """The optimizer steps of each stage of text."""
    counts, batch, begins = [], plan.config.training.global_batch_size, plan.config.lr_scheduler.start_tokens
    ramp_ends = batch[-1][0] if isinstance(batch, tuple) else 0
    for stage, tokens in zip(plan.text_stages, plan.stage_tokens, strict=True):
        clock, left, count = begins, tokens // stage.seq_len, 0
        while left > 0:
            rows = batch_sequences(batch, clock, plan.rows_per_micro_batch)
            steps = -(-left // rows) if clock >= ramp_ends else 1  # of equal size
            count, left, clock = count + steps, left - rows * steps, clock + rows * steps * stage.seq_len
        counts.append(count)
        begins += tokens
    return counts


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
    days: float | None
    """Of the run with failures, checkpoints and restarts; None if no interval ever ends."""
    gpu_hours: float | None
    dollars: float | None


def effective_time(plan: Plan, cost: RunCost) -> EffectiveTime | None:
    """The effective time of a run; None without checkpoints, and for rollouts, whose time is not predicted."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.enable or plan.config.rl is not None:
        return None
    between, step = GPU_HOURS_PER_FAILURE / cost.cluster.gpus * 3600, cost.days * SECONDS_PER_DAY / cost.steps
    interval = min(checkpoint.interval, cost.steps) * step
    best = min(max(round(math.sqrt(2 * STALL_SECONDS * between) / step), 1), cost.steps)
    ratio, best_ratio = (effective_ratio(seconds, between) for seconds in (interval, best * step))
    of_run = cost.days, cost.gpu_hours, cost.dollars
    longer = (None if each is None or not ratio else each / ratio for each in of_run)
    return EffectiveTime(between, interval, ratio, best, best_ratio, *longer)


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
