"""Compares the needs of a run with this machine on one screen, before any work starts; lists its stages of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from glm46.config.faults import counted
from glm46.config.float8 import Float8Config
from glm46.config.parallelism import PIPELINE_SCHEDULES, ActivationCheckpointConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of, find_accelerator
from glm46.operate.estimate.machine import Machine
from glm46.operate.estimate.memory import MemoryPlan, largest_stage, plan_memory, stage_memory, step_text
from glm46.operate.estimate.plan_sizes import batches_of, bubble, describe_layout
from glm46.operate.estimate.units import aligned, binary_size, token_count
from glm46.run.curriculum import describe_attention
from glm46.run.layout import fixed_processes, smallest_world
from glm46.run.parameters import count_parameters
from glm46.run.plan import Plan, resolve_plan

_GIB = 2**30
USABLE_CPU_RATIO = 0.95
"""Share of the free memory that a run may fill; with less left the system kills processes."""
_USABLE_GPU_RATIO = 0.92
"""Share of a GPU's memory that tensors can fill; the rest is lost to fragmentation of the allocator."""
_REFERENCE_GPU = "H100"
_EXPERTS_CAPABILITIES = {"rowwise": (9, 10), "mxfp8": (10,)}
"""Major compute capabilities that torchao's kernels support, by `experts_recipe_name`."""
_MOST_DOUBLINGS = 14
SPLIT_BACKWARD_TORCH = (2, 13)
"""Oldest release on which schedules with a split backward were tested to work."""
INTEGERS_TORCH = (2, 13)
"""Oldest release whose FSDP2 was tested with integer parameters, as weights in FP8 are."""


@dataclass(frozen=True)
class Verdict:
    """The answer to whether a run fits on a machine, with the reason."""

    faults: list[str]
    margin: str
    """Needed and available memory, if the run fits."""
    plan: Plan
    memory: MemoryPlan
    """Memory of the largest stage."""
    stages: list[str]
    """See `stage_table`."""

    @property
    def fits(self) -> bool:
        return not self.faults

    @property
    def lines(self) -> list[str]:
        """Sentences that state whether the run fits, and by how much."""
        return [f"no: {fault}" for fault in self.faults] or [f"yes: {self.margin}"]


def describe_requirement(
    config: RunConfig, machine: Machine, *, world_size: int | None = None, remedies: Sequence[str] = ()
) -> tuple[bool, str]:
    """Return whether the run fits on this machine, and one screen with the reasons.

    Args:
        world_size: processes over all nodes. None: one per GPU; without GPUs the minimum that the degrees allow.
        remedies: further advice for a run that does not fit.
    """
    verdict = judge_config(config, machine, world_size)
    lines = [*_needs(machine, verdict), "", *_found(machine), ""]
    if verdict.fits:
        return True, "\n".join([*lines, "It fits."])
    lines += ["This machine cannot run it:", *[f"  - {fault}" for fault in verdict.faults]]
    advice = _smallest_that_fits(config, machine)
    if 2 * (text := step_text(verdict.plan)) > verdict.memory.total:
        advice = f"lower training.global_batch_size: a rank reads the token data of a step at once, {binary_size(text)}"
    return False, "\n".join([*lines, "", "What to do:", *[f"  - {remedy}" for remedy in (advice, *remedies) if remedy]])


