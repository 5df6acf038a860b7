"""Rows of training metrics."""

from typing import Any

from glm46.engine.training.balance import balance_metrics
from glm46.engine.training.network import StepSums
from glm46.engine.training.state import Progress
from glm46.engine.training.step import StepOutcome
from glm46.engine.training.task import Task, trained_networks
from glm46.engine.training.throughput import ThroughputMeter
from glm46.engine.training.totals import StepTotals
from glm46.run.schedule import schedule_value


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
        for name, sums in outcome.sums.items():
            suffix = "" if sums is outcome.main else f"/{name}"
            columns = self._network_columns(name, sums, totals, clock)
            row |= {key + suffix: value for key, value in columns.items()}
        return row | self.throughput.read()

    def objective_columns(self, outcome: StepOutcome, totals: StepTotals, clock: int) -> dict[str, float]:
        """Compute the columns of a step that the objective of the main network defines."""
        name = next(iter(self._task.objectives))
        return self._task.objectives[name].metrics(outcome.main.objective, totals.main, clock)

    def _network_columns(self, name: str, sums: StepSums, totals: StepTotals, clock: int) -> dict[str, float]:
        network = trained_networks(self._task)[name]
        balance_loss, z_loss, index_loss, mass = sums.aux_losses.tolist()
        index_columns = {}
        if network.parts.trains_indexers:
            index_columns["index_loss"] = index_loss / max(totals.real * network.plan.sparse_calls, 1)
            index_columns["index_grad_norm"] = sums.index_grad_norm.item()
        if network.parts.trains_only_indexers:
            index_columns["index_mass"] = mass / max(totals.real * network.plan.sparse_calls, 1)
        return {
            **self._task.objectives[name].metrics(sums.objective, totals.objective_counts[name], clock),
            "grad_norm": sums.grad_norm.item(),
            "balance_loss": balance_loss / max(totals.real, 1),
            "z_loss": z_loss / max(totals.real, 1),
            "expert_bias_max": network.balance.largest_bias(network.cluster.meshes.pipeline),
            **index_columns,
            **balance_metrics(sums.tokens_per_expert.cpu(), sums.overflow.cpu()),
        }
