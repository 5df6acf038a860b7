"""The figures of the requirement documents beside those of the planner, with the reason for each difference.

The figures stand in "GLM-4.6 Pre-Training Methodology" (lines 18 to 113) and in the quick start guide (lines 228 to
396). Third parties wrote both; the makers of GLM-4.6 published none of them.
"""

from dataclasses import dataclass

from glm46.planner.memory import largest_stage
from glm46.planner.report import RunPlan

_GPUS, _PRICE, _TOKENS = 8192, 2.50, 23e12
_DAYS, _GPU_HOURS, _DOLLARS, _TOKENS_PER_SECOND = (82, 92), 753_664, 27.7e6, 2.8e6
_FLOPS_PER_TOKEN, _PEAK, _SUSTAINED, _MEMORY_GB = 633.6e9, 16.2e18, 7.4e18, 208
_ALL_DAYS, _ALL_DOLLARS, _OTHER_DOLLARS = 127, 65.9e6, 3.5e6
_SMALL_GPUS, _SMALL_DAYS, _SMALL_DOLLARS = 64, 30, 138e3
_BF16_PEAK = 989.4e12


@dataclass(frozen=True)
class Comparison:
    """One figure."""

    name: str
    stated: str
    planned: str
    why: str


def compare_documents(phases: list[RunPlan], small: RunPlan) -> list[Comparison]:
    """Compare the documents with the plans of the three phases on their cluster, and of their experiment on 64 GPUs.

    Args:
        phases, small: runs that fit.
    """
    costs = [run.cost for run in phases]
    assert all(costs) and small.cost is not None, "the shipped phases fit, a test says so"
    days, hours = sum(cost.days for cost in costs), sum(cost.gpu_hours for cost in costs)
    flops, tokens = sum(cost.flops for cost in costs), sum(cost.tokens for cost in costs)
    rate, seconds = tokens / (days * 86_400), days * 86_400
    memory = max(largest_stage(run.memory).total for run in phases)
    bubbles = [stage.largest.timeline.bubble for cost in costs for stage in cost.stages if stage.largest.timeline]
    of_days = _GPUS * _DAYS[1] * 24
    achieved, peak = flops / seconds, _GPUS * _BF16_PEAK
    share = _TOKENS_PER_SECOND * flops / tokens / peak
    small_share = small.cost.flops / (_SMALL_GPUS * _BF16_PEAK * _SMALL_DAYS * 86_400)
    return [
        Comparison(
            "FLOP per token", f"{_FLOPS_PER_TOKEN / 1e9:,.1f}G", f"{flops / tokens / 1e9:,.1f}G",
            "6 x 32B = 192G is forward and backward; the document takes it as forward, adds twice as much for "
            "backward, and 10% for routing. Here attention and MTP are counted too",
        ),
        Comparison(
            "FLOP of the run", "14.6 yotta, then 4.6 zetta", f"{flops / 1e24:,.2f} yotta",
            f"23T x 633.6G = {_TOKENS * _FLOPS_PER_TOKEN / 1e24:,.1f} yotta. 4.6 zetta would be "
            f"{4.6e21 / _TOKENS / 1e9:,.1f}G per token; 4.6 yotta would be {4.6e24 / _TOKENS / 1e9:,.0f}G, near ours",
        ),
        Comparison(
            "peak of the cluster", f"{_PEAK / 1e18:,.1f} exaFLOP/s", f"{peak / 1e18:,.1f} exaFLOP/s",
            "1,979 TFLOP/s per GPU holds for structured sparsity; dense BF16 has 989",
        ),
        Comparison(
            "sustained", f"{_SUSTAINED / 1e18:,.1f} exaFLOP/s (45%)",
            f"{achieved / 1e18:,.2f} exaFLOP/s ({achieved / peak:.1%})",
            f"its own 2.8M tokens/s are {share:.1%} of the dense peak; at 7.4 exaFLOP/s its 14.6 yottaFLOP would take "
            f"{_TOKENS * _FLOPS_PER_TOKEN / _SUSTAINED / 86_400:,.0f} days, ours {flops / _SUSTAINED / 86_400:,.0f}",
        ),
        Comparison(
            "tokens per second", f"{_TOKENS_PER_SECOND / 1e6:,.1f}M", f"{rate / 1e6:,.2f}M",
            f"23T at 2.8M take {_TOKENS / _TOKENS_PER_SECOND / 86_400:,.0f} days, near its 82 to 92. Steps of 4M "
            "tokens are 512 for each GPU: most of the time ranks wait for each other",
        ),
        Comparison(
            "days", f"{_DAYS[0]} to {_DAYS[1]}", f"{days:,.0f} ({', '.join(f'{cost.days:,.0f}' for cost in costs)})",
            "50, 30 and 12 for the three phases; no formula is given",
        ),
        Comparison(
            "GPU-hours", f"{_GPU_HOURS:,}", f"{hours:,.0f}",
            f"8,192 x 92 = 753,664: hours, not days. 92 days are {of_days:,} GPU-hours",
        ),
        Comparison(
            "cost at $2.50", f"${_DOLLARS / 1e6:,.1f}M", f"${hours * _PRICE / 1e6:,.1f}M",
            f"753,664 GPU-hours cost ${_GPU_HOURS * _PRICE / 1e6:,.1f}M, 92 days ${of_days * _PRICE / 1e6:,.1f}M; "
            f"$27.7M are {_DOLLARS / _PRICE / _GPUS / 24:,.0f} days",
        ),
        Comparison(
            "memory per GPU", f"{_MEMORY_GB} GB, then 40 GB", f"{memory / 1e9:,.0f} GB",
            "no GPU of 80 GB holds 208 GB; 40 GB is its guess of the activations",
        ),
        Comparison(
            "pipeline waits", "12%", f"{min(bubbles):.0%} to {max(bubbles):.0%}",
            "(16 - 1) / 8 micro-batches = 1.9 by its formula. Here: torch's order of actions, stages as they are split",
        ),
        Comparison(
            "all training", f"{_ALL_DAYS} days, ${_ALL_DOLLARS / 1e6:,.1f}M",
            f"${_GPUS * _ALL_DAYS * 24 * _PRICE / 1e6:,.1f}M + ${_OTHER_DOLLARS / 1e6:,.1f}M",
            "8,192 x 127 days x 24 x $2.50, and $3.5M for people and data, which no planner knows: its own sum, and it "
            "does not agree with $27.7M for 82 of the 127 days",
        ),
        Comparison(
            "64 H100, 100B tokens", f"{_SMALL_DAYS} days, ${_SMALL_DOLLARS / 1e3:,.0f}K",
            f"{small.cost.days:,.1f} days, ${small.cost.gpu_hours * _PRICE / 1e3:,.1f}K",
            f"64 x 30 x 24 hours x $3.00. 30 days would be an MFU of {small_share:.1%}; ours is {small.cost.mfu:.1%}",
        ),
    ]  # fmt: skip
