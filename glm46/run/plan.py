"""Config of a run with everything derived from it, resolved once and passed down."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from glm46.config.indexer import IndexerTraining
from glm46.config.model import ModelShape
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.run.context_keys import keys_travel
from glm46.run.curriculum import TextStage, plan_stages, stage_at
from glm46.run.flops import TrainingFlops, training_flops
from glm46.run.layout import ExpertLevels, Layout, expert_levels, resolve_layout, smallest_world, why_not_in_levels
from glm46.run.schedule import batch_sequences, learning_rate_factor

LEAST_ROWS_OF_EXPERT = 512
"""Minimum rows per expert in a chunk: grouped products of fewer rows take longer per row."""


@dataclass(frozen=True)
class Plan:
    """A config on a number of processes; equal on all ranks."""

    config: RunConfig
    shape: ModelShape
    """Shape of the model; a stage of text may have another window or RoPE scaling."""
    layout: Layout
    text_stages: tuple[TextStage, ...]
    budget_tokens: int
    """Tokens of this run, counted from its first step."""
    expert_levels: ExpertLevels | None = None
    """Levels of the exchange of tokens with experts; None: one exchange among all ranks that share them."""
    host_ranks: int | None = None
    """See the argument of `layout.expert_levels`."""
    document_tokens: float | None = None
    """Mean tokens of a document, for FLOPs only; None: each row is counted as one document."""

    @property
    def mtp_depths(self) -> int:
        """Number of tokens that the prediction layers draft in training: `mtp.depths`, or one per layer."""
        layers = self.shape.num_nextn_predict_layers
        return (self.config.mtp.depths or layers) if layers else 0

    def unrolled(self, shape: ModelShape) -> ModelShape:
        """Return a shape with one prediction layer for each of `mtp_depths`: it costs what training computes, and has
        more weights if depths share a layer."""
        return shape.model_copy(update={"num_nextn_predict_layers": self.mtp_depths})

    def training_flops(self, stage: TextStage) -> TrainingFlops:
        """Count the FLOPs per token of a stage of text."""
        return training_flops(
            self.unrolled(stage.shape),
            stage.seq_len,
            self.document_tokens,
            self.config.adapter,
            only_drafts=self.config.trains_only_drafts,
        )

    @property
    def trains_indexers(self) -> bool:
        """True if indexers are trained at some point of the run."""
        return any(stage.indexer != "frozen" for stage in self.text_stages)

    @property
    def trains_only_indexers(self) -> bool:
        """True if the run never trains anything else."""
        return all(stage.indexer == "alone" for stage in self.text_stages)

    @property
    def indexer_training(self) -> IndexerTraining:
        """Value of `indexer.train` of a run that trains in one stage what this one trains in all of its stages."""
        if self.trains_only_indexers:
            return "alone"
        return "joint" if self.trains_indexers else "frozen"

    @property
    def sparse_calls(self) -> int:
        """Number of calls of sparse attention for a token in training; 0 for another kind of attention."""
        return (self.shape.num_hidden_layers + self.mtp_depths) if self.shape.is_sparse else 0

    @property
    def rows_per_micro_batch(self) -> int:
        """Sequences of one micro-batch over all ranks."""
        return self.config.training.local_batch_size * self.layout.dp_degree

    @property
    def end_tokens(self) -> int:
        """Tokens of the curriculum at the end of this run: the end of a schedule without its own total."""
        return self.config.lr_scheduler.start_tokens + self.budget_tokens

    def learning_rate_factor(self, stage: TextStage, clock: int, step_tokens: int) -> float:
        """Return the learning rate of a step relative to its peak: `indexer.lr` while only indexers are trained, if it
        is set; otherwise `learning_rate_factor`.

        Args:
            clock: tokens of the curriculum before the step.
        """
        config = self.config
        if stage.indexer == "alone" and config.indexer.lr is not None:
            return config.indexer.lr / (config.optimizer.adamw_lr or config.optimizer.lr)  # AdamW trains indexers
        return learning_rate_factor(clock, config.lr_scheduler, self.end_tokens, step_tokens)

    @property
    def stage_tokens(self) -> list[int]:
        """Tokens of each of `text_stages` in this run."""
        remaining = self.budget_tokens
        tokens = []
        for stage in self.text_stages:
            tokens.append(
                remaining if stage.stop is None else min(remaining, (stage.stop - stage.first) * stage.seq_len)
            )
            remaining -= tokens[-1]
        return tokens

    def stage_after(self, samples: int) -> TextStage:
        """Return the stage of the last of this many samples; at the start, of the first one."""
        return stage_at(self.text_stages, max(samples - 1, 0))

    @property
    def exchange_chunks(self) -> int:
        """Number of chunks in which the tokens of a micro-batch are sent to experts. The default is two where that is
        faster; on one host it is not, because the gradients of two chunks must be added."""
        configured = self.config.parallelism.expert_exchange_chunks
        if configured is not None:
            return configured
        levels = self.expert_levels
        is_deepep = self.config.parallelism.expert_exchange == "deepep"  # a rule refuses two chunks
        if self.layout.ep == 1 or levels is None or levels.hosts == 1 or is_deepep:
            return 1
        lengths = [stage.seq_len for stage in self.text_stages]
        return 2 if min(map(self.rows_of_expert, lengths)) / 2 >= LEAST_ROWS_OF_EXPERT else 1

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a micro-batch of a rank, in training and validation."""
        training = self.config.training
        max_length = max([training.seq_len, *(stage.seq_len for stage in self.text_stages)])
        return -(-training.local_batch_size * max_length // (self.layout.cp * self.layout.tp))

    def rows_of_expert(self, seq_len: int) -> float:
        """Return the average number of rows of a micro-batch for each expert."""
        tokens = self.config.training.local_batch_size * seq_len / (self.layout.cp * self.layout.tp)
        return tokens * self.layout.ep * self.shape.num_experts_per_tok / self.shape.n_routed_experts

    def keys_travel(self, shape: ModelShape, size: Sequence[int]) -> bool:
        """Call `keys_travel` for micro-batches of this many rows and tokens per row."""
        width = 4 if self.config.training.mixed_precision_param == "float32" else 2
        return keys_travel(shape, width, rows=size[0], length=size[1], cp=self.layout.cp, tp=self.layout.tp)


def resolve_plan(
    config: RunConfig,
    world_size: int | None = None,
    document_tokens: float | None = None,
    *,
    host_ranks: int | None = None,
) -> Plan:
    """Resolve a config on this many processes, or the fewest that the degrees allow. ``host_ranks``: see
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
    """Describe the rows that a token sends to its experts in one direction, without those to its own rank."""
    shape = plan.shape
    ep = plan.layout.ep
    levels = plan.expert_levels
    chosen = shape.num_experts_per_tok
    waits = "1 host wait per layer"
    chunks = f", {plan.exchange_chunks} chunks" if plan.exchange_chunks > 1 else ""
    min_rows = min(plan.rows_of_expert(stage.seq_len) for stage in plan.text_stages) / plan.exchange_chunks
    if chunks and min_rows < LEAST_ROWS_OF_EXPERT:
        waits += (
            f"; {min_rows:,.0f} rows of an expert at a time: products of fewer than {LEAST_ROWS_OF_EXPERT} are slow"
        )
    if levels is None:
        is_auto = plan.config.parallelism.expert_exchange == "auto"
        reason = why_not_in_levels(ep, plan.host_ranks) if is_auto else None
        text = f"all to all{chunks}: {chosen * (1 - 1 / ep):.1f} rows of a token to {ep} ranks"
        return f"{text}; {waits}" + (f"; not two levels: {reason}" if reason else "")
    to_hosts = places_of_token(shape, levels.hosts)
    to_ranks = places_of_token(shape, ep)
    all_to_all = f"(all to all {chosen * (levels.ranks_per_host - 1) / ep:.1f})"
    inside_hosts = f"{to_ranks * (1 - 1 / levels.ranks_per_host):.1f} inside them {all_to_all}"
    method = "DeepEP" if plan.config.parallelism.expert_exchange == "deepep" else "two levels"
    if levels.hosts == 1:
        return f"{method}, one host of {ep} ranks{chunks}: rows of a token {inside_hosts}; {waits}"
    remote_share = 1 - 1 / levels.hosts
    return (
        f"{method}, {levels.hosts} hosts x {levels.ranks_per_host} ranks{chunks}: {to_hosts * remote_share:.1f} rows "
        f"of a token between hosts (all to all {chosen * remote_share:.1f}), {inside_hosts}; {waits}"
    )


def gradients_are_summed_once(plan: Plan) -> bool:
    """Return whether ranks keep unsharded gradients until the last micro-batch of a step, and sum them once, as the
    stages of a pipeline do."""
    return plan.layout.pp > 1


def unsharded_kinds(plan: Plan) -> frozenset[tuple[bool, bool]]:
    """Return the kinds of parameters, as (is_expert, is_trained), that FSDP2 does not manage: no other rank has a part
    of them or, if trained, a copy, and they are stored in the compute dtype. FSDP2 would copy them for each pass and
    convert each gradient to the reduce dtype and back: more than half of a step on one H100. Under tensor parallelism
    it manages trained dense parameters: the gradient of a replicated one would be a partial sum."""
    training = plan.config.training
    layout = plan.layout
    if training.parameter_offload:
        return frozenset()
    stored = training.dtype
    reduced = training.mixed_precision_reduce
    sums_in_stored = reduced == stored or (reduced == "float32" and not gradients_are_summed_once(plan))
    can_train = stored == training.mixed_precision_param and sums_in_stored and layout.dp_replicate == 1
    gathers_fp8 = plan.config.float8.enable_fsdp_float8_all_gather
    dense_shards = 2 if gathers_fp8 else layout.dense_shards  # any number above 1: FSDP2's gather converts to FP8
    shards = {True: layout.expert_shards, False: dense_shards}
    unshared = [is_expert for is_expert, ranks in shards.items() if ranks == 1]
    kinds = {(is_expert, is_trained) for is_expert in unshared for is_trained in (False, can_train)}
    return frozenset(kinds - ({(False, True)} if layout.tp > 1 else set()))


def replicas_reduce_once(plan: Plan) -> bool:
    """Return whether replicas sum gradients only after the last micro-batch. FSDP2 adds up micro-batches in the reduce
    dtype on the device; in BF16 that would lose small gradients, and with `parameter_offload` gradients must not stay
    on the device. Under a pipeline all gradients are reduced once."""
    training = plan.config.training
    return (
        plan.layout.dp_replicate > 1 and training.mixed_precision_reduce == "float32" and not training.parameter_offload
    )


def budget_tokens(config: RunConfig, stages: Sequence[TextStage], rows_per_micro_batch: int) -> int:
    """Compute the tokens of this run from its first step: `tokens` of [training], or the tokens of its steps.

    Args:
        stages: all stages of the run's text.
        rows_per_micro_batch: sequences that all ranks together take in one micro-batch.
    """
    training = config.training
    if training.tokens is not None:
        return training.tokens
    total = 0
    samples = 0
    start = config.lr_scheduler.start_tokens
    batch = training.global_batch_size
    remaining = training.steps
    ramp_ends = batch[-1][0] if isinstance(batch, tuple) else 0
    while remaining:
        rows_per_step = batch_sequences(batch, start + total, rows_per_micro_batch)
        stage = stage_at(stages, samples)
        # After a ramp all steps of a stage are equal, except its last one.
        rows_left = rows_per_step * remaining if stage.stop is None else stage.stop - samples
        steps = min(remaining, -(-rows_left // rows_per_step)) if start + total >= ramp_ends else 1
        rows = min(rows_per_step * steps, rows_left)
        samples += rows
        total += rows * stage.seq_len
        remaining -= steps
    return total


def places_of_token(shape: ModelShape, parts: int) -> float:
    """Return how many of `parts` have an expert of a token, on average, if the parts share the experts evenly and all
    choices of experts are equally likely."""
    experts = shape.n_routed_experts
    chosen = shape.num_experts_per_tok
    return parts * (1 - math.comb(experts - experts // parts, chosen) / math.comb(experts, chosen))
