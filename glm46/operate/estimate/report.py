"""Formats the plan of a run as text and as numbers: parameters, FLOPs, memory, time and cost."""

from dataclasses import asdict, dataclass
from typing import Any

from glm46.config.faults import counted
from glm46.operate.estimate.generation import EngineOptions, Rollouts, plan_rollouts, rollout_lines, rollout_numbers
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.memory import MemoryPlan, largest_stage, stage_memory
from glm46.operate.estimate.plan_sizes import hugging_face_bytes, run_flops, step_tokens
from glm46.operate.estimate.requirement import Verdict, judge, memory_lines
from glm46.operate.estimate.run_cost import (
    HOST_SHARE,
    PUE,
    RESTART_SECONDS,
    SECONDS_PER_DAY,
    STALL_SECONDS,
    RunCost,
    effective_time,
    run_cost,
    sensitivity,
)
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.units import amount, decimal_size, duration, flops_text, plan_line, run_time
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.curriculum import TextStage
from glm46.run.parameters import adapter_rows, count_parameters, describe_base
from glm46.run.plan import Plan, describe_exchange

_PLENTY = 2**60
"""Cores and bytes of host memory of a cluster other than this machine: so large that they never limit."""


@dataclass(frozen=True)
class RunPlan:
    """The result of `python -m glm46 plan`."""

    plan: Plan
    cluster: TargetCluster
    memory: list[MemoryPlan]
    """Memory of the rank that needs most, by stage of text."""
    verdict: Verdict
    cost: RunCost
    """Cost of the run, even if it does not fit."""
    sensitivity: dict[str, tuple[float, float]]
    """See `sensitivity`."""
    rollouts: Rollouts | None
    """Rollouts of a run with [rl]; None if it does not fit."""


def plan_run(plan: Plan, cluster: TargetCluster, engines: EngineOptions | None = None) -> RunPlan:
    """Plan a run on a cluster; ``engines`` as in `plan_rollouts`."""
    gpu = Gpu(cluster.gpu.name, cluster.gpu.memory_bytes)
    verdict = judge(plan, Machine(_PLENTY, _PLENTY, _PLENTY, (gpu,), nodes=cluster.gpus))
    cost = run_cost(plan, cluster)
    has_rollouts = verdict.fits and plan.config.rl is not None
    rollouts = plan_rollouts(plan, cost, engines or EngineOptions()) if has_rollouts else None
    return RunPlan(plan, cluster, stage_memory(plan), verdict, cost, sensitivity(plan, cost), rollouts)


