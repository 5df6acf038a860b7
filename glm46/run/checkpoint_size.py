"""Size of a run's checkpoints, and bytes per element of each dtype."""

from dataclasses import dataclass

from glm46.config.model import ModelShape
from glm46.config.rules_layout import STATE_BLOCK
from glm46.run.parameters import Head, adapter_rows, is_frozen, named_rows
from glm46.run.plan import Plan

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes per element."""
STATE_WIDTHS = WIDTHS | {"8bit": 1.0 + 4.0 / STATE_BLOCK}
"""Bytes per element of optimizer states; 8bit has an FP32 scale per block."""


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint, summed over all ranks."""

    weights: float
    """Master weights, and frozen weights in the compute type."""
    states: float
    """Optimizer states."""

    @property
    def total(self) -> float:
        return self.weights + self.states


def checkpoint_size(plan: Plan) -> CheckpointSize:
    """Compute the size of each checkpoint of a run, including the critic; with [adapter], only of the adapters."""
    optimizer = plan.config.optimizer
    adapter = plan.config.adapter
    rl = plan.config.rl
    networks: list[tuple[ModelShape, Head]] = [(plan.shape, plan.config.head)]
    if rl is not None and rl.resolved().has_critic:
        networks.append((plan.shape.model_copy(update={"num_nextn_predict_layers": 0}), "value"))
    frozen_bytes = 0
    num_weights = 0
    num_states = 0
    for shape, head in networks:
        rows = named_rows(shape, head) if adapter is None else adapter_rows(shape, adapter)
        trained = {name: row for name, row in rows.items() if row.optimizer is not None}
        if plan.config.trains_only_drafts:
            frozen = [row for name, row in trained.items() if not name.startswith("mtp.")]
            frozen_bytes += sum(row.numel(shape) for row in frozen) * WIDTHS[plan.config.training.mixed_precision_param]
            trained = {name: row for name, row in trained.items() if name.startswith("mtp.")}
        frozen = [row for row in trained.values() if is_frozen(row, plan.indexer_training)]
        frozen_bytes += sum(row.numel(shape) for row in frozen) * WIDTHS[plan.config.training.mixed_precision_param]
        trained = {name: row for name, row in trained.items() if not is_frozen(row, plan.indexer_training)}
        num_weights += sum(row.numel(shape) for row in trained.values())
        num_states += sum(row.numel(shape) * row.states(optimizer) for row in trained.values())
    return CheckpointSize(
        weights=num_weights * WIDTHS[plan.config.training.dtype] + frozen_bytes,
        states=num_states * STATE_WIDTHS[optimizer.state_dtype],
    )
