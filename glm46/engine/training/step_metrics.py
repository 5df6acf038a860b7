"""Rows of training metrics, and the first message of a run."""

import difflib
from typing import Any

from glm46.compute.optim.roles import format_role_table
from glm46.config.faults import show
from glm46.config.loader import dump_config
from glm46.config.model import ModelShape
from glm46.engine.training.balance import balance_metrics
from glm46.engine.training.layout_report import describe_layout, whole_role_table
from glm46.engine.training.state import Progress
from glm46.engine.training.step import NetworkOutcome, StepOutcome
from glm46.engine.training.task import Task, trained_networks
from glm46.engine.training.throughput import ThroughputMeter
from glm46.engine.training.totals import StepTotals
from glm46.run.function import function_of_meta, gate_factor
from glm46.run.parameters import count_parameters
from glm46.run.schedule import learning_rate_factor, schedule_value


class StepMetrics:
    """Rows of training metrics, with the throughput measured between them."""

    def __init__(self, task: Task):
        self._task = task
        self.throughput = ThroughputMeter(task.cluster.process.world_size)

    def training_row(
        self, progress: Progress, outcome: StepOutcome, totals: StepTotals, lr_factor: float
    ) -> dict[str, Any]:
        """Compute a row of training metrics; columns of networks other than the main one end with ``/`` and the name.
        Collective. Waits for the device, and restarts the mean loss and the throughput."""
        config = self._task.plan.config
        clock = progress.curriculum_tokens
        row: dict[str, Any] = {
            "step": progress.step,
            "tokens": progress.tokens,
            "curriculum_tokens": clock,
            "batch_tokens": totals.real,
            "lr": config.optimizer.lr * lr_factor,
            "skipped_steps": progress.skipped_steps,
            "bias_update_rate": schedule_value(config.moe.bias_update_rate, clock),
            "router_temperature": schedule_value(config.moe.router_temperature, clock),
            "sequence_aux_loss_weight": schedule_value(config.moe.sequence_aux_loss_weight, clock),
            "z_loss_weight": schedule_value(config.moe.z_loss_weight, clock),
        }
        mean_loss = progress.take_mean_loss()
        if mean_loss is not None:
            row["loss_mean"] = mean_loss
        for name, network_outcome in outcome.network_outcomes.items():
            suffix = "" if network_outcome is outcome.main else f"/{name}"
            columns = self._network_columns(name, network_outcome, totals, clock)
            row |= {key + suffix: value for key, value in columns.items()}
        return row | self.throughput.read()

    def objective_columns(self, outcome: StepOutcome, totals: StepTotals, clock: int) -> dict[str, float]:
        """Compute the columns of a step that the objective of the main network defines."""
        name = next(iter(self._task.objectives))
        return self._task.objectives[name].metrics(outcome.main.sums, totals.main, clock)

    def _network_columns(self, name: str, outcome: NetworkOutcome, totals: StepTotals, clock: int) -> dict[str, float]:
        network, (balance_loss, z_loss) = trained_networks(self._task)[name], outcome.sums["aux_losses"].tolist()
        return {
            **self._task.objectives[name].metrics(outcome.sums, totals.objective_counts[name], clock),
            "grad_norm": outcome.grad_norm,
            "balance_loss": balance_loss / max(totals.real, 1),
            "z_loss": z_loss / max(totals.real, 1),
            "expert_bias_max": network.balance.largest_bias(network.cluster.meshes.pipeline),
            **balance_metrics(outcome.tokens_per_expert.cpu(), outcome.overflow.cpu()),
        }


def start_report(task: Task, progress: Progress, meta: dict[str, Any] | None, *, is_own: bool) -> str:
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
        lines += _config_changes(meta["config"], dump_config(config))
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
