"""A run's config with all that follows from it, resolved once and handed down."""

from dataclasses import dataclass

from glm46.config.model import ModelShape
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.planner.budget import budget_tokens
from glm46.planner.curriculum import TextStage, plan_stages
from glm46.planner.layout import Layout, resolve_layout


@dataclass(frozen=True)
class Plan:
    """A config on a number of processes; equal on all ranks."""

    config: RunConfig
    shape: ModelShape
    layout: Layout
    text_stages: tuple[TextStage, ...]
    budget_tokens: int
    """Tokens of this run, from its first step on."""

    @property
    def rows_per_micro_batch(self) -> int:
        """Sequences of one micro-batch over all ranks."""
        return self.config.training.local_batch_size * self.layout.dp_degree

    @property
    def end_tokens(self) -> int:
        """Tokens of the curriculum at the end of this run: the end of a schedule without a total of its own."""
        return self.config.lr_scheduler.start_tokens + self.budget_tokens


def resolve_plan(config: RunConfig, world_size: int) -> Plan:
    """Resolve a config on this many processes.

    Raises:
        UserError: the parallel degrees do not multiply to the number of processes.
    """
    layout = resolve_layout(config.parallelism, world_size)
    return Plan(
        config=config,
        shape=resolve_shape(config.model),
        layout=layout,
        text_stages=tuple(plan_stages(config)),
        budget_tokens=budget_tokens(config, config.training.local_batch_size * layout.dp_degree),
    )
