"""Predicts the time of an optimizer step: kernels by a roofline, collectives by their links, a pipeline by the bubble
of its schedule with equal stages. `run_cost` calls it for each text stage.

Assumptions: sequences are full, experts get equal loads except for `Efficiencies.imbalance`, and nothing else uses the
machines. FSDP2's gathers and reductions overlap with the kernels of their pipeline stage, so the longer of both counts;
exchanges of tokens overlap with shared and routed experts as in `exchange_time`; sends between pipeline stages overlap
with other micro-batches; all other collectives are exposed.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from glm46.operate.estimate.activation_memory import ActivationMemory
from glm46.operate.estimate.activations import Frozen
from glm46.operate.estimate.exchange_time import waits_for_tokens
from glm46.operate.estimate.kernels import MicroBatch, PartOfModel, part_work
from glm46.operate.estimate.memory import rank_memory
from glm46.operate.estimate.micro_batch_traffic import TOKENS
from glm46.operate.estimate.muon_cost import muon_cost
from glm46.operate.estimate.other_networks import other_passes
from glm46.operate.estimate.plan_sizes import bubble, rows_of_hops, tree_rounds
from glm46.operate.estimate.rank_parts import StagePart, held_rows, parts_of_ranks
from glm46.operate.estimate.roofline import Cost, Roofline
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.traffic import MUON, Traffic, reference_traffic, step_traffic
from glm46.run.plan import Plan

_MESSAGE_SECONDS = 60e-6
"""Time of one TCP message between two processes, including the Python calls on both sides (an estimate)."""
_OVERLAPPED = ("shard", "efsdp", "dp_replicate")
"""Axes whose collectives FSDP2 overlaps with kernels: shards of parameters, shards of experts, and replicas."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step in a text stage, see `Plan.text_stages`."""

    parts: dict[str, float]
    """Seconds by cause on the pipeline rank that computes longest; their sum is the step time."""
    tokens: int
    """Tokens of all ranks."""
    model_flops: float
    """FLOPs of all ranks. Excludes recomputation, passes without gradient, and the critic."""
    mfu: float
    """`model_flops` divided by what all GPUs could compute in this time at their BF16 peak."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def step_time(plan: Plan, stage_index: int, sequences: int, cluster: TargetCluster) -> StepTime:
    """Predict one step of a text stage.

    Args:
        sequences: sequences in the step, all ranks together.
    """
    text_stage = plan.text_stages[stage_index]
    layout = plan.layout
    micro_batches = sequences // plan.rows_per_micro_batch
    step = _Step(plan, stage_index, micro_batches, cluster)
    offloaded = _offloaded_states(plan, stage_index)
    ranks = step.ranks(offloaded)
    slowest = max(ranks, key=lambda rank: rank.seconds)
    parts = slowest.parts(micro_batches)
    if layout.pp > 1:
        # The slowest rank waits while the others fill and empty the pipeline.
        mean_seconds = sum(rank.seconds for rank in ranks) / len(ranks)
        idle = bubble(plan.config.parallelism, micro_batches)
        # `idle` is a share of the complete step, so the work takes the share 1 - idle of it.
        parts["pipeline bubble"] = mean_seconds * micro_batches * idle / (1 - idle)
    forwards, critics = other_passes(plan)
    if critics:
        # A critic is as large as the policy, and its step takes as long.
        parts["critic"] = critics * sum(parts.values())
    if forwards:
        forward = max(sum(cost.seconds for cost in rank.forward.values()) for rank in ranks)
        # Each micro-batch passes all pipeline stages in turn, without a schedule.
        computed = forwards * (micro_batches + layout.pp - 1) * forward
        gathered = max(
            sum(step.roofline.traffic(traffic) for traffic in rank_traffic if traffic.axis in _OVERLAPPED)
            for rank_traffic in reference_traffic(plan, stage_index, micro_batches)
        )
        parts["passes without gradient"] = computed + _exposed(gathered, step.roofline.overlap * gathered, computed)
    tokens = sequences * text_stage.seq_len
    flops = tokens * plan.training_flops(text_stage).total
    seconds = sum(parts.values())
    peak = layout.world_size * cluster.gpu.bf16_flops
    return StepTime(dict(parts), tokens, flops, flops / (seconds * peak))


def _exposed(seconds: float, overlappable_seconds: float, covering_seconds: float) -> float:
    """Return the seconds of collectives that kernels do not hide, when kernels of ``covering_seconds`` can hide at most
    ``overlappable_seconds`` of them."""
    return seconds - min(overlappable_seconds, covering_seconds)


def _offloaded_states(plan: Plan, stage_index: int) -> list[float]:
    """Return the bytes of optimizer states that a step copies from host memory or a file and back, by pipeline rank."""
    offload = plan.config.optimizer.state_offload
    if offload == "none":
        return [0.0] * plan.layout.pp
    if offload == "cpu" and plan.config.training.parameter_offload:
        # Not predicted: `MemoryPlan.host` then holds weights and gradients too, which move at other times.
        return [0.0] * plan.layout.pp
    memory = rank_memory(plan, stage_index)
    # `rank_memory` counts a critic's states too; `step_time` adds a critic as a step of its own.
    networks = 1 + other_passes(plan)[1]
    return [(rank.disk or rank.host) / networks for rank in memory]


@dataclass(frozen=True)
class _Rank:
    """The work of one pipeline rank in a step."""

    forward: dict[int, Cost]
    """Seconds of one micro-batch by cause, for each pipeline stage of the rank, by its index."""
    backward: dict[int, Cost]
    """Like `forward`, including recomputation."""
    once: Cost
    """Seconds by cause once per step, after the last backward."""

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch in all pipeline stages of the rank."""
        return sum(cost.seconds for cost in (*self.forward.values(), *self.backward.values()))

    def parts(self, micro_batches: int) -> Cost:
        """Return the seconds of the step by cause, without waiting for other pipeline ranks."""
        total = Cost(self.once)
        for cost in (*self.forward.values(), *self.backward.values()):
            total.add(cost.times(micro_batches))
        return total


