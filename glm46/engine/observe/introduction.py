"""The first message of a run: what it trains, on which ranks, and from where it starts."""

import difflib
from typing import Any

from glm46.config.faults import show
from glm46.config.loader import dump_config, stored_config
from glm46.config.model import ModelShape
from glm46.engine.observe.layout_report import describe_layout
from glm46.engine.observe.role_table import format_role_table, whole_role_table
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task, trained_networks
from glm46.run.function import function_of_meta, gate_factor
from glm46.run.parameters import count_parameters
from glm46.run.schedule import learning_rate_factor, schedule_value


def introduction(task: Task, progress: Progress, meta: dict[str, Any] | None, *, is_own: bool) -> str:
    """Return the first message of a run. Collective.

    Args:
        meta: metadata of the checkpoint that was loaded, if any.
        is_own: True if this run saved that checkpoint.
    """
    plan = task.plan
    config = plan.config
    count = count_parameters(plan.shape)
    lines = [
        f"{config.job.description}",
        f"model        {config.model.flavor}: {count.total:,} parameters, {count.active:,} active per token",
        *describe_layout(task),
        *task.describe(),
    ]
    scheduler = config.lr_scheduler
    if plan.end_tokens < scheduler.warmup_tokens:
        lines.append(
            f"warm-up      lr_scheduler.warmup_tokens = {scheduler.warmup_tokens}, and the run ends at "
            f"{plan.end_tokens} tokens: its learning rate reaches "
            f"{learning_rate_factor(plan.end_tokens, scheduler, plan.end_tokens):.0%} of the peak"
        )
    for network in trained_networks(task).values():
        lines += ["", format_role_table(whole_role_table(network)), ""]
    if progress.step and meta is not None:
        other = "" if is_own else f", from checkpoint.load_path = {config.checkpoint.load_path!r}"
        lines.append(f"start        resumed after step {progress.step}, {progress.tokens:,} tokens{other}")
        if progress.tokens >= plan.budget_tokens:
            lines.append(
                f"finished     the budget of {plan.budget_tokens:,} tokens is spent, so no step is trained; "
                "raise training.tokens, or training.steps, to go on"
            )
        lines += [
            f"excluded     samples {first} to {end - 1}, after skipped steps"
            for first, end in progress.excluded_samples
        ]
        # Read and written again, so that keys which only moved or went are no changes.
        lines += _config_changes(dump_config(stored_config(meta["config"])), dump_config(config))
    else:
        path = config.checkpoint.initial_load_path
        lines.append(f"start        from {path or 'initial weights'}")
        if meta is not None:
            lines += _position_changes(function_of_meta(meta).shape, plan.stage_after(0).shape)
            start = schedule_value(config.moe.router_temperature, scheduler.start_tokens)
            if (factor := gate_factor(meta, start)) != 1.0:
                lines.append(
                    f"gates        times {factor:g}: at moe.router_temperature = {start:g} they compute the same"
                )
        if names := config.checkpoint.initial_load_exclude:
            lines.append(f"  without    {', '.join(names)}")
    return "\n".join(lines)


def _position_changes(before: ModelShape, now: ModelShape) -> list[str]:
    """Return a line for each attention key whose value at the start differs from the end of the previous phase."""
    keys = ("rope_theta", "rope_scaling", "sliding_window")
    ended, begins = (shape.model_dump(include=set(keys), exclude_none=True) for shape in (before, now))
    values = {key: [show(table[key]) if key in table else "none" for table in (begins, ended)] for key in keys}
    return [
        f"changed      {key}: {ours}; the phase before ended with {theirs}"
        for key, (ours, theirs) in values.items()
        if begins.get(key) != ended.get(key)
    ]


def _config_changes(before: str, now: str) -> list[str]:
    """Return the lines of the resolved configuration that differ from the checkpoint."""
    difference = difflib.ndiff(before.splitlines(), now.splitlines())
    changed = [f"  {line}" for line in difference if line[:2] in ("- ", "+ ")]
    return ["changed      since the checkpoint was saved:", *changed] if changed else []