def plan_text(run: RunPlan, local: tuple[Machine, Verdict] | None = None) -> str:
    """Format the plan on one screen.

    Args:
        local: another machine to compare the run with, and its verdict.
    """
    plan = run.plan
    layout = run.plan.layout
    longest = max(plan.text_stages, key=lambda stage: stage.seq_len)
    degrees = f"pp {layout.pp}, replicate {layout.dp_replicate}, shard {layout.dp_shard}, cp {layout.cp}, "
    degrees += f"tp {layout.tp}, ep {layout.ep}"
    sections = {
        f"{plan.config.job.description} ({plan.config.model.flavor})": [],
        "parameters": _parameter_lines(plan),
        f"FLOPs per token, forward and backward, at {longest.seq_len:,} tokens": _flop_lines(plan, longest),
        f"memory of each of {counted(layout.world_size, 'rank')} ({degrees})": memory_lines(largest_stage(run.memory)),
        "stages of text": run.verdict.stages,
        "run": _run_lines(plan, run.cluster),
        f"does it fit on {run.cluster.gpus:,} x {run.cluster.gpu.name}": run.verdict.lines,
    }
    if local is not None:
        machine, verdict = local
        sections[f"does it fit on this machine ({machine.describe()})"] = verdict.lines
    sections |= _time_sections(run, run.cost)
    if run.rollouts is not None:
        sections |= rollout_lines(run.rollouts)
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def plan_numbers(run: RunPlan) -> dict[str, Any]:
    """Return the plan as a JSON object: bytes, seconds, FLOPs, dollars."""
    plan = run.plan
    cost = run.cost
    size = checkpoint_size(run.plan)
    numbers = {
        "flavor": plan.config.model.flavor,
        "layout": asdict(plan.layout),
        "expert_exchange": describe_exchange(plan) if plan.layout.ep > 1 else None,
        "parameters": asdict(count_parameters(plan.shape)),
        "tokens": plan.budget_tokens,
        "flops": run_flops(plan),
        "gpu": run.cluster.gpu.name,
        "gpus": run.cluster.gpus,
        "exchange": run.cluster.exchange,
        "fits": run.verdict.fits,
        "reasons": run.verdict.lines,
        "checkpoint": asdict(size) | {"seconds": run.cluster.writing_seconds(size.total)},
        "memory": [asdict(memory) | {"total": memory.total} for memory in run.memory],
    }
    low, high, widest = cost.spread
    numbers |= {
        "efficiencies": run.cluster.efficiencies.numbers(),
        "steps": cost.steps,
        "days": cost.days,
        "days_low": low * cost.days,
        "days_high": high * cost.days,
        "tokens_per_second_low": cost.tokens_per_second / high,
        "tokens_per_second_high": cost.tokens_per_second / low,
        "range_mostly_from": widest,
        "gpu_hours": cost.gpu_hours,
        "dollars": cost.dollars,
        "megawatt_hours": cost.megawatt_hours,
        "days_with_efficiency": {name: {"less": a, "more": b} for name, (a, b) in run.sensitivity.items()},
        "tokens_per_second": cost.tokens_per_second,
        "mfu": cost.mfu,
        "effective_time": None if (effective := effective_time(plan, cost)) is None else asdict(effective),
        "rollouts": None if run.rollouts is None else rollout_numbers(run.rollouts),
        "stages": [
            {"steps": stage.steps, "days": stage.seconds / SECONDS_PER_DAY, "step_seconds": stage.largest.seconds}
            | {"parts": stage.largest.parts, "mfu": stage.largest.mfu}
            for stage in cost.stages
        ],
    }
    return numbers


def _parameter_lines(plan: Plan) -> list[str]:
    count = count_parameters(plan.shape)
    adapter = plan.config.adapter
    trained = 0 if adapter is None else sum(row.numel(plan.shape) for row in adapter_rows(plan.shape, adapter).values())
    base_dtype = None if adapter is None else adapter.base_dtype
    return [
        plan_line("total", f"{count.total:,}", f"(main {count.main:,}, MTP {count.mtp:,})"),
        *([plan_line("adapters", f"{trained:,}", "(trained; the others are frozen)")] if trained else []),
        *([plan_line("base", describe_base(plan.shape, base_dtype))] if base_dtype else []),
        plan_line("active per token", f"{count.active:,}", "(embedding and head included)"),
        plan_line("tensors", f"{count.main_tensors + count.mtp_tensors:,}", "(as Hugging Face counts them)"),
    ]


def _flop_lines(plan: Plan, stage: TextStage) -> list[str]:
    flops = plan.training_flops(stage)
    remark = ""
    if plan.document_tokens is not None:
        remark = f"(documents of {plan.document_tokens:,} tokens in the mean, lengths exponential)"
    elif plan.config.data.document_mask:
        remark = "(a row as one document: less with several, see --document-tokens)"
    return [
        plan_line("weights", flops_text(flops.matrices)),
        *([plan_line("adapters", flops_text(flops.adapters))] if flops.adapters else []),
        plan_line("causal attention", flops_text(flops.attention), remark),
        plan_line("MTP", flops_text(flops.mtp)),
        plan_line("total", flops_text(flops.total)),
    ]


def _run_lines(plan: Plan, cluster: TargetCluster) -> list[str]:
    size = checkpoint_size(plan)
    parts = f"(weights {decimal_size(size.weights)}, states {decimal_size(size.states)})"
    return [
        *([f"expert exchange: {describe_exchange(plan)}"] if plan.layout.ep > 1 else []),
        *([] if step_tokens(plan) is None else [plan_line("tokens per step", f"{step_tokens(plan):,.0f}")]),
        plan_line("tokens", f"{plan.budget_tokens:,.0f}"),
        plan_line("FLOPs", f"{run_flops(plan):.3e}"),
        plan_line("checkpoint", decimal_size(size.total), parts),
        plan_line(
            "time to write it",
            duration(cluster.writing_seconds(size.total)),
            f"({cluster.storage_gbytes:g} GB/s for each node)",
        ),
        plan_line("Hugging Face folder", decimal_size(hugging_face_bytes(plan))),
    ]


