"""Rows of training metrics, and the first message of a run."""

import difflib
import math
from typing import Any

import torch

from glm46.config.loader import dump_config
from glm46.data.corpus import describe_sources
from glm46.observe.hardware import HardwareMonitor, device_peak_flops
from glm46.observe.throughput import ThroughputMeter
from glm46.optim.roles import format_role_table
from glm46.planner.budget import budget_tokens
from glm46.planner.parameters import count_parameters
from glm46.planner.schedule import learning_rate_factor, schedule_value
from glm46.training.balance import balance_metrics
from glm46.training.build import Parts
from glm46.training.layout_report import describe_layout, whole_role_table
from glm46.training.loss import TokenCounts
from glm46.training.state import Progress
from glm46.training.step import StepOutcome

_LARGEST_EXPONENT = 700.0
"""Larger exponents overflow FP64."""


class StepMetrics:
    """Computes rows of training metrics, and measures throughput and hardware between them."""

    def __init__(self, parts: Parts):
        self._parts = parts
        compute_type = getattr(torch, parts.config.training.mixed_precision_param)
        self.throughput = ThroughputMeter(
            device_peak_flops(parts.process.device, compute_type),
            parts.process.world_size,
        )
        self._hardware = HardwareMonitor(parts.process.device)

    def training_row(
        self, progress: Progress, outcome: StepOutcome, counts: TokenCounts, lr_factor: float
    ) -> dict[str, Any]:
        """One row of training metrics. Collective over the ranks of a pipeline. Waits for the device, and restarts the
        mean loss and the throughput."""
        config = self._parts.config
        loss = outcome.loss_sum / max(counts.targets, 1)
        clock = progress.curriculum_tokens
        row: dict[str, Any] = {
            "step": progress.step,
            "tokens": progress.tokens,
            "curriculum_tokens": clock,
            "batch_tokens": counts.real,
            "loss": loss,
            "perplexity": math.exp(min(loss, _LARGEST_EXPONENT)),
            "grad_norm": outcome.grad_norm,
            "lr": config.optimizer.lr * lr_factor,
            "skipped_steps": progress.skipped_steps,
            "balance_loss": outcome.aux_loss_sums[0].item() / max(counts.real, 1),
            "z_loss": outcome.aux_loss_sums[1].item() / max(counts.real, 1),
            "bias_update_rate": schedule_value(config.moe.bias_update_rate, clock),
            "router_temperature": schedule_value(config.moe.router_temperature, clock),
        }
        mean_loss = progress.take_mean_loss()
        if mean_loss is not None:
            row["loss_mean"] = mean_loss
        if counts.mtp_targets:
            row |= _mtp_columns(outcome, counts)
            row["mtp_loss_weight"] = schedule_value(config.mtp.loss_weight, clock)
        row["expert_bias_max"] = self._parts.balance.largest_bias(self._parts.meshes.pipeline)
        row |= balance_metrics(outcome.tokens_per_expert.cpu(), outcome.overflow.cpu())
        return row | self.throughput.read() | self._hardware.read()


def _mtp_columns(outcome: StepOutcome, counts: TokenCounts) -> dict[str, float]:
    losses = [total / max(n, 1) for total, n in zip(outcome.mtp_loss_sums.tolist(), counts.mtp_targets, strict=True)]
    accepted = outcome.accepted.tolist()
    columns = {"mtp_loss": sum(losses) / len(losses), "mtp_acceptance": sum(accepted) / max(sum(counts.drafts), 1)}
    if len(losses) > 1:
        for depth, loss in enumerate(losses, start=1):
            columns[f"mtp_loss/{depth}"] = loss
            columns[f"mtp_acceptance/{depth}"] = accepted[depth - 1] / max(counts.drafts[depth - 1], 1)
    return columns


def start_report(parts: Parts, progress: Progress, meta: dict[str, Any] | None) -> str:
    """The first message of a run. Collective."""
    config, count = parts.config, count_parameters(parts.shape)
    lines = [
        f"{config.job.description}",
        f"model        {config.model.flavor}: {count.total:,} parameters, {count.active:,} active per token",
        *describe_layout(parts),
    ]
    lines += describe_sources(config, parts.manifests, parts.rows_per_micro_batch)
    scheduler = config.lr_scheduler
    end = scheduler.start_tokens + budget_tokens(config, parts.rows_per_micro_batch)
    if end < scheduler.warmup_tokens:
        lines.append(
            f"warm-up      lr_scheduler.warmup_tokens = {scheduler.warmup_tokens}, and the run ends at {end} tokens: "
            f"its learning rate reaches {learning_rate_factor(end, scheduler, end):.0%} of the peak"
        )
    lines += ["", format_role_table(whole_role_table(parts)), ""]
    if progress.step and meta is not None:
        lines.append(f"start        resumed after step {progress.step}, {progress.tokens:,} tokens")
        if progress.tokens >= (budget := budget_tokens(config, parts.rows_per_micro_batch)):
            lines.append(
                f"finished     the budget of {budget:,} tokens is spent, so no step is trained; "
                "raise training.tokens, or training.steps, to go on"
            )
        lines += [
            f"excluded     samples {first} to {end - 1}, after skipped steps"
            for first, end in progress.excluded_samples
        ]
        lines += _config_changes(meta["config"], dump_config(config))
    else:
        lines.append(f"start        from {config.checkpoint.initial_load_path or 'initial weights'}")
        patterns = {"only": config.checkpoint.initial_load_include, "without": config.checkpoint.initial_load_exclude}
        lines += [f"  {word:<10} {', '.join(names)}" for word, names in patterns.items() if names]
    return "\n".join(lines)


def _config_changes(before: str, now: str) -> list[str]:
    """Lines of the resolved configuration that differ from the checkpoint."""
    difference = difflib.ndiff(before.splitlines(), now.splitlines())
    changed = [f"  {line}" for line in difference if line[:2] in ("- ", "+ ")]
    return ["changed      since the checkpoint was saved:", *changed] if changed else []
