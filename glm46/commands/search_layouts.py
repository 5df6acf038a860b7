"""``python -m glm46 plan --search``: the best layouts of a run on a cluster, why others fall, and what changes help."""

import sys
from collections.abc import Callable

from glm46.config.run_config import RunConfig
from glm46.planner.plan import Plan
from glm46.planner.search import Candidate, Search, options_of, search_layouts, smallest_cluster, what_if
from glm46.planner.step_time import OrderOf
from glm46.planner.target_cluster import TargetCluster

_GIB = 2**30
_SHOWN = 10


def print_search(config: RunConfig, cluster: TargetCluster, order_of: OrderOf) -> bool:
    """Print the best layouts; returns whether one fits."""
    # The packages may be missing, which `cli.main` reports.
    from rich.console import Console

    found = search_layouts(config, cluster, order_of, _reporter())
    console = Console(highlight=False)
    where = f"{cluster.gpus:,} x {cluster.gpu.name}"
    console.print(f"{config.job.description} ({config.model.flavor}) on {where}: {_summary(found)}\n")
    if found.best:
        console.print(_layouts_table(found.best[:_SHOWN]))
        _print_options(console, "options of the first one:", found.best[0].plan, config)
    smallest = smallest_cluster(config, cluster)
    if smallest is None:
        console.print(f"no cluster of {cluster.gpu.name} holds it: lower training.local_batch_size or the sequence")
    else:
        gpus = smallest.layout.world_size
        text = f"smallest cluster that fits, with full recomputation: {gpus:,} x {cluster.gpu.name}"
        _print_options(console, text, smallest, config)
    if found.best:
        console.print("the first one with a change:\n")
        console.print(_variants_table(found.best[0], cluster, order_of))
    return bool(found.best)


def _print_options(console, title: str, plan: Plan, config: RunConfig) -> None:
    console.print(title)
    console.print(f"  {' '.join(options_of(plan, config)) or 'none: the config has them'}\n", soft_wrap=True)


def _summary(found: Search) -> str:
    refused = ", ".join(f"{count:,} by {key}" for key, count in found.refused.most_common())
    parts = [f"{found.fitting:,} layouts fit"]
    if found.too_large:
        parts.append(f"{found.too_large:,} do not, the smallest with {found.least_memory / _GIB:,.1f} GiB per GPU")
    return "; ".join([*parts, *([f"rules forbid {refused}"] if refused else [])])


def _layouts_table(candidates: list[Candidate]):
    from rich import box
    from rich.table import Table

    table = Table(
        "tp", "pp", "schedule", "cp", "ep", "shard", "recompute", "days", "MFU", "GiB", "bubble", "waits most for",
        box=box.SIMPLE,
    )  # fmt: skip
    for each in candidates:
        layout, config = each.plan.layout, each.plan.config
        schedule = config.parallelism.pipeline_parallel_schedule if layout.pp > 1 else "-"
        step = each.cost.longest.largest
        waits = {name.removeprefix("waiting for "): share for name, share in step.parts.items() if "waiting" in name}
        longest = max(waits, key=waits.__getitem__, default=None)
        table.add_row(
            *map(str, (layout.tp, layout.pp, schedule, layout.cp, layout.ep, layout.dp_shard)),
            config.activation_checkpoint.mode, f"{each.cost.days:,.2f}", f"{each.cost.mfu:.1%}",
            f"{each.memory / _GIB:,.1f}",
            f"{step.parts.get('pipeline bubble', 0.0) / step.seconds:.0%}",
            "-" if longest is None else f"{longest}, {waits[longest] / step.seconds:.0%}",
        )  # fmt: skip
    return table


def _variants_table(candidate: Candidate, cluster: TargetCluster, order_of: OrderOf):
    from rich import box
    from rich.table import Table

    table = Table("change", "tokens/s", "MFU", "GiB", box=box.SIMPLE)
    for variant in what_if(candidate.plan, cluster, order_of):
        if variant.refusal is not None:
            table.add_row(variant.name, "", "", variant.refusal)
        elif variant.cost is None:
            table.add_row(variant.name, "does not fit", "", f"{variant.memory / _GIB:,.1f}")
        else:
            rate = f"{variant.cost.tokens_per_second:,.0f}"
            table.add_row(variant.name, rate, f"{variant.cost.mfu:.1%}", f"{variant.memory / _GIB:,.1f}")
    return table


def _reporter() -> Callable[[int, int], None]:
    """Progress on one line of a terminal."""

    def report(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{done:,} of {total:,} layouts", end=end, file=sys.stderr, flush=True)

    return report
