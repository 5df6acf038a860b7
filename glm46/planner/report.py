"""The plan of a run as text: parameters, FLOPs, memory and time."""

import sys

from glm46.config.faults import counted
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.planner.budget import days, plan_budget
from glm46.planner.flops import training_flops
from glm46.planner.layout import resolve_layout, smallest_world
from glm46.planner.machine import Gpu, Machine
from glm46.planner.memory import plan_memory
from glm46.planner.parameters import count_parameters
from glm46.planner.peaks import find_accelerator
from glm46.planner.requirement import memory_lines, verdict_lines

DEFAULT_GPU = "H100"
DEFAULT_MFU = 0.35
"""A target for models of this size, not a measurement; the text shows it with every number that depends on it."""


def plan_text(
    config: RunConfig,
    *,
    world_size: int | None = None,
    gpu: str = DEFAULT_GPU,
    mfu: float = DEFAULT_MFU,
    device: str = "gpu",
    machine: Machine | None = None,
) -> str:
    """Parameters, FLOPs, memory per rank, tokens and days of a run, and whether it fits.

    Args:
        world_size: processes; absent: the fewest that the degrees allow.
        gpu: name in the table of peaks, for which memory and time are computed.
        mfu: assumed share of that peak.
        device: "gpu" or "cpu", for the memory of the process itself.
        machine: another machine to compare the run with.

    Raises:
        UserError: the degrees do not multiply to `world_size`.
        ValueError: the GPU is not in the table, or `mfu` is not in (0, 1].
    """
    accelerator = find_accelerator(gpu)
    if accelerator is None or not 0 < mfu <= 1:
        raise ValueError(
            f"gpu = {gpu!r}, mfu = {mfu}: a name in glm46/planner/peaks.py and a share in (0, 1] are needed"
        )
    world = world_size or smallest_world(config.parallelism)
    layout = resolve_layout(config.parallelism, world)
    shape, plan = resolve_shape(config.model), plan_memory(config, world, device=device)
    count, flops = count_parameters(shape), training_flops(shape, config.training.seq_len)
    budget = plan_budget(config, layout.dp_degree)
    at_most = "  (a row as one document: less with several)" if config.data.document_mask else ""
    lines = [
        f"{config.job.description} ({config.model.flavor})",
        "",
        "parameters",
        f"  {'total':<22} {count.total:>22,}  (main {count.main:,}, MTP {count.mtp:,})",
        f"  {'active per token':<22} {count.active:>22,}  (embedding and head included)",
        f"  {'tensors':<22} {count.main_tensors + count.mtp_tensors:>22,}  (as Hugging Face counts them)",
        "",
        f"FLOPs per token, forward and backward, at {config.training.seq_len:,} tokens",
        f"  {'weights':<22} {flops.matrices / 1e9:>22,.3f}  GFLOP",
        f"  {'causal attention':<22} {flops.attention / 1e9:>22,.3f}  GFLOP{at_most}",
        f"  {'MTP':<22} {flops.mtp / 1e9:>22,.3f}  GFLOP",
        f"  {'total':<22} {flops.total / 1e9:>22,.3f}  GFLOP",
        "",
        f"memory of each of {counted(world, 'rank')} (pp {layout.pp}, replicate {layout.dp_replicate}, "
        f"shard {layout.dp_shard}, cp {layout.cp}, tp {layout.tp}, ep {layout.ep})",
        *memory_lines(plan),
        "",
        "run",
    ]
    if budget.step_tokens is not None:
        lines.append(f"  {'tokens per step':<22} {budget.step_tokens:>22,.0f}")
    lines.append(f"  {'tokens':<22} {budget.tokens:>22,.0f}")
    lines.append(f"  {'FLOPs':<22} {budget.flops:>22.3e}")
    if device == "gpu":
        time = days(budget.flops, world, accelerator.bf16_flops, mfu)
        rate = world * accelerator.bf16_flops * mfu / flops.total
        lines.append(f"  {'days':<22} {time:>22,.2f}  ({world:,} x {accelerator.name} at {mfu:.0%} of the BF16 peak)")
        lines.append(f"  {'tokens per second':<22} {rate:>22,.0f}")
    devices = Machine(1, sys.maxsize, sys.maxsize, (Gpu(accelerator.name, accelerator.memory_bytes),) * world)
    lines += ["", f"does it fit on {world:,} x {accelerator.name}"]
    lines += [f"  {line}" for line in verdict_lines(config, devices, world)]
    if machine is not None:
        lines += ["", f"does it fit on this machine ({machine.describe()})"]
        lines += [f"  {line}" for line in verdict_lines(config, machine, world_size)]
    return "\n".join(lines)