def _time_sections(run: RunPlan, cost: RunCost) -> dict[str, list[str]]:
    """Return time and cost of the run, and the parts of a step in the stage of text that takes longest, by title."""
    plan = run.plan
    cluster = run.cluster
    days = run.sensitivity
    seconds = cost.days * SECONDS_PER_DAY
    step = cost.longest.largest
    low, high, widest = cost.spread
    network = f"nodes of {cluster.gpus_per_node}, {cluster.network_gbits:,.0f} Gbit/s for each GPU between them"
    title = f"time of a step, predicted for {network} (efficiencies: {cluster.efficiencies.source})"
    if cluster.exchange == "deepep":
        title += "; tokens travel as in published training stacks, not as in this run"
    if plan.config.rl is not None:
        title += "; without generation, of samples that fill training.seq_len: shorter ones are packed"
    title += f", stage {cost.stages.index(cost.longest) + 1}" if len(cost.stages) > 1 else ""
    title += "" if run.verdict.fits else "; it does not fit, as said above"
    parts = sorted(step.parts.items(), key=lambda part: -part[1])
    energy = ""
    money = list[str]()
    if (dollars := cost.dollars) is not None:
        money = [plan_line("cost", f"${dollars:,.{0 if dollars >= 100 else 2}f}", f"(at ${cluster.price:,.2f})")]
    if (hours := cost.megawatt_hours) is not None:
        shown_energy = f"{hours:,.0f} MWh" if hours >= 100 else f"{amount(1000 * hours)} kWh"
        energy = f"({shown_energy}: {cluster.gpu.watts:,.0f} W, {HOST_SHARE:.0%} more for hosts, PUE {PUE:g})"
    largest = sorted(days, key=lambda name: -days[name][0])[:2]
    changes = ", ".join(f"{name} {days[name][0] / cost.days - 1:+.0%}" for name in largest)
    span = f"({run_time(low * seconds)} to {run_time(high * seconds)}; with 20% less of {changes})"
    return {
        title: [
            *(
                plan_line(name, duration(part), f"{part / step.seconds:5.1%}")
                for name, part in parts
                if part >= 0.002 * step.seconds
            ),
            plan_line("step", duration(step.seconds), f"MFU {step.mfu:.1%}, {step.tokens_per_second:,.0f} tokens/s"),
        ],
        "whole run": [
            plan_line(
                "steps", f"{cost.steps:,}", f"({cost.tokens_per_second:,.0f} tokens per second, MFU {cost.mfu:.1%})"
            ),
            plan_line("time", run_time(seconds), span),
            f"the range comes mostly from: {', '.join(widest)}",
            plan_line(
                "GPU-hours", f"{cost.gpu_hours:,.0f}" if cost.gpu_hours >= 100 else amount(cost.gpu_hours), energy
            ),
            *money,
            *_failure_lines(plan, cost),
        ],
    }


def _failure_lines(plan: Plan, cost: RunCost) -> list[str]:
    times = effective_time(plan, cost)
    if times is None:
        return []
    rates = f"a checkpoint every {run_time(times.interval_seconds)}, a failure every {run_time(times.failure_seconds)}"
    lines = [plan_line("effective time", f"{times.ratio:.1%}", f"({rates})")]
    if times.days is not None:
        needed = f"({times.gpu_hours:,.0f} GPU-hours{'' if times.dollars is None else f', ${times.dollars:,.0f}'})"
        lines.append(plan_line("with failures and checkpoints", run_time(times.days * SECONDS_PER_DAY), needed))
    stalls = f"a save holds steps up for {STALL_SECONDS:g} s, a restart for {RESTART_SECONDS:g} s"
    best = plan_line("best checkpoint.interval", f"{times.best_steps:,}", f"({times.best_ratio:.1%}; {stalls})")
    return [*lines, best]