class _Step:
    """A step of a plan in a text stage; each part of the model is computed once for all pipeline ranks."""

    def __init__(self, plan: Plan, stage_index: int, micro_batches: int, cluster: TargetCluster):
        self._plan = plan
        self._micro_batches = micro_batches
        self.roofline = Roofline(cluster, plan)
        self.traffic = step_traffic(plan, stage_index, micro_batches)
        self._memory = ActivationMemory(plan, stage_index, "gpu")
        self._batch = _micro_batch(plan, stage_index)
        if self.roofline.published_exchange:
            # Chunks belong to this product's exchange: the published one sends all tokens of a micro-batch at once.
            self._batch = replace(self._batch, chunks=1)
        self._costs_by_part: dict[tuple[Any, ...], tuple[Cost, Cost]] = {}

    def ranks(self, offloaded: list[float]) -> list[_Rank]:
        """Return the work of each pipeline rank; ``offloaded`` comes from `_offloaded_states`."""
        return [*map(self._rank, parts_of_ranks(self._plan), self.traffic, offloaded)]

    def _stage_costs(self, stage: StagePart) -> tuple[Cost, Cost]:
        """Return the seconds of a stage for one micro-batch: forward, and backward with recomputation."""
        forward = Cost()
        backward = Cost()
        for part, number in Counter(_kernel_parts(stage, self._plan)).items():
            if part not in self._costs_by_part:
                self._costs_by_part[part] = self._part_costs(*part)
            part_forward, part_backward = self._costs_by_part[part]
            forward.add(part_forward.times(number))
            backward.add(part_backward.times(number))
        return forward, backward

    def _part_costs(self, name: PartOfModel, frozen: Frozen | None, has_backward: bool, mode: str) -> tuple[Cost, Cost]:
        """Return the seconds of a part for one micro-batch: forward, and backward with recomputation."""
        roofline = self.roofline
        work = part_work(name, self._batch, mode, frozen)
        forward = roofline.kernels(work.forward)
        backward = roofline.kernels(work.backward)
        recomputed = roofline.kernels(work.recomputed)
        backward.add({"recomputation": recomputed.seconds} if recomputed else {})
        if name in ("moe", "mtp") and self._plan.layout.ep > 1:
            repeats = self._plan.config.activation_checkpoint.sends_again(mode)
            forward_wait, backward_wait = waits_for_tokens(
                self._plan, roofline, self._batch, recomputed.seconds, repeats=repeats
            )
            forward.add({"waiting for ep": forward_wait})
            backward.add({"waiting for ep": backward_wait} if backward_wait else {})
        return forward, backward if has_backward else Cost()

    def _rank(self, stages: list[StagePart], traffic: list[Traffic], offloaded: float) -> _Rank:
        plan = self._plan
        micro_batches = self._micro_batches
        roofline = self.roofline
        forward = {}
        backward = {}
        for stage in stages:
            forward[stage.index], backward[stage.index] = self._stage_costs(stage)
            layer_bytes = [sum(tensor_bytes) for tensor_bytes in self._memory.offloaded(stage)]
            # Without a pipeline, backward starts while the last two layers are still on the device (`HostCopies`).
            returned_bytes = layer_bytes[:-2] if plan.layout.pp == 1 else layer_bytes
            for pass_costs, copied_bytes in ((forward, layer_bytes), (backward, returned_bytes)):
                beyond = sum(copied_bytes) / roofline.host_bytes_per_second - pass_costs[stage.index].seconds
                pass_costs[stage.index].add({"waiting for the host": beyond} if beyond > 0 else {})
        once = self._update(stages, traffic, offloaded)
        overlapped = Cost()
        # Each collective of forward has a counterpart in backward, and the recomputed layers repeat it there.
        modes = [run.mode for stage in stages for run in stage.runs(plan.config.activation_checkpoint)]
        not_recomputed_share = modes.count("none") / len(modes)
        pass_shares = (1, 2 - not_recomputed_share)
        for collective in traffic:
            if collective.what == MUON or collective.what in TOKENS:
                continue  # they are in `_update` and in `_part_costs`
            seconds = roofline.traffic(collective)
            if collective.axis in _OVERLAPPED:
                overlapped[collective.kind] += seconds
                if collective.kind != "all_reduce":
                    once["copies of weights and gradients"] += roofline.copies(collective)
            elif collective.axis == "world":
                once["waiting for world"] += seconds
            elif collective.axis != "pp":  # other micro-batches hide sends between pipeline stages
                for pass_costs, pass_share in zip((forward, backward), pass_shares, strict=True):
                    for cost in pass_costs.values():
                        part = seconds * pass_share / sum(pass_shares) / len(stages) / micro_batches
                        cost[f"waiting for {collective.axis}"] += part
        rank = _Rank(forward, backward, once)
        overlappable_seconds = overlapped.seconds
        covering_seconds = rank.seconds * micro_batches
        # A pipeline gathers weights during its first forward, and reduces gradients after its last backward.
        if plan.layout.pp > 1:
            overlappable_seconds = overlapped["all_gather"]
            covering_seconds = sum(cost.seconds for cost in forward.values())
        once["waiting for weights and gradients"] = _exposed(
            overlapped.seconds, roofline.overlap * overlappable_seconds, covering_seconds
        )
        return rank

    def _update(self, stages: list[StagePart], traffic: list[Traffic], offloaded: float) -> Cost:
        """Return the seconds of the optimizer."""
        plan = self._plan
        elements = Counter[str]()  # that the rank updates, by optimizer
        for held_row in held_rows(stages, plan.shape, plan.layout):
            if held_row.row.is_trained:
                elements[held_row.row.choose_optimizer(plan.config.optimizer)] += held_row.elements
        flops = muon_cost(stages, plan.shape, plan.layout, plan.config).flops
        exchanges = [collective for collective in traffic if collective.what == MUON]
        cost = self.roofline.update(elements, flops, exchanges, offloaded)
        # The hosts agree on the next step while the update runs.
        agreement_beyond_update = tree_rounds(plan.layout.world_size) * _MESSAGE_SECONDS - cost.seconds
        cost.update({"waiting for the agreement": agreement_beyond_update} if agreement_beyond_update > 0 else {})
        return cost