def judge_config(config: RunConfig, machine: Machine, world_size: int | None) -> Verdict:
    """Call `judge` with this many processes. None: one per GPU as far as the degrees allow, and at least the minimum
    that they need."""
    needed = smallest_world(config.parallelism)
    gpus = len(machine.gpus) * machine.nodes
    if gpus > needed and config.parallelism.data_parallel_shard_degree == -1:
        needed = gpus - gpus % fixed_processes(config.parallelism)
    ranks = world_size or needed
    host_ranks = min(len(machine.gpus) or ranks, -(-ranks // machine.nodes))
    return judge(resolve_plan(config, ranks, host_ranks=host_ranks), machine)


def usable_bytes(gpu_bytes: int) -> float:
    """Return the bytes of a GPU's memory that a run may fill."""
    return gpu_bytes * _USABLE_GPU_RATIO


def judge(plan: Plan, machine: Machine) -> Verdict:
    """Compare a run with a machine: number of GPUs, memory, and what GPUs and torch can compute."""
    config = plan.config
    needed = plan.layout.world_size
    gpus = len(machine.gpus) * machine.nodes
    faults = []
    margin = "the memory of its GPUs is not known"
    host_processes = -(-needed // machine.nodes)
    device = "gpu" if machine.gpus else "cpu"
    capacity = None
    stage_plans = stage_memory(plan, device=device)
    text = step_text(plan)
    memory = largest_stage(stage_plans)
    if gpus and needed > gpus:
        faults.append(f"it needs {counted(needed, 'GPU')} (the product of its degrees); found: {gpus:,}")
    if machine.gpus:
        sizes = [gpu.memory_bytes for gpu in machine.gpus if gpu.memory_bytes is not None]
        if sizes:
            capacity = usable_bytes(min(sizes))
            fits, margin = compare_memory("each GPU needs", memory.total, capacity, min(sizes))
            faults += [] if fits else [margin]
        what = "weights, optimizer states" if config.training.parameter_offload else "optimizer states"
        what = f"activations, {what}" if memory.host_activations else what
        who = f"{what} and text of {counted(host_processes, 'process')} need"
        held = memory.host + memory.host_activations + text
        fits, host = compare_memory(
            who, held * host_processes, machine.free_bytes * USABLE_CPU_RATIO, machine.free_bytes
        )
        faults += [] if fits else [f"{host} of the host"]
    else:
        usable = machine.free_bytes * USABLE_CPU_RATIO
        capacity = usable / host_processes
        who = f"{host_processes:,} processes need" if host_processes > 1 else "one process needs"
        fits, margin = compare_memory(who, memory.total * host_processes, usable, machine.free_bytes)
        faults += [] if fits else [margin]
        if not fits and needed > 1:
            faults.append(f"it needs {needed:,} GPUs (the product of its degrees); found: none")
        kernel = config.model.attention_kernel
        gpu_keys = [f'model.attention_kernel = "{kernel}"'] if kernel != "default" else []
        gpu_keys += [
            "parallelism.enable_async_tensor_parallel = true"
        ] * config.parallelism.enable_async_tensor_parallel
        faults += [f"{key} needs a GPU; found: none; remove it" for key in gpu_keys]
    faults += [*fp8_faults(config.float8, machine), *_torch_faults(config, metadata.version("torch"))]
    return Verdict(faults, margin, plan, memory, stage_table(plan, stage_plans, capacity))


def _torch_faults(config: RunConfig, torch: str) -> list[str]:
    """Return faults for features that this release of torch lacks: 2.11 frees autograd nodes that the second half of a
    split backward needs, and its FSDP2 does not support integer parameters."""
    release = tuple(int(part) for part in torch.split(".")[:2])
    needs = []
    if config.adapter is not None and config.adapter.base_dtype is not None:
        what = f'adapter.base_dtype = "{config.adapter.base_dtype}" needs'
        needs.append((what, INTEGERS_TORCH, "remove adapter.base_dtype"))
    layout = config.parallelism
    name = config.parallelism.pipeline_parallel_schedule
    if layout.pipeline_parallel_degree > 1 and PIPELINE_SCHEDULES[name].splits_backward:
        others = ", ".join(
            f'"{other}"' for other, schedule in PIPELINE_SCHEDULES.items() if not schedule.splits_backward
        )
        what = f'parallelism.pipeline_parallel_schedule = "{name}" splits backward, which needs'
        needs.append((what, SPLIT_BACKWARD_TORCH, f"take one of {others}"))
    return [
        f"{what} torch {'.'.join(map(str, oldest))}; found: {torch}; update torch, or {remedy}"
        for what, oldest, remedy in needs
        if release < oldest
    ]


def fp8_faults(float8: Float8Config, machine: Machine) -> list[str]:
    """Return faults for FP8 features that this machine cannot compute; an unknown GPU is not judged."""
    if float8.recipe_name is None or float8.emulate:
        return []
    remedy = "set float8.emulate = true to see its losses here, at no gain in speed"
    needs = f'float8.recipe_name = "{float8.recipe_name}" needs a GPU with FP8 products (L40S, H100 and newer)'
    if not machine.gpus:
        return [f"{needs}; found: none; {remedy}"]
    capabilities = [
        (gpu.name, accelerator.compute_capability)
        for gpu in machine.gpus
        if (accelerator := find_accelerator(gpu.name))
    ]
    recipe = float8.experts_recipe_name
    for name, capability in capabilities:
        if capability < 8.9:
            return [f"{needs}; found: {name}, which can run BF16: remove the key, or {remedy}"]
        if recipe and int(capability) not in _EXPERTS_CAPABILITIES[recipe]:
            fitting = "H100, H200, B200, B300" if recipe == "rowwise" else "B200, B300"
            others = [other for other, runs_on in _EXPERTS_CAPABILITIES.items() if int(capability) in runs_on]
            take = f'take "{others[0]}", which it can run' if others else ""
            instead = take or "remove the key: it has none of these products"
            needs = f'float8.experts_recipe_name = "{recipe}" needs a GPU with its grouped products ({fitting})'
            return [f"{needs}; found: {name}; {instead}; or {remedy}"]
    return []


def compare_memory(who: str, needed: float, usable: float, free: float) -> tuple[bool, str]:
    """Return whether memory suffices, and a text with both numbers and their difference.

    Args:
        who: what needs the memory, with its verb.
        needed: bytes.
        usable: bytes that can be filled, out of the free ones.
    """
    fits = needed <= usable
    by_how_much = f"{binary_size(usable - needed)} to spare" if fits else f"{binary_size(needed - usable)} too much"
    free_text = f"{binary_size(usable)} of {binary_size(free)} can be filled"
    return fits, f"{who} {binary_size(needed)}, and {free_text}: {by_how_much}"


def _needs(machine: Machine, verdict: Verdict) -> list[str]:
    plan = verdict.plan
    count = count_parameters(plan.shape)
    kind = "GPUs" if machine.gpus or verdict.faults else "processes"
    active = f"{count.total:,} parameters, {count.active:,} active per token"
    return [
        f"What this run needs ({plan.config.model.flavor}: {active})",
        f"  {kind:<18} {describe_layout(plan.layout)}",
        "  memory of each",
        *(f"    {line}" for line in memory_lines(verdict.memory)),
        "  stages of text",
        *(f"    {line}" for line in verdict.stages),
    ]


def memory_parts(plan: MemoryPlan) -> dict[str, float]:
    """Return the bytes of each part of a memory plan, by the name that users see."""
    parts = {
        "weights": plan.weights,
        "gradients": plan.gradients,
        "optimizer states": plan.optimizer,
        "gathered weights": plan.gathered,
        "activations": plan.activations,
        "gathered keys": plan.gathered_keys,
        "attention backward": plan.attention,
        "loss and logits": plan.loss,
        "program and text": plan.process + plan.text,
        "other networks": plan.networks,
        "sample generation": plan.generation,
    }
    seldom = "attention backward", "other networks", "sample generation"
    return {name: size for name, size in parts.items() if size or name not in seldom}


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Format one aligned line per part of a memory plan."""
    parts = memory_parts(plan)
    lines = [f"{name:<18} {binary_size(size, plan.total):>12}" for name, size in parts.items()]
    lines.append(f"{'total':<18} {binary_size(plan.total):>12}")
    outside = {"and of the host": plan.host + plan.host_activations, "and on disk": plan.disk}
    return lines + [f"{name:<18} {binary_size(size):>12}" for name, size in outside.items() if size >= 0.1 * _GIB]


def _found(machine: Machine) -> list[str]:
    nodes = f", {machine.nodes:,} nodes of" if machine.nodes > 1 else ""
    lines = [f"What was found{nodes}", f"  {'cores':<18} {machine.cores:,}"]
    lines.append(f"  {'memory':<18} {binary_size(machine.free_bytes)} free of {binary_size(machine.memory_bytes)}")
    for name in sorted({gpu.name for gpu in machine.gpus}):
        sizes = [gpu.memory_bytes for gpu in machine.gpus if gpu.name == name]
        memory = binary_size(sizes[0]) if sizes[0] is not None else "unknown memory"
        lines.append(f"  {'GPUs':<18} {len(sizes)} x {name}, {memory} each")
    return lines if machine.gpus else [*lines, f"  {'GPUs':<18} none"]


def _smallest_that_fits(config: RunConfig, machine: Machine) -> str | None:
    """Advise the smallest number of GPUs whose memory suffices, found by doubling an open shard degree."""
    capacity = accelerator_of(_REFERENCE_GPU).memory_bytes
    name = _REFERENCE_GPU
    if machine.gpus and machine.gpus[0].memory_bytes is not None:
        capacity = machine.gpus[0].memory_bytes
        name = machine.gpus[0].name
    world = smallest_world(config.parallelism)
    is_open = config.parallelism.data_parallel_shard_degree == -1
    sizes = [world * 2**power for power in range(_MOST_DOUBLINGS if is_open else 1)]
    smaller = config.model_copy(update={"activation_checkpoint": ActivationCheckpointConfig(mode="full")})
    for candidate, remark in ((config, ""), (smaller, ', with activation_checkpoint.mode = "full"')):
        for size in sizes:
            if plan_memory(candidate, size).total <= usable_bytes(capacity):
                return f"run it on {counted(size, 'GPU')} of {binary_size(capacity)} ({name}) or more{remark}"
    return (
        f"even {counted(sizes[-1], 'GPU')} of {binary_size(capacity)} ({name}) cannot hold it: raise the tensor, "
        "pipeline, context or expert degree, or lower training.local_batch_size"
    )


def stage_table(plan: Plan, stages: list[MemoryPlan], capacity: float | None = None) -> list[str]:
    """Format a header, and a line for each stage that the run reaches, with the memory of the rank that needs most.

    Args:
        stages: `stage_memory` of the plan.
        capacity: bytes that a rank can fill; None if unknown.
    """
    rows: list[tuple[str, ...]] = [
        (
            "stage",
            "from",
            "tokens",
            "length",
            "window",
            "RoPE scaling",
            "sequences",
            "micro-batches",
            "bubble",
            "GFLOP/token",
            "memory",
            "fits",
        )
    ]
    clock = plan.config.lr_scheduler.start_tokens
    for index, memory in enumerate(stages):
        stage = plan.text_stages[index]
        tokens = plan.stage_tokens[index]
        batches = batches_of(plan, index)
        micro_batches = [size // plan.rows_per_micro_batch for size in batches]
        bubbles = [f"{bubble(plan.config.parallelism, count):.0%}" for count in micro_batches]
        flops = plan.training_flops(stage).total
        fits = "unknown" if capacity is None else "yes" if memory.total <= capacity else "no"
        rows.append(
            (
                str(index + 1),
                token_count(clock),
                token_count(tokens),
                f"{stage.seq_len:,}",
                *describe_attention(stage.shape),
                _range(*(f"{size:,}" for size in batches)),
                _range(*(f"{count:,}" for count in micro_batches)),
                _range(*bubbles) if plan.layout.pp > 1 else "-",
                f"{flops / 1e9:,.4g}",
                binary_size(memory.total),
                fits,
            )
        )
        clock += tokens
    lines = aligned(rows)
    if len(rows) <= len(plan.text_stages):
        lines.append(f"stages {len(rows)} to {len(plan.text_stages)} begin after the end of this run")
    return lines


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
