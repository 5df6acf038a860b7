"""Implements ``plan --search``: finds the best layouts of a run on a cluster among all that the rules allow."""

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
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.units import aligned, amount, binary_size, time_unit
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.plan import Plan, resolve_plan

_RECOMPUTATIONS = tuple(
    map(
        ActivationCheckpointConfig.model_validate,
        (
            {},
            {"mode": "selective"},
            {"mode": "selective", "recompute": ("experts",)},
            {"mode": "full"},
        ),
    )
)
"""Recomputation settings, from the fastest to the smallest: the first one with which a layout fits is used."""
_MAX_KEPT = 12
"""Number of layouts that are kept, the fastest ones."""
_MAX_GPUS = 2**14
_MAX_EXPERT_DEGREE = 64
"""Wider expert parallelism is not tried."""
_POWERS = [2**power for power in range(_MAX_GPUS.bit_length())]
_MIN_CONTEXT_TOKENS = 1024
"""Minimum tokens of the longest row per context-parallel rank: with fewer it mostly gathers keys."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    plan: Plan
    memory: float
    """Bytes of the rank that needs most."""
    cost: RunCost


def options_of(plan: Plan, config: RunConfig) -> list[str]:
    """Return the command line options that give a config the layout and the recomputation of a plan."""
    options = []
    for section in ("parallelism", "activation_checkpoint"):
        old = getattr(config, section)
        new = getattr(plan.config, section)
        for key, field in type(new).model_fields.items():
            if (value := getattr(new, key)) != getattr(old, key):
                # A default is set by removing the key, because some keys are only valid together with others.
                text = "" if value == field.default else show(value) if isinstance(value, tuple) else value
                options.append(f"--{section}.{key}={text}")
    return options


@dataclass(frozen=True)
class Search:
    """The result of `search_layouts`."""

    config: RunConfig
    cluster: TargetCluster
    best: list[Candidate]
    """Fastest layouts, the fastest first."""
    fitting: int
    """Number of layouts that fit."""
    refused: Counter[str]
    """Number of layouts that a rule forbids, by the first key that the rule names."""
    too_large: int
    """Number of layouts that do not fit with any recomputation."""
    least_memory: float
    """Bytes of the smallest layout that does not fit; infinite if there is none."""

    @cached_property
    def smallest(self) -> Plan | None:
        """See `smallest_cluster`."""
        return smallest_cluster(self.config, self.cluster)


def search_layouts(config: RunConfig, cluster: TargetCluster, document_tokens: float | None = None) -> Search:
    """Plan every layout of a run on all GPUs of a cluster, with progress on stderr; ``document_tokens`` as in `Plan`.
    FSDP2 shards over all remaining ranks. Replicas are not tried, because shards need less memory and send no more."""
    usable = usable_bytes(cluster.gpu.memory_bytes)
    report = _reporter()
    best = list[Candidate]()
    refused = Counter[str]()
    too_large = 0
    min_memory = float("inf")
    layouts = list(_layouts(config, cluster))
    for done, parallelism in enumerate(layouts):
        report(done, len(layouts))
        candidate = config.model_copy(update={"parallelism": parallelism, "activation_checkpoint": _RECOMPUTATIONS[0]})
        if faults := find_faults(candidate, cluster.gpus):
            refused[faults[0].keys[0]] += 1
            continue
        plan = resolve_plan(candidate, cluster.gpus, document_tokens, host_ranks=cluster.host_ranks)
        for recomputation in _RECOMPUTATIONS:
            plan = replace(plan, config=candidate.model_copy(update={"activation_checkpoint": recomputation}))
            memory = largest_stage(stage_memory(plan)).total
            # A recomputation has rules of its own, for example about stages of a single layer.
            if memory <= usable and not find_faults(plan.config, cluster.gpus):
                best.append(Candidate(plan, memory, run_cost(plan, cluster)))
                break
        else:  # no recomputation makes it fit
            too_large += 1
            min_memory = min(min_memory, memory)
    report(len(layouts), len(layouts))
    best.sort(key=lambda fitting: fitting.cost.days)
    return Search(config, cluster, best[:_MAX_KEPT], len(best), refused, too_large, min_memory)


def smallest_cluster(config: RunConfig, cluster: TargetCluster) -> Plan | None:
    """Plan a run on the smallest cluster of these GPUs, a power of two, that holds it with full recomputation; None if
    `_MAX_GPUS` do not."""
    smaller = config.model_copy(update={"activation_checkpoint": ActivationCheckpointConfig(mode="full")})
    usable = usable_bytes(cluster.gpu.memory_bytes)
    kept = checkpoint_size(resolve_plan(config))
    states = 0.0 if config.optimizer.state_offload != "none" else kept.states
    # Gradients are as large as weights; fewer GPUs than this cannot hold what persists between steps.
    min_gpus = 1 if config.training.parameter_offload else (2 * kept.weights + states) / usable
    for gpus in (count for count in _POWERS if count >= min_gpus):
        smaller_cluster = replace(cluster, gpus=gpus)
        for parallelism in _layouts(smaller, smaller_cluster):
            candidate = smaller.model_copy(update={"parallelism": parallelism})
            if not find_faults(candidate, gpus) and plan_memory(candidate, gpus).total <= usable:
                return resolve_plan(candidate, gpus, host_ranks=smaller_cluster.host_ranks)
    return None


def _layouts(config: RunConfig, cluster: TargetCluster) -> Iterator[ParallelismConfig]:
    """Yield the layouts whose degrees divide the number of GPUs; a tensor-parallel group stays inside a node."""
    shape = resolve_shape(config.model)
    gpus = cluster.gpus
    node_gpus = min(cluster.gpus_per_node, cluster.gpus)
    max_length = max([config.training.seq_len, *(stage.seq_len or 0 for stage in config.data.stages)])
    experts = shape.n_routed_experts
    tensor = [degree for degree in _POWERS if node_gpus % degree == 0]
    pipeline = [degree for degree in _POWERS if degree <= shape.num_hidden_layers and gpus % degree == 0]
    context = [degree for degree in _POWERS if degree <= max(max_length // _MIN_CONTEXT_TOKENS, 1)]
    for tp, pp, cp in product(tensor, pipeline, context):
        if gpus % (tp * pp * cp):
            continue
        stage_gpus = gpus // pp
        for ep in range(1, min(stage_gpus, experts, _MAX_EXPERT_DEGREE) + 1):
            if experts % ep or stage_gpus % ep:
                continue
            for pipeline_keys in _pipelines(config, shape, pp):
                yield ParallelismConfig(
                    tensor_parallel_degree=tp,
                    context_parallel_degree=cp,
                    expert_parallel_degree=ep,
                    data_parallel_shard_degree=gpus // (tp * pp * cp),
                    fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
                    expert_exchange=config.parallelism.expert_exchange if ep > 1 else "auto",
                    **pipeline_keys,
                )


_INTERLEAVED = "Interleaved1F1B"
_MORE_STAGES = 4
"""Stages per rank of the interleaved schedule that are tried in addition to its default."""


def _pipelines(config: RunConfig, shape: ModelShape, pp: int) -> list[dict[str, Any]]:
    """Return the pipeline keys to try: the schedule of the config and two common ones with their default number of
    stages, and the interleaved one also with more stages."""
    names = dict.fromkeys([config.parallelism.pipeline_parallel_schedule, "1F1B", _INTERLEAVED])
    if pp == 1:
        return [{}]
    # Stages per rank; None for the default of the schedule.
    schedules = [*((name, None) for name in names), (_INTERLEAVED, _MORE_STAGES)]
    return [
        {
            "pipeline_parallel_degree": pp,
            "pipeline_parallel_schedule": name,
            "pipeline_parallel_stages_per_rank": stages,
        }
        for name, stages in schedules
        if pp * (stages or PIPELINE_SCHEDULES[name].stages_per_rank) <= shape.num_hidden_layers
    ]


_GIB = 2**30
_SHOWN_LAYOUTS = 10
_SECONDS_BETWEEN_LINES = 10.0
_SHORT_WAITS = {"weights and gradients": "FSDP2", "Muon's matrices": "Muon", "the host": "host", "the disk": "disk"}
"""Short names of what a layout waits for, which fit into a column."""


def search_text(search: Search) -> str:
    """Format the result on one screen; tables fit into 80 columns."""
    config = search.config
    best = search.best
    gpu = search.cluster.gpu.name
    where = f"{config.job.description} ({config.model.flavor}) on {search.cluster.gpus:,} x {gpu}"
    parts = [f"{where}:\n{_summary(search)}"]
    if best:
        parts.append("\n".join(aligned(_layout_rows(best[:_SHOWN_LAYOUTS]), " ")))
        parts.append(_options("options of the first one:", best[0].plan, config))
    if search.smallest is None:
        parts.append(f"no cluster of {gpu} holds it: lower training.local_batch_size or the sequence")
    else:
        title = f"smallest cluster that fits, with full recomputation: {search.smallest.layout.world_size:,} x {gpu}"
        parts.append(_options(title, search.smallest, config))
    if best:
        parts.append("what another key changes:  the same command without --search, these options and that key")
    return "\n\n".join(parts)


def search_numbers(search: Search) -> dict[str, Any]:
    """Return the result as a JSON object: bytes, seconds, tokens."""
    smallest = search.smallest
    return {
        "flavor": search.config.model.flavor,
        "gpu": search.cluster.gpu.name,
        "gpus": search.cluster.gpus,
        "efficiencies": search.cluster.efficiencies.numbers(),
        "fitting": search.fitting,
        "refused": dict(search.refused),
        "too_large": search.too_large,
        "least_memory": search.least_memory if search.too_large else None,
        "candidates": [
            _plan_numbers(candidate.plan, search.config)
            | {"memory": candidate.memory, "step_seconds": candidate.cost.longest.largest.seconds}
            | {"parts": candidate.cost.longest.largest.parts}
            | {name: getattr(candidate.cost, name) for name in ("days", "mfu", "tokens_per_second", "dollars")}
            for candidate in search.best
        ],
        "smallest_cluster": smallest and {"gpus": smallest.layout.world_size} | _plan_numbers(smallest, search.config),
    }


def _plan_numbers(plan: Plan, config: RunConfig) -> dict[str, Any]:
    return {
        "layout": asdict(plan.layout),
        "schedule": plan.config.parallelism.pipeline_parallel_schedule if plan.layout.pp > 1 else None,
        "recomputation": _recomputation_name(plan.config.activation_checkpoint),
        "options": options_of(plan, config),
    }


def _recomputation_name(config: ActivationCheckpointConfig) -> str:
    """Return the mode, or "+experts" for results that are recomputed in addition to "selective"."""
    return "".join(f"+{name}" for name in config.recompute) or config.mode


def _options(title: str, plan: Plan, config: RunConfig) -> str:
    return f"{title}\n  {shlex.join(options_of(plan, config)) or 'none: the config has them'}"


def _summary(search: Search) -> str:
    parts = [f"{search.fitting:,} layouts fit"]
    if search.too_large:
        parts.append(f"{search.too_large:,} do not, the smallest with {binary_size(search.least_memory)} per GPU")
    refused = [f"rules forbid {count:,} by {key}" for key, count in search.refused.most_common()]
    return "\n".join(["; ".join(parts), *refused])


def _layout_rows(candidates: list[Candidate]) -> list[tuple[str, ...]]:
    unit, name = time_unit(candidates[0].cost.days * SECONDS_PER_DAY)
    rows: list[tuple[str, ...]] = [
        ("tp", "pp", "schedule", "cp", "ep", "shard", "recompute", name, "MFU", "GiB", "bubble", "waits for")
    ]
    for candidate in candidates:
        layout = candidate.plan.layout
        config = candidate.plan.config
        schedule = str(config.parallelism.pipeline_parallel_schedule) if layout.pp > 1 else "-"
        stages = config.parallelism.pipeline_parallel_stages_per_rank
        schedule = schedule if stages is None else f"{schedule[:11]}/{stages}"
        step = candidate.cost.longest.largest
        waits = {name.removeprefix("waiting for "): share for name, share in step.parts.items() if "waiting" in name}
        main_wait = max(waits, key=waits.__getitem__, default="")
        rows.append(
            (
                str(layout.tp),
                str(layout.pp),
                schedule,
                *map(str, (layout.cp, layout.ep, layout.dp_shard)),
                _recomputation_name(config.activation_checkpoint),
                amount(candidate.cost.days * SECONDS_PER_DAY / unit),
                f"{candidate.cost.mfu:.1%}",
                amount(candidate.memory / _GIB),
                f"{step.parts.get('pipeline bubble', 0.0) / step.seconds:.0%}",
                f"{_SHORT_WAITS.get(main_wait, main_wait)} {waits[main_wait] / step.seconds:.0%}" if main_wait else "-",
            )
        )
    return rows


def _reporter() -> Callable[[int, int], None]:
    """Return a function that prints progress: on one line of a terminal, elsewhere as a line now and then."""
    is_terminal = sys.stderr.isatty()
    printed_at = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal printed_at
        if is_terminal:
            print(f"\r{done:,} of {total:,} layouts", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif time.monotonic() - printed_at >= _SECONDS_BETWEEN_LINES:
            printed_at = time.monotonic()
            print(f"{done:,} of {total:,} layouts", file=sys.stderr, flush=True)

    return report
