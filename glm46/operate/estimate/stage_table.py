"""The stages of a run's text as a table: what a step of each one is, what it needs, and whether it fits."""

from glm46.operate.estimate.memory import MemoryPlan
from glm46.operate.estimate.units import aligned, binary_size, token_count
from glm46.run.curriculum import describe_attention
from glm46.run.flops import training_flops_per_token
from glm46.run.plan import Plan
from glm46.run.stages import bubble

_HEADER: tuple[str, ...] = (
    "stage", "from", "tokens", "length", "window", "RoPE scaling", "sequences", "micro-batches", "bubble",
    "GFLOP/token", "memory", "fits",
)  # fmt: skip


def stage_table(plan: Plan, stages: list[MemoryPlan], capacity: float | None = None) -> list[str]:
    """A header, and a line for each stage that the run reaches, with the memory of the rank that needs most.

    Args:
        stages: `stage_memory` of the plan.
        capacity: bytes that a rank can fill; absent: unknown.
    """
    rows, clock = [_HEADER], plan.config.lr_scheduler.start_tokens
    for index, memory in enumerate(stages):
        stage, tokens = plan.text_stages[index], plan.stage_tokens[index]
        batches = plan.batches_of(index)
        micro_batches = [size // plan.rows_per_micro_batch for size in batches]
        bubbles = [f"{bubble(plan.config.parallelism, count):.0%}" for count in micro_batches]
        flops = training_flops_per_token(stage.shape, stage.seq_len, plan.document_tokens, plan.config.adapter)
        fits = "unknown" if capacity is None else "yes" if memory.total <= capacity else "no"
        rows.append((
            str(index + 1), token_count(clock), token_count(tokens), f"{stage.seq_len:,}",
            *describe_attention(stage.shape),
            _range(*(f"{size:,}" for size in batches)), _range(*(f"{count:,}" for count in micro_batches)),
            _range(*bubbles) if plan.layout.pp > 1 else "-",
            f"{flops / 1e9:,.4g}",
            binary_size(memory.total), fits,
        ))  # fmt: skip
        clock += tokens
    lines = aligned(rows)
    if len(rows) <= len(plan.text_stages):
        lines.append(f"stages {len(rows)} to {len(plan.text_stages)} begin after the end of this run")
    return lines


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"