def _kernel_parts(stage: StagePart, plan: Plan) -> Iterator[tuple[PartOfModel, Frozen | None, bool, str]]:
    """Yield the arguments of `part_work` for each part of a stage: name, frozen layer, whether it has a backward,
    checkpointing mode. The head occurs once for each prediction depth and once for the main model."""
    frozen = None if stage.frozen is None else Frozen()
    if stage.has_embedding:
        yield "embedding", frozen, True, "none"
    for block, adapters, has_backward, mode, _ in stage.runs(plan.config.activation_checkpoint):
        yield block, adapters, has_backward, mode
    if stage.has_head:
        for _ in range(1 + plan.mtp_depths):
            yield "head", frozen, True, "none"


def _micro_batch(plan: Plan, stage_index: int) -> MicroBatch:
    config = plan.config
    text_stage = plan.text_stages[stage_index]
    layout = plan.layout
    tokens = config.training.local_batch_size * text_stage.seq_len / (layout.cp * layout.tp)
    return MicroBatch(
        shape=text_stage.shape,
        layout=layout,
        tokens=tokens,
        seq_len=text_stage.seq_len,
        document_tokens=plan.document_tokens,
        param_dtype=config.training.mixed_precision_param,
        is_compiled=config.compile.enable,
        linear_fp8=config.float8.recipe_name is not None and not config.float8.emulate,
        experts_fp8=config.float8.experts_recipe_name is not None and not config.float8.emulate,
        hops=rows_of_hops(plan, text_stage.shape),
        chunks=plan.exchange_chunks,
        recompute=config.activation_checkpoint.recompute,
    )
