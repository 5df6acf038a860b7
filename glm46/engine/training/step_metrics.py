"""Rows of training metrics, and the first message of a run."""

import difflib
import hashlib
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from glm46.compute.distributed.environment import launched_local_world_size
from glm46.compute.distributed.process import nccl_version
from glm46.compute.optim.roles import format_role_table
from glm46.config.faults import show
from glm46.config.loader import dump_config
from glm46.config.model import ModelShape
from glm46.engine.observe.hardware import HardwareMonitor, ThroughputMeter, device_peak_flops
from glm46.engine.observe.metrics import METRICS, SPREAD
from glm46.engine.training.balance import balance_metrics
from glm46.engine.training.layout_report import describe_layout, whole_role_table
from glm46.engine.training.named_sums import spread_over_ranks
from glm46.engine.training.state import Progress
from glm46.engine.training.step import NetworkOutcome, StepOutcome
from glm46.engine.training.task import Task, trained_networks
from glm46.engine.training.totals import StepTotals
from glm46.run.function import function_of_meta, gate_factor
from glm46.run.parameters import count_parameters
from glm46.run.schedule import learning_rate_factor, schedule_value
from glm46.storage.huggingface.folder_check import stored_shape

_OF_RANKS = tuple(metric.name for metric in METRICS if metric.per == SPREAD)
_GIT_SECONDS = 5.0


class StepMetrics:
    """Computes rows of training metrics, and measures throughput and hardware between them."""

    def __init__(self, task: Task):
        self._task, cluster = task, task.cluster
        compute_type = getattr(torch, task.plan.config.training.mixed_precision_param)
        self.throughput = ThroughputMeter(device_peak_flops(cluster.device, compute_type), cluster.process.world_size)
        self._hardware = HardwareMonitor(cluster.device)

    def training_row(
        self, progress: Progress, outcome: StepOutcome, totals: StepTotals, lr_factor: float
    ) -> dict[str, Any]:
        """One row of training metrics; columns of networks other than the main one end with ``/`` and the name.
        Collective. Waits for the device, and restarts the mean loss and the throughput."""
        config, clock = self._task.plan.config, progress.curriculum_tokens
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
        for name, of_network in outcome.of.items():
            suffix = "" if of_network is outcome.main else f"/{name}"
            columns = self._network_columns(name, of_network, totals, clock)
            row |= {key + suffix: value for key, value in columns.items()}
        return row | self.throughput.read() | spread_over_ranks(self._hardware.read(), _OF_RANKS)

    def objective_columns(self, outcome: StepOutcome, totals: StepTotals, clock: int) -> dict[str, float]:
        """Columns of a step by the objective of the main network."""
        name = next(iter(self._task.objectives))
        return self._task.objectives[name].metrics(outcome.main.sums, totals.main, clock)

    def _network_columns(self, name: str, outcome: NetworkOutcome, totals: StepTotals, clock: int) -> dict[str, float]:
        network, (balance_loss, z_loss) = trained_networks(self._task)[name], outcome.sums["aux_losses"].tolist()
        return {
            **self._task.objectives[name].metrics(outcome.sums, totals.of[name], clock),
            "grad_norm": outcome.grad_norm,
            "balance_loss": balance_loss / max(totals.real, 1),
            "z_loss": z_loss / max(totals.real, 1),
            "expert_bias_max": network.balance.largest_bias(network.cluster.meshes.pipeline),
            **balance_metrics(outcome.tokens_per_expert.cpu(), outcome.overflow.cpu()),
        }


def identity(task: Task) -> dict[str, str]:
    """Facts that tell one run from another, by name, for the heartbeat."""
    config, layout = task.plan.config, task.plan.layout
    return {
        "task": task.name,
        "model": config.model.flavor,
        "commit": _commit(),
        "world_size": str(layout.world_size),
        "hosts": str(-(-layout.world_size // launched_local_world_size())),
        "layout": " ".join(f"{axis}={degree}" for axis, degree in asdict(layout).items() if degree > 1),
        "config": hashlib.sha256(dump_config(config).encode()).hexdigest()[:12],
        "torch": torch.__version__,
        "nccl": nccl_version(),
    }


def _commit() -> str:
    """Commit of this checkout, with ``-dirty`` if files of it are changed; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def start_report(task: Task, progress: Progress, meta: dict[str, Any] | None, *, is_own: bool) -> str:
    """The first message of a run. Collective.

    Args:
        meta: metadata of the checkpoint that was loaded, if any.
        is_own: whether this run has saved that checkpoint.
    """
    plan = task.plan
    config, count = plan.config, count_parameters(plan.shape)
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
        if path is not None and (meta is not None or config.checkpoint.initial_load_in_hf):
            before = stored_shape(Path(path)) if meta is None else function_of_meta(meta).shape
            lines += _position_changes(before, plan.stage_after(0).shape)
        if path is not None:
            start = schedule_value(config.moe.router_temperature, scheduler.start_tokens)
            if (factor := gate_factor(meta, start)) != 1.0:
                lines.append(
                    f"gates        times {factor:g}: at moe.router_temperature = {start:g} they compute the same"
                )
        if names := config.checkpoint.initial_load_exclude:
            lines.append(f"  without    {', '.join(names)}")
    return "\n".join(lines)


def _position_changes(before: ModelShape, now: ModelShape) -> list[str]:
    """Lines of the keys of attention in which a run begins otherwise than the phase before it ended."""
    keys = ("rope_theta", "rope_scaling", "sliding_window")
    ended, begins = (shape.model_dump(include=set(keys), exclude_none=True) for shape in (before, now))
    values = {key: [show(table[key]) if key in table else "none" for table in (begins, ended)] for key in keys}
    return [
        f"changed      {key}: {ours}; the phase before ended with {theirs}"
        for key, (ours, theirs) in values.items()
        if begins.get(key) != ended.get(key)
    ]


def _config_changes(before: str, now: str) -> list[str]:
    """Lines of the resolved configuration that differ from the checkpoint."""
    difference = difflib.ndiff(before.splitlines(), now.splitlines())
    changed = [f"  {line}" for line in difference if line[:2] in ("- ", "+ ")]
    return ["changed      since the checkpoint was saved:", *changed] if changed else []
