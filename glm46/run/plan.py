"""A run's config with all that follows from it, resolved once and handed down."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from glm46.config.model import ModelShape
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.run.context_keys import keys_travel
from glm46.run.curriculum import TextStage, plan_stages, stage_at
from glm46.run.layout import ExpertLevels, Layout, expert_levels, resolve_layout, smallest_world, why_not_in_levels
from glm46.run.schedule import batch_sequences

LEAST_ROWS_OF_EXPERT = 512
"""Of a chunk: grouped products of fewer rows take longer per row."""


@dataclass(frozen=True)
class Plan:
    """A config on a number of processes; equal on all ranks."""

    config: RunConfig
    shape: ModelShape
    """Of [model]; a stage of text may have another window or RoPE scaling."""
    layout: Layout
    text_stages: tuple[TextStage, ...]
    budget_tokens: int
    """Tokens of this run, from its first step on."""
    expert_levels: ExpertLevels | None = None
    """Levels in which tokens travel to their experts; None: in one exchange among all ranks that share them."""
    host_ranks: int | None = None
    """As of `expert_levels`."""
    document_tokens: float | None = None
    """Mean tokens of a document, for FLOPs only; None: each row is counted as one document."""

    @property
    def rows_per_micro_batch(self) -> int:
        """Sequences of one micro-batch over all ranks."""
        return self.config.training.local_batch_size * self.layout.dp_degree

    @property
    def end_tokens(self) -> int:
        """Tokens of the curriculum at the end of this run: the end of a schedule without a total of its own."""
        return self.config.lr_scheduler.start_tokens + self.budget_tokens

    @property
    def stage_tokens(self) -> list[int]:
        """Tokens of each of `text_stages` in this run."""
        left, tokens = self.budget_tokens, []
        for stage in self.text_stages:
            tokens.append(left if stage.stop is None else min(left, (stage.stop - stage.first) * stage.seq_len))
            left -= tokens[-1]
        return tokens

    def stage_after(self, samples: int) -> TextStage:
        """The stage in force after this many samples: that of the last one, or of the first one at the start."""
        return stage_at(self.text_stages, max(samples - 1, 0))

    @property
    def exchange_chunks(self) -> int:
        """Parts in which the tokens of a micro-batch travel to their experts: by default two where that pays, which on
        one host it does not, as the gradients of two chunks must be added."""
        stated, levels = self.config.parallelism.expert_exchange_chunks, self.expert_levels
        is_deepep = self.config.parallelism.expert_exchange == "deepep"  # a rule refuses two chunks
        if stated is not None or self.layout.ep == 1 or levels is None or levels.hosts == 1 or is_deepep:
            return stated or 1
        lengths = [stage.seq_len for stage in self.text_stages]
        return 2 if min(map(self.rows_of_expert, lengths)) / 2 >= LEAST_ROWS_OF_EXPERT else 1

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest micro-batch of a rank, in training and validation."""
        training = self.config.training
        longest = max([training.seq_len, *(stage.seq_len for stage in self.text_stages)])
        return -(-training.local_batch_size * longest // (self.layout.cp * self.layout.tp))

    def rows_of_expert(self, seq_len: int) -> float:
        """Rows of a micro-batch for each expert, on average."""
        tokens = self.config.training.local_batch_size * seq_len / (self.layout.cp * self.layout.tp)
        return tokens * self.layout.ep * self.shape.num_experts_per_tok / self.shape.n_routed_experts

    def keys_travel(self, shape: ModelShape, size: Sequence[int]) -> bool:
        """`keys_travel` of micro-batches of this many rows and tokens per row."""
        width = 4 if self.config.training.mixed_precision_param == "float32" else 2
        return keys_travel(shape, width, rows=size[0], length=size[1], cp=self.layout.cp, tp=self.layout.tp)


def resolve_plan(
    config: RunConfig,
    world_size: int | None = None,
    document_tokens: float | None = None,
    *,
    host_ranks: int | None = None,
) -> Plan:
    """Resolve a config on this many processes; absent: the fewest that the degrees allow. ``host_ranks``: as of
    `expert_levels`."""
    layout = resolve_layout(config.parallelism, world_size or smallest_world(config.parallelism))
    stages = plan_stages(config)
    return Plan(
        config=config,
        shape=resolve_shape(config.model),
        layout=layout,
        expert_levels=expert_levels(config.parallelism, host_ranks),
        host_ranks=host_ranks,
        text_stages=stages,
        budget_tokens=budget_tokens(config, stages, config.training.local_batch_size * layout.dp_degree),
        document_tokens=document_tokens,
    )


def describe_exchange(plan: Plan) -> str:
    """A text about the rows that a token sends to its experts in one direction, without those to its own rank."""
    shape, ep, levels = plan.shape, plan.layout.ep, plan.expert_levels
    chosen, waits = shape.num_experts_per_tok, "1 host wait per layer"
    chunks = f", {plan.exchange_chunks} chunks" if plan.exchange_chunks > 1 else ""
    least = min(plan.rows_of_expert(stage.seq_len) for stage in plan.text_stages) / plan.exchange_chunks
    if chunks and least < LEAST_ROWS_OF_EXPERT:
        waits += f"; {least:,.0f} rows of an expert at a time: products of fewer than {LEAST_ROWS_OF_EXPERT} are slow"
    if levels is None:
        is_auto = plan.config.parallelism.expert_exchange == "auto"
        reason = why_not_in_levels(ep, plan.host_ranks) if is_auto else None
        of_token = f"all to all{chunks}: {chosen * (1 - 1 / ep):.1f} rows of a token to {ep} ranks"
        return f"{of_token}; {waits}" + (f"; not two levels: {reason}" if reason else "")
    to_hosts, to_ranks = (places_of_token(shape, parts) for parts in (levels.hosts, ep))
    of_all = f"(all to all {chosen * (levels.of_host - 1) / ep:.1f})"
    inside = f"{to_ranks * (1 - 1 / levels.of_host):.1f} inside them {of_all}"
    way = "DeepEP" if plan.config.parallelism.expert_exchange == "deepep" else "two levels"
    if levels.hosts == 1:
        return f"{way}, one host of {ep} ranks{chunks}: rows of a token {inside}; {waits}"
    between = 1 - 1 / levels.hosts
    return (
        f"{way}, {levels.hosts} hosts x {levels.of_host} ranks{chunks}: {to_hosts * between:.1f} rows of a token "
        f"between hosts (all to all {chosen * between:.1f}), {inside}; {waits}"
    )


def gradients_are_summed_once(plan: Plan) -> bool:
    """True if ranks hold whole gradients until the last micro-batch of a step, and sum them once."""
    return plan.layout.pp > 1 or plan.config.parallelism.defer_gradient_sync


def unsharded_kinds(plan: Plan) -> frozenset[tuple[bool, bool]]:
    """Kinds of parameters, as (of experts, trained), that FSDP2 does not get: no other rank has a part or, of trained
    ones, a copy of them, and they are stored in the type that they are computed with. FSDP2 would copy them for each
    pass and convert each gradient to the reduce type and back: more than half of a step on one H100. Under tensor
    parallelism it gets dense ones that are trained: the gradient of a replicated one would be a partial sum."""
    training, layout = plan.config.training, plan.layout
    if training.parameter_offload:
        return frozenset()
    stored, reduced = training.dtype, training.mixed_precision_reduce
    sums_in_stored = reduced == stored or (reduced == "float32" and not gradients_are_summed_once(plan))
    has_trained = stored == training.mixed_precision_param and sums_in_stored and layout.dp_replicate == 1
    gathers_fp8 = plan.config.float8.enable_fsdp_float8_all_gather
    shards = {True: layout.expert_shards, False: 2 if gathers_fp8 else layout.dense_shards}
    alone = [of_experts for of_experts, ranks in shards.items() if ranks == 1]
    kinds = {(of_experts, trained) for of_experts in alone for trained in (False, has_trained)}
    return frozenset(kinds - ({(False, True)} if layout.tp > 1 else set()))


def replicas_reduce_once(plan: Plan) -> bool:
    """True if replicas sum gradients after the last micro-batch only: FSDP2 adds up micro-batches in the reduce type,
    on the device, where BF16 would lose small gradients and `parameter_offload` wants no gradients. Under a pipeline
    all gradients are reduced once."""
    training = plan.config.training
    return (
        plan.layout.dp_replicate > 1 and training.mixed_precision_reduce == "float32" and not training.parameter_offload
    )


def budget_tokens(config: RunConfig, stages: Sequence[TextStage], rows_per_micro_batch: int) -> int:
    """Tokens of this run, from its first step on: [training] tokens, or the tokens of its steps.

    Args:
        stages: all stages of the run's text.
        rows_per_micro_batch: sequences that all ranks together take in one micro-batch.
    """
    training = config.training
    if training.tokens is not None:
        return training.tokens
    total, samples, start = 0, 0, config.lr_scheduler.start_tokens
    batch, left = training.global_batch_size, training.steps
    ramp_ends = batch[-1][0] if isinstance(batch, tuple) else 0
    while left:
        rows = batch_sequences(batch, start + total, rows_per_micro_batch)
        stage = stage_at(stages, samples)
        # After a ramp all steps of a stage are equal, except its last one.
        room = rows * left if stage.stop is None else stage.stop - samples
        steps = min(left, -(-room // rows)) if start + total >= ramp_ends else 1
        rows = min(rows * steps, room)
        samples, total, left = samples + rows, total + rows * stage.seq_len, left - steps
    return total


def places_of_token(shape: ModelShape, parts: int) -> float:
    """The number of parts that have an expert of a token, on average: `parts` share the experts evenly, and each choice
    of experts is as likely as any other."""
    experts, chosen = shape.n_routed_experts, shape.num_experts_per_tok
    return parts * (1 - math.comb(experts - experts // parts, chosen) / math.comb(experts, chosen))
