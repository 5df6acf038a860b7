"""The plan of a run as text: parameters, FLOPs, memory and time."""

import sys

from glm46.config.faults import counted
from glm46.config.run_config import RunConfig
from glm46.planner.budget import days
from glm46.planner.curriculum import TextStage
from glm46.planner.flops import training_flops
from glm46.planner.machine import Gpu, Machine
from glm46.planner.memory import plan_memory
from glm46.planner.parameters import count_parameters
from glm46.planner.peaks import Accelerator, find_accelerator
from glm46.planner.plan import Plan, resolve_plan
from glm46.planner.requirement import memory_lines, stage_lines, verdict_lines

DEFAULT_GPU = "H100"
DEFAULT_MFU = 0.35
"""A target for models of this size, not a measurement; the text shows it with every number that depends on it."""


def plan_text(
    config: RunConfig,
    *,
    world_size: int | None = None,
    gpu: str = DEFAULT_GPU,
    mfu: float = DEFAULT_MFU,
    machine: Machine | None = None,
    document_tokens: float | None = None,
) -> str:
    """Parameters, FLOPs, memory per rank, tokens and days of a run, and whether it fits.

    Args:
        world_size: processes; absent: the fewest that the degrees allow.
        gpu: name in the table of peaks, for which memory and time are computed.
        mfu: assumed share of that peak.
        machine: another machine to compare the run with.
        document_tokens: mean tokens of a document, whose lengths are taken as exponential; absent: each row is counted
            as one document.

    Raises:
        ValueError: the GPU is not in the table, `mfu` is not in (0, 1], or attention crosses documents.
    """
    accelerator = find_accelerator(gpu)
    if accelerator is None or not 0 < mfu <= 1:
        raise ValueError(
            f"gpu = {gpu!r}, mfu = {mfu}: a name in glm46/planner/peaks.py and a share in (0, 1] are needed"
        )
    if document_tokens is not None and not config.data.document_mask:
        raise ValueError("--document-tokens: data.document_mask = false, so attention crosses documents; leave it out")
    plan = resolve_plan(config, world_size, document_tokens)
    layout, world = plan.layout, plan.layout.world_size
    gpus = Machine(1, sys.maxsize, sys.maxsize, (Gpu(accelerator.name, accelerator.memory_bytes),) * world)
    longest = max(plan.text_stages, key=lambda stage: stage.seq_len)
    degrees = (
        f"pp {layout.pp}, replicate {layout.dp_replicate}, shard {layout.dp_shard}, cp {layout.cp}, tp {layout.tp}, "
        f"ep {layout.ep}"
    )
    sections = {
        f"{config.job.description} ({config.model.flavor})": [],
        "parameters": _parameter_lines(plan),
        f"FLOPs per token, forward and backward, at {longest.seq_len:,} tokens": _flop_lines(plan, longest),
        f"memory of each of {counted(world, 'rank')} ({degrees})": memory_lines(plan_memory(config, world)),
        "stages of text": stage_lines(config, gpus, world, document_tokens),
        "run": _run_lines(plan) + _time_lines(plan, accelerator, mfu),
        f"does it fit on {world:,} x {accelerator.name}": verdict_lines(config, gpus, world),
    }
    if machine is not None:
        title = f"does it fit on this machine ({machine.describe()})"
        sections[title] = verdict_lines(config, machine, world_size)
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def _parameter_lines(plan: Plan) -> list[str]:
    count = count_parameters(plan.shape)
    return [
        _line("total", f"{count.total:,}", f"(main {count.main:,}, MTP {count.mtp:,})"),
        _line("active per token", f"{count.active:,}", "(embedding and head included)"),
        _line("tensors", f"{count.main_tensors + count.mtp_tensors:,}", "(as Hugging Face counts them)"),
    ]


def _flop_lines(plan: Plan, stage: TextStage) -> list[str]:
    flops, remark = training_flops(stage.shape, stage.seq_len, plan.document_tokens), ""
    if plan.document_tokens is not None:
        remark = f"  (documents of {plan.document_tokens:,} tokens in the mean, lengths exponential)"
    elif plan.config.data.document_mask:
        remark = "  (a row as one document: less with several, see --document-tokens)"
    return [
        _line("weights", f"{flops.matrices / 1e9:,.3f}", "GFLOP"),
        _line("causal attention", f"{flops.attention / 1e9:,.3f}", f"GFLOP{remark}"),
        _line("MTP", f"{flops.mtp / 1e9:,.3f}", "GFLOP"),
        _line("total", f"{flops.total / 1e9:,.3f}", "GFLOP"),
    ]


def _run_lines(plan: Plan) -> list[str]:
    steps = [] if plan.step_tokens is None else [_line("tokens per step", f"{plan.step_tokens:,.0f}")]
    return [*steps, _line("tokens", f"{plan.budget_tokens:,.0f}"), _line("FLOPs", f"{plan.flops:.3e}")]


def _time_lines(plan: Plan, accelerator: Accelerator, mfu: float) -> list[str]:
    world, peak = plan.layout.world_size, accelerator.bf16_flops
    rate = world * peak * mfu * plan.budget_tokens / plan.flops
    where = f"({world:,} x {accelerator.name} at {mfu:.0%} of the BF16 peak)"
    return [
        _line("days", f"{days(plan.flops, world, peak, mfu):,.2f}", where),
        _line("tokens per second", f"{rate:,.0f}"),
    ]


def _line(name: str, value: str, remark: str = "") -> str:
    return f"{name:<22} {value:>22}  {remark}".rstrip()
