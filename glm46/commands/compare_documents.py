"""``python -m glm46 plan --compare docs``: the figures of the requirement documents beside the planner's."""

from glm46.commands.init import shipped_configs
from glm46.config.loader import load_config
from glm46.parallelize.pipeline_order import pipeline_order
from glm46.planner.documents import compare_documents
from glm46.planner.peaks import accelerator_of
from glm46.planner.plan import resolve_plan
from glm46.planner.report import RunPlan, plan_run
from glm46.planner.target_cluster import Efficiencies, TargetCluster

_PHASES, _SMALL = ("glm46_phase1", "glm46_phase2", "glm46_phase3"), "scaled_64gpu"


def print_comparison(efficiencies: Efficiencies) -> None:
    """Print the table."""
    # Only this needs them; the packages may be missing, which `cli.main` reports.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    folder = shipped_configs()

    def planned(name: str, gpu: str) -> RunPlan:
        plan = resolve_plan(load_config(folder / f"{name}.toml"))
        cluster = TargetCluster(accelerator_of(gpu), plan.layout.world_size, efficiencies=efficiencies)
        return plan_run(plan, cluster, pipeline_order)

    rows = compare_documents([planned(name, "H800") for name in _PHASES], planned(_SMALL, "H100"))
    table = Table("figure", "documents", "planned", "why", box=box.SIMPLE)
    for row in rows:
        table.add_row(row.name, row.stated, row.planned, row.why)
    console = Console(highlight=False)
    console.print(f"Phases 1 to 3 on 8,192 H800 as shipped, 400 Gbit/s, efficiencies: {efficiencies.source}")
    console.print(table)
