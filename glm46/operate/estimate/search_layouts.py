"""``python -m glm46 plan --search``: the best layouts of a run on a cluster, why others fall, and what changes help."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from glm46.config.run_config import RunConfig
from glm46.operate.estimate.run_cost import SECONDS_PER_DAY, RunCost
from glm46.operate.estimate.search import (
    Candidate,
    LayoutVariant,
    Search,
    options_of,
    search_layouts,
    smallest_cluster,
    what_if,
)
from glm46.operate.estimate.step_time import OrderOf
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.units import aligned, amount, binary_size, time_unit
from glm46.run.plan import Plan

_GIB = 2**30
_SHOWN = 10
_SECONDS_BETWEEN_LINES = 10.0
_SHORT = {"weights and gradients": "FSDP2", "Muon's matrices": "Muon", "the host": "host", "the disk": "disk"}
"""Names of what a layout waits for that fit into a column."""


@dataclass(frozen=True)
class Found:
    """The result of ``plan --search``."""

    config: RunConfig
    cluster: TargetCluster
    search: Search
    smallest: Plan | None
    """See `smallest_cluster`."""
    variants: list[LayoutVariant]
    """Of the first layout; empty if none fits."""


def run_search(config: RunConfig, cluster: TargetCluster, order_of: OrderOf, document_tokens: float | None) -> Found:
    """Search, with progress on stderr; arguments of `search_layouts`."""
    search = search_layouts(config, cluster, order_of, _reporter(), document_tokens)
    variants = what_if(search.best[0].plan, cluster, order_of) if search.best else []
    return Found(config, cluster, search, smallest_cluster(config, cluster), variants)


def search_text(found: Found) -> str:
    """The result on one screen; tables fit into 80 columns."""
    config, best, gpu = found.config, found.search.best, found.cluster.gpu.name
    where = f"{found.cluster.gpus:,} x {gpu}"
    parts = [f"{config.job.description} ({config.model.flavor}) on {where}:\n{_summary(found.search)}"]
    if best:
        parts.append("\n".join(aligned(_layout_rows(best[:_SHOWN]), " ")))
        parts.append(_options("options of the first one:", best[0].plan, config))
    if found.smallest is None:
        parts.append(f"no cluster of {gpu} holds it: lower training.local_batch_size or the sequence")
    else:
        title = f"smallest cluster that fits, with full recomputation: {found.smallest.layout.world_size:,} x {gpu}"
        parts.append(_options(title, found.smallest, config))
    if best:
        refused = [f"{each.name}: {each.refusal}" for each in found.variants if each.refusal is not None]
        lines = aligned(_variant_rows([each for each in found.variants if each.refusal is None]))
        parts.append("\n".join(["the first one with a change:", "", *lines, *refused]))
    return "\n\n".join(parts)


def search_numbers(found: Found) -> dict:
    """The result as a JSON object: bytes, seconds, tokens."""
    search, least = found.search, found.search.least_memory
    return {
        "flavor": found.config.model.flavor,
        "gpu": found.cluster.gpu.name,
        "gpus": found.cluster.gpus,
        "efficiencies": asdict(found.cluster.efficiencies),
        "fitting": search.fitting,
        "refused": dict(search.refused),
        "too_large": search.too_large,
        "least_memory": least if search.too_large else None,
        "candidates": [
            _plan_numbers(each.plan, found.config)
            | {"memory": each.memory, "step_seconds": each.cost.longest.largest.seconds}
            | {"parts": each.cost.longest.largest.parts}
            | _cost_numbers(each.cost)
            for each in search.best
        ],
        "smallest_cluster": None
        if found.smallest is None
        else {"gpus": found.smallest.layout.world_size} | _plan_numbers(found.smallest, found.config),
        "changes": [
            {"name": each.name, "refusal": each.refusal, "memory": each.memory or None, "fits": each.cost is not None}
            | ({} if each.cost is None else _cost_numbers(each.cost))
            for each in found.variants
        ],
    }


def _plan_numbers(plan: Plan, config: RunConfig) -> dict:
    return {
        "layout": asdict(plan.layout),
        "schedule": plan.config.parallelism.pipeline_parallel_schedule if plan.layout.pp > 1 else None,
        "recomputation": plan.config.activation_checkpoint.mode,
        "options": options_of(plan, config),
    }


def _cost_numbers(cost: RunCost) -> dict:
    return {"days": cost.days, "mfu": cost.mfu, "tokens_per_second": cost.tokens_per_second, "dollars": cost.dollars}


def _options(title: str, plan: Plan, config: RunConfig) -> str:
    return f"{title}\n  {' '.join(options_of(plan, config)) or 'none: the config has them'}"


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
        schedule = config.parallelism.pipeline_parallel_schedule if layout.pp > 1 else "-"
        step = each.cost.longest.largest
        waits = {name.removeprefix("waiting for "): share for name, share in step.parts.items() if "waiting" in name}
        longest = max(waits, key=waits.__getitem__, default="")
        rows.append((
            str(layout.tp), str(layout.pp), schedule, *map(str, (layout.cp, layout.ep, layout.dp_shard)),
            config.activation_checkpoint.mode, amount(each.cost.days * SECONDS_PER_DAY / unit), f"{each.cost.mfu:.1%}",
            amount(each.memory / _GIB), f"{step.parts.get('pipeline bubble', 0.0) / step.seconds:.0%}",
            f"{_SHORT.get(longest, longest)} {waits[longest] / step.seconds:.0%}" if longest else "-",
        ))  # fmt: skip
    return rows


def _variant_rows(variants: list[LayoutVariant]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("change", "tokens/s", "MFU", "memory")]
    for each in variants:
        speed = ("does not fit", "-")
        if each.cost is not None:
            speed = f"{each.cost.tokens_per_second:,.0f}", f"{each.cost.mfu:.1%}"
        rows.append((each.name, *speed, binary_size(each.memory)))
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
