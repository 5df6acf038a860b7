"""``plan --search``: the best layouts of a run on a cluster, of all that the rules allow, and why others fall."""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from glm46.config.check import find_faults
from glm46.config.faults import show
from glm46.config.model import ModelShape
from glm46.config.parallelism import PIPELINE_SCHEDULES, ActivationCheckpointConfig, ParallelismConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.memory import largest_stage, plan_memory, stage_memory
from glm46.operate.estimate.requirement import usable_bytes
from glm46.operate.estimate.run_cost import SECONDS_PER_DAY, RunCost, run_cost
from glm46.operate.estimate.step_time import OrderOf
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.units import aligned, amount, binary_size, time_unit
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.plan import Plan, resolve_plan

_STEPS = tuple(map(ActivationCheckpointConfig.model_validate, (
    {}, {"mode": "selective"}, {"mode": "selective", "recompute": ("experts",)}, {"mode": "full"},)))  # fmt: skip
"""Recomputation, from the fastest to the smallest: a layout that fits with one is not tried with the next."""
_SIMULATED = 12
"""Layouts whose pipelines are simulated after a first ranking with the bubbles of equal stages."""
_MOST_GPUS = 2**14
_POWERS = [2**power for power in range(_MOST_GPUS.bit_length())]
_LEAST_CONTEXT_SHARE = 1024
"""Tokens of the longest row that a context-parallel rank has at least: with fewer it mostly gathers keys."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    plan: Plan
    memory: float
    """Bytes of the rank that needs most."""
    cost: RunCost


def options_of(plan: Plan, config: RunConfig) -> list[str]:
    """The options of the command line that give a config the layout and the recomputation of a plan."""
    options = []
    for section in ("parallelism", "activation_checkpoint"):
        old, new = getattr(config, section), getattr(plan.config, section)
        for key, field in type(new).model_fields.items():
            if (stated := getattr(new, key)) != getattr(old, key):
                # A default is set by taking the key out: some keys may only stand beside others.
                value = "" if stated == field.default else show(stated) if isinstance(stated, tuple) else stated
                options.append(f"--{section}.{key}={value}")
    return options


@dataclass(frozen=True)
class Search:
    """The result of `search_layouts`."""

    config: RunConfig
    cluster: TargetCluster
    best: list[Candidate]
    """The fastest ones, with the real order of their pipelines, from the fastest on."""
    fitting: int
    """Number of layouts that fit."""
    refused: Counter[str]
    """Number of layouts that a rule forbids, by the key that it names first."""
    too_large: int
    """Layouts that no kind of recomputation makes fit."""
    least_memory: float
    """Bytes of the smallest of those; infinite if there are none."""

    @cached_property
    def smallest(self) -> Plan | None:
        """See `smallest_cluster`."""
        return smallest_cluster(self.config, self.cluster)


def search_layouts(
    config: RunConfig, cluster: TargetCluster, order_of: OrderOf, document_tokens: float | None = None
) -> Search:
    """Plan every layout of a run on all GPUs of a cluster, with progress on stderr; ``document_tokens`` as of `Plan`.
    FSDP2 shards over all ranks that are left: replicas are not tried, because shards need less memory and send no
    more."""
    usable, report = usable_bytes(cluster.gpu.memory_bytes), _reporter()
    best, refused, too_large, least = list[Candidate](), Counter[str](), 0, float("inf")
    layouts = list(_layouts(config, cluster))
    for done, parallelism in enumerate(layouts):
        report(done, len(layouts))
        candidate = config.model_copy(update={"parallelism": parallelism, "activation_checkpoint": _STEPS[0]})
        if faults := find_faults(candidate, cluster.gpus):
            refused[faults[0].keys[0]] += 1
            continue
        plan = resolve_plan(candidate, cluster.gpus, document_tokens, host_ranks=cluster.host_ranks)
        for step in _STEPS:
            plan = replace(plan, config=candidate.model_copy(update={"activation_checkpoint": step}))
            memory = largest_stage(stage_memory(plan)).total
            if memory <= usable and not find_faults(plan.config, cluster.gpus):  # a stage may have a single layer
                best.append(Candidate(plan, memory, run_cost(plan, cluster, None)))
                break
        else:
            too_large, least = too_large + 1, min(least, memory)
    report(len(layouts), len(layouts))
    best.sort(key=lambda each: each.cost.days)
    simulated = [replace(each, cost=run_cost(each.plan, cluster, order_of)) for each in best[:_SIMULATED]]
    ranked = sorted(simulated, key=lambda each: each.cost.days)
    return Search(config, cluster, ranked, len(best), refused, too_large, least)


def smallest_cluster(config: RunConfig, cluster: TargetCluster) -> Plan | None:
    """A plan on the fewest GPUs of this kind, a power of two, that hold the run with full recomputation; None if
    `_MOST_GPUS` do not."""
    smaller = config.model_copy(update={"activation_checkpoint": ActivationCheckpointConfig(mode="full")})
    usable = usable_bytes(cluster.gpu.memory_bytes)
    kept = checkpoint_size(resolve_plan(config))
    states = 0.0 if config.optimizer.state_offload != "none" else kept.states
    # Weights and gradients are alike; fewer GPUs than this do not hold what lies between steps.
    least = 1 if config.training.parameter_offload else (2 * kept.weights + states) / usable
    for gpus in (count for count in _POWERS if count >= least):
        host_ranks = (others := replace(cluster, gpus=gpus)).host_ranks
        for parallelism in _layouts(smaller, others):
            candidate = smaller.model_copy(update={"parallelism": parallelism})
            if not find_faults(candidate, gpus) and plan_memory(candidate, gpus).total <= usable:
                return resolve_plan(candidate, gpus, host_ranks=host_ranks)
    return None


def _layouts(config: RunConfig, cluster: TargetCluster) -> Iterator[ParallelismConfig]:
    """Degrees whose product divides the number of GPUs; a tensor-parallel group stays inside a node."""
    shape, gpus, width = resolve_shape(config.model), cluster.gpus, min(cluster.gpus_per_node, cluster.gpus)
    longest = max([config.training.seq_len, *(stage.seq_len or 0 for stage in config.data.stages)])
    experts, tensor = shape.n_routed_experts, [degree for degree in _POWERS if width % degree == 0]
    pipeline = [degree for degree in _POWERS if degree <= shape.num_hidden_layers and gpus % degree == 0]
    context = [degree for degree in _POWERS if degree <= max(longest // _LEAST_CONTEXT_SHARE, 1)]
    for tp, pp, cp in product(tensor, pipeline, context):
        if gpus % (tp * pp * cp):
            continue
        for ep in (ep for ep in range(1, min(gpus // pp, experts, 64) + 1) if experts % ep == 0 == gpus // pp % ep):
            for of_pipeline in _pipelines(config, shape, pp):
                yield ParallelismConfig(
                    tensor_parallel_degree=tp,
                    context_parallel_degree=cp,
                    expert_parallel_degree=ep,
                    data_parallel_shard_degree=gpus // (tp * pp * cp),
                    fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
                    expert_exchange=config.parallelism.expert_exchange if ep > 1 else "auto",
                    **of_pipeline,
                )


_INTERLEAVED, _STAGES = "Interleaved1F1B", 4


def _pipelines(config: RunConfig, shape: ModelShape, pp: int) -> list[dict[str, Any]]:
    """Schedules worth a try with their default number of stages, that of the config and two common ones, of which the
    interleaved one is also tried with more."""
    names = dict.fromkeys([config.parallelism.pipeline_parallel_schedule, "1F1B", _INTERLEAVED])
    tried = [*((name, None) for name in names), (_INTERLEAVED, _STAGES)]
    return [
        {
            "pipeline_parallel_degree": pp, "pipeline_parallel_schedule": name,
            "pipeline_parallel_stages_per_rank": stated,
        }
        for name, stated in tried
        if pp * (stated or PIPELINE_SCHEDULES[name].stages_per_rank) <= shape.num_hidden_layers
    ] if pp > 1 else [{}]  # fmt: skip


_GIB = 2**30
_SHOWN = 10
_SECONDS_BETWEEN_LINES = 10.0
_SHORT = {"weights and gradients": "FSDP2", "Muon's matrices": "Muon", "the host": "host", "the disk": "disk"}
"""Names of what a layout waits for that fit into a column."""


def search_text(found: Search) -> str:
    """The result on one screen; tables fit into 80 columns."""
    config, best, gpu = found.config, found.best, found.cluster.gpu.name
    where = f"{config.job.description} ({config.model.flavor}) on {found.cluster.gpus:,} x {gpu}"
    parts = [f"{where}:\n{_summary(found)}"]
    if best:
        parts.append("\n".join(aligned(_layout_rows(best[:_SHOWN]), " ")))
        parts.append(_options("options of the first one:", best[0].plan, config))
    if found.smallest is None:
        parts.append(f"no cluster of {gpu} holds it: lower training.local_batch_size or the sequence")
    else:
        title = f"smallest cluster that fits, with full recomputation: {found.smallest.layout.world_size:,} x {gpu}"
        parts.append(_options(title, found.smallest, config))
    if best:
        parts.append("what another key changes:  the same command without --search, these options and that key")
    return "\n\n".join(parts)


def search_numbers(found: Search) -> dict:
    """The result as a JSON object: bytes, seconds, tokens."""
    smallest = found.smallest
    return {
        "flavor": found.config.model.flavor,
        "gpu": found.cluster.gpu.name,
        "gpus": found.cluster.gpus,
        "efficiencies": found.cluster.efficiencies.numbers(),
        "fitting": found.fitting,
        "refused": dict(found.refused),
        "too_large": found.too_large,
        "least_memory": found.least_memory if found.too_large else None,
        "candidates": [
            _plan_numbers(each.plan, found.config)
            | {"memory": each.memory, "step_seconds": each.cost.longest.largest.seconds}
            | {"parts": each.cost.longest.largest.parts}
            | {name: getattr(each.cost, name) for name in ("days", "mfu", "tokens_per_second", "dollars")}
            for each in found.best
        ],
        "smallest_cluster": smallest and {"gpus": smallest.layout.world_size} | _plan_numbers(smallest, found.config),
    }


def _plan_numbers(plan: Plan, config: RunConfig) -> dict:
    return {
        "layout": asdict(plan.layout),
        "schedule": plan.config.parallelism.pipeline_parallel_schedule if plan.layout.pp > 1 else None,
        "recomputation": _step_name(plan.config.activation_checkpoint),
        "options": options_of(plan, config),
    }


def _step_name(step: ActivationCheckpointConfig) -> str:
    """The mode, or "+experts" for what is recomputed besides "selective"."""
    return "".join(f"+{name}" for name in step.recompute) or step.mode


def _options(title: str, plan: Plan, config: RunConfig) -> str:
    return f"{title}\n  {shlex.join(options_of(plan, config)) or 'none: the config has them'}"


def _summary(found: Search) -> str:
    parts = [f"{found.fitting:,} layouts fit"]
    if found.too_large:
        parts.append(f"{found.too_large:,} do not, the smallest with {binary_size(found.least_memory)} per GPU")
    refused = [f"rules forbid {count:,} by {key}" for key, count in found.refused.most_common()]
    return "\n".join(["; ".join(parts), *refused])


def _layout_rows(candidates: list[Candidate]) -> list[tuple[str, ...]]:
    unit, name = time_unit(candidates[0].cost.days * SECONDS_PER_DAY)
    rows: list[tuple[str, ...]] = [
        ("tp", "pp", "schedule", "cp", "ep", "shard", "recompute", name, "MFU", "GiB", "bubble", "waits for")
    ]
    for each in candidates:
        layout, config = each.plan.layout, each.plan.config
        schedule = str(config.parallelism.pipeline_parallel_schedule) if layout.pp > 1 else "-"
        stages = config.parallelism.pipeline_parallel_stages_per_rank
        schedule = schedule if stages is None else f"{schedule[:11]}/{stages}"
        step = each.cost.longest.largest
        waits = {name.removeprefix("waiting for "): share for name, share in step.parts.items() if "waiting" in name}
        longest = max(waits, key=waits.__getitem__, default="")
        rows.append((
            str(layout.tp), str(layout.pp), schedule, *map(str, (layout.cp, layout.ep, layout.dp_shard)),
            _step_name(config.activation_checkpoint), amount(each.cost.days * SECONDS_PER_DAY / unit),
            f"{each.cost.mfu:.1%}", amount(each.memory / _GIB),
            f"{step.parts.get('pipeline bubble', 0.0) / step.seconds:.0%}",
            f"{_SHORT.get(longest, longest)} {waits[longest] / step.seconds:.0%}" if longest else "-",
        ))  # fmt: skip
    return rows


def _reporter() -> Callable[[int, int], None]:
    """Progress on one line of a terminal, and elsewhere in a line now and then."""
    is_terminal, last = sys.stderr.isatty(), time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if is_terminal:
            print(f"\r{done:,} of {total:,} layouts", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{done:,} of {total:,} layouts", file=sys.stderr, flush=True)

    return report
