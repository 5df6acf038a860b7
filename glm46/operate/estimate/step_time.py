"""Time of an optimizer step, predicted: kernels by a roofline, collectives by their links, a pipeline by the order of
its schedule.

What is assumed: sequences are full, experts get equal loads but for `Efficiencies.imbalance`, and nothing else uses the
machines. FSDP2's gathers and reductions run beside the products of their stage and cost what is longer; exchanges of
tokens run beside shared and routed experts as `exchange_time` says; all other collectives cost their whole time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from glm46.config.parallelism import ParallelismConfig
from glm46.operate.estimate.activation_memory import ActivationMemory
from glm46.operate.estimate.activations import Frozen
from glm46.operate.estimate.exchange_time import waits_for_tokens
from glm46.operate.estimate.kernels import MicroBatch, PartOfModel, part_work
from glm46.operate.estimate.memory import rank_memory
from glm46.operate.estimate.micro_batch_traffic import TOKENS
from glm46.operate.estimate.muon_cost import muon_cost
from glm46.operate.estimate.other_networks import frozen_plan, other_networks, other_passes
from glm46.operate.estimate.plan_sizes import rows_of_hops, tree_rounds
from glm46.operate.estimate.rank_parts import StagePart, held_rows, parts_of_ranks
from glm46.operate.estimate.roofline import Cost, Roofline
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.timeline import Order, Timeline, bubble, simulate
from glm46.operate.estimate.traffic import MUON, Traffic, reference_traffic, step_traffic
from glm46.run.flops import training_flops
from glm46.run.plan import Plan

OrderOf = Callable[[ParallelismConfig, int], Order]
"""The order of the actions of a pipeline for a number of micro-batches: `pipeline_order`."""
_MESSAGE_SECONDS = 60e-6
"""From one process to another over TCP, with the calls in Python on both sides: an estimate."""


@dataclass(frozen=True)
class StepTime:
    """One step of a stage of text."""

    parts: dict[str, float]
    """Seconds by cause on the pipeline rank that computes longest; they add up to the step."""
    tokens: int
    """Of all ranks."""
    model_flops: float
    """Of all ranks; recomputation, passes without gradient and a critic are not counted."""
    mfu: float
    """`model_flops` over what the BF16 peaks of all GPUs could do in this time."""
    timeline: Timeline | None
    """Of forward and backward; None without a pipeline, or without its order."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


_OVERLAPPED = ("shard", "efsdp", "dp_replicate")
"""Axes whose collectives FSDP2 runs beside the kernels."""


def step_time(
    plan: Plan, stage_index: int, sequences: int, cluster: TargetCluster, order_of: OrderOf | None
) -> StepTime:
    """Predict one step of a stage of text.

    Args:
        sequences: of the step, over all ranks.
        order_of: called only with a pipeline. None: its bubble is that of equal stages without transfers, which takes
            a hundredth of the time.
    """
    stage, layout, parallelism = plan.text_stages[stage_index], plan.layout, plan.config.parallelism
    micro_batches = sequences // plan.rows_per_micro_batch
    step = _Step(plan, stage_index, micro_batches, cluster)
    offloaded = _offloaded_states(plan, stage_index)
    ranks = step.ranks(offloaded)
    slowest = max(ranks, key=lambda rank: rank.seconds)
    parts, timeline = slowest.parts(micro_batches), None
    if layout.pp > 1 and order_of is not None:
        sends = [each for of_rank in step.traffic for each in of_rank if each.axis == "pp" and each.kind == "send"]
        sending = max(step.roofline.traffic(each) / each.calls for each in sends)
        timeline = _timeline(ranks, sending, order_of(parallelism, micro_batches))
        parts["pipeline bubble"] = timeline.seconds - slowest.seconds * micro_batches
    elif layout.pp > 1:
        idle = bubble(parallelism, micro_batches)
        parts["pipeline bubble"] = slowest.seconds * micro_batches * idle / (1 - idle)
    forwards, critics = other_passes(plan)
    if critics:
        parts["critic"] = critics * sum(parts.values())
    if forwards:  # from stage to stage without an order of its own
        of = frozen_plan(plan) or plan
        if of is not plan:
            ranks = _Step(of, stage_index, micro_batches, cluster).ranks(offloaded)
        forward = max(sum(cost.seconds for cost in rank.forward.values()) for rank in ranks)
        computed = forwards * (micro_batches + layout.pp - 1) * forward
        gathered = max(
            sum(step.roofline.traffic(each) for each in of_rank if each.axis in _OVERLAPPED)
            for of_rank in reference_traffic(plan, stage_index, micro_batches)
        )
        parts["passes without gradient"] = computed + gathered - min(step.roofline.overlap * gathered, computed)
    tokens = sequences * stage.seq_len
    flops = tokens * training_flops(stage.shape, stage.seq_len, plan.document_tokens, plan.config.adapter).total
    seconds = sum(parts.values())
    peak = layout.world_size * cluster.gpu.bf16_flops
    return StepTime(dict(parts), tokens, flops, flops / (seconds * peak), timeline)


def _offloaded_states(plan: Plan, stage_index: int) -> list[float]:
    """Bytes of optimizer states that a step copies from host memory or a file, and back; of each pipeline rank."""
    offload = plan.config.optimizer.state_offload
    if offload == "none" or (offload == "cpu" and plan.config.training.parameter_offload):
        return [0.0] * plan.layout.pp
    memory, networks = rank_memory(plan, stage_index), 1 + other_passes(plan)[1]
    # Without an offloaded reference, which no update reads, and without a critic, which is added later.
    hosts = [m.host - other_networks(plan, m.weights, 0.0)[1] for m in memory]
    return [(m.disk or host) / networks for m, host in zip(memory, hosts, strict=True)]


@dataclass(frozen=True)
class _Rank:
    """The work of one pipeline rank in a step."""

    forward: dict[int, Cost]
    """Seconds of one micro-batch, by stage."""
    backward: dict[int, Cost]
    """With the recomputation."""
    once: Cost
    """Seconds once per step, after the last backward."""

    @property
    def seconds(self) -> float:
        """Of one micro-batch in all stages of the rank."""
        return sum(cost.seconds for cost in (*self.forward.values(), *self.backward.values()))

    def parts(self, micro_batches: int) -> Cost:
        """Seconds of the step by cause, without waiting for other ranks of the pipeline."""
        total = Cost(self.once)
        for cost in (*self.forward.values(), *self.backward.values()):
            total.add(cost.times(micro_batches))
        return total


class _Step:
    """A step of a plan in a stage of text; each part of the model is computed once for all pipeline ranks."""

    def __init__(self, plan: Plan, stage_index: int, micro_batches: int, cluster: TargetCluster):
        self._plan, self._micro_batches, self.roofline = plan, micro_batches, Roofline(cluster, plan)
        self.traffic = step_traffic(plan, stage_index, micro_batches)
        self._memory, self._batch = ActivationMemory(plan, stage_index, "gpu"), _micro_batch(plan, stage_index)
        if self.roofline.published_exchange:
            self._batch = replace(self._batch, chunks=1)
        self._known: dict[tuple, tuple[Cost, Cost]] = {}

    def ranks(self, offloaded: list[float]) -> list[_Rank]:
        """The work of each pipeline rank; ``offloaded`` as `_offloaded_states`."""
        return [*map(self._rank, parts_of_ranks(self._plan), self.traffic, offloaded)]

    def _of_stage(self, stage: StagePart) -> tuple[Cost, Cost]:
        """Seconds of a stage for one micro-batch, forward and backward."""
        total = Cost(), Cost()
        for part, number in Counter(_kernel_parts(stage, self._plan)).items():
            if part not in self._known:
                self._known[part] = self._of_part(*part)
            for sum_of_pass, cost in zip(total, self._known[part], strict=True):
                sum_of_pass.add(cost.times(number))
        return total

    def _of_part(self, name: PartOfModel, frozen: Frozen | None, has_backward: bool, mode: str) -> tuple[Cost, Cost]:
        """Seconds of a part for one micro-batch, forward, and backward with the recomputation."""
        roofline = self.roofline
        work = part_work(name, self._batch, mode, frozen)
        forward, backward, again = map(roofline.kernels, (work.forward, work.backward, work.recomputed))
        backward.add({"recomputation": again.seconds} if again else {})
        if name in ("moe", "mtp") and self._plan.layout.ep > 1:
            repeats = self._plan.config.activation_checkpoint.sends_again(mode)
            waits = waits_for_tokens(self._plan, roofline, self._batch, again.seconds, repeats=repeats)
            forward.add({"waiting for ep": waits[0]})
            backward.add({"waiting for ep": waits[1]} if waits[1] else {})
        return forward, backward if has_backward else Cost()

    def _rank(self, stages: list[StagePart], traffic: list[Traffic], offloaded: float) -> _Rank:
        plan, micro_batches, roofline, forward, backward = self._plan, self._micro_batches, self.roofline, {}, {}
        for stage in stages:
            forward[stage.index], backward[stage.index] = self._of_stage(stage)
            layers = [*map(sum, self._memory.offloaded(stage))]
            # Without a pipeline backward finds the two last layers on the device.
            for of_pass, copied in ((forward, layers), (backward, layers[:-2] if plan.layout.pp == 1 else layers)):
                beyond = sum(copied) / roofline.host_bytes_per_second - of_pass[stage.index].seconds
                of_pass[stage.index].add({"waiting for the host": beyond} if beyond > 0 else {})
        once, beside = self._update(stages, traffic, offloaded), Cost()
        # A collective of forward runs again with the recomputation, and backward has its counterpart.
        modes = [run.mode for stage in stages for run in stage.runs(plan.config.activation_checkpoint)]
        shares = (1, 2 - modes.count("none") / len(modes))
        for of_kind in (each for each in traffic if each.what not in (MUON, *TOKENS)):
            seconds = roofline.traffic(of_kind)
            if of_kind.axis in _OVERLAPPED:
                beside[of_kind.kind] += seconds
                if of_kind.kind != "all_reduce":
                    once["copies of weights and gradients"] += roofline.copies(of_kind)
            elif of_kind.axis == "world":
                once["waiting for world"] += seconds
            elif of_kind.axis != "pp":
                for of_pass, share in zip((forward, backward), shares, strict=True):
                    for cost in of_pass.values():
                        part = seconds * share / sum(shares) / len(stages) / micro_batches
                        cost[f"waiting for {of_kind.axis}"] += part
        rank, hidden = _Rank(forward, backward, once), beside.seconds
        hiding = rank.seconds * micro_batches
        if (
            plan.layout.pp > 1
        ):  # gathers weights beside its first forward, and reduces gradients after its last backward
            hidden, hiding = beside["all_gather"], sum(cost.seconds for cost in forward.values())
        once["waiting for weights and gradients"] = beside.seconds - min(roofline.overlap * hidden, hiding)
        return rank

    def _update(self, stages: list[StagePart], traffic: list[Traffic], offloaded: float) -> Cost:
        """Seconds of the optimizer."""
        plan, elements = self._plan, Counter[str]()  # that the rank updates, by optimizer
        for each in held_rows(stages, plan.shape, plan.layout):
            if each.row.is_trained:
                elements[each.row.choose_optimizer(plan.config.optimizer)] += each.elements
        flops = muon_cost(stages, plan.shape, plan.layout, plan.config.optimizer).flops
        cost = self.roofline.update(elements, flops, [each for each in traffic if each.what == MUON], offloaded)
        # The hosts agree on the next step while the update runs.
        agreeing = tree_rounds(plan.layout.world_size) * _MESSAGE_SECONDS - cost.seconds
        cost.update({"waiting for the agreement": agreeing} if agreeing > 0 else {})
        return cost


def _kernel_parts(stage: StagePart, plan: Plan) -> Iterator[tuple[PartOfModel, Frozen | None, bool, str]]:
    """The parts of a stage as `part_work` takes them, whether they have a backward, and how they are checkpointed; a
    head for each depth, and for the cross-entropy of a student where it has logits of its own."""
    frozen, of = None if stage.frozen is None else Frozen(), plan.config.distillation
    heads = 1 + plan.shape.num_nextn_predict_layers + (of is not None and of.runs_head_twice)
    if stage.has_embedding:
        yield "embedding", frozen, True, "none"
    for block, adapters, has_backward, mode, _ in stage.runs(plan.config.activation_checkpoint):
        yield block, adapters, has_backward, mode
    for _ in range(heads * stage.has_head):
        yield "head", frozen, True, "none"


def _micro_batch(plan: Plan, stage_index: int) -> MicroBatch:
    config, stage, layout = plan.config, plan.text_stages[stage_index], plan.layout
    tokens = config.training.local_batch_size * stage.seq_len / (layout.cp * layout.tp)
    return MicroBatch(
        shape=stage.shape, layout=layout, tokens=tokens, seq_len=stage.seq_len, document_tokens=plan.document_tokens,
        param_dtype=config.training.mixed_precision_param, is_compiled=config.compile.enable,
        linear_fp8=config.float8.recipe_name is not None and not config.float8.emulate,
        experts_fp8=config.float8.experts_recipe_name is not None and not config.float8.emulate,
        hops=rows_of_hops(plan, stage.shape), chunks=plan.exchange_chunks,
        recompute=config.activation_checkpoint.recompute,
    )  # fmt: skip


def _timeline(ranks: list[_Rank], sending: float, order: Order) -> Timeline:
    """Forward and backward of all micro-batches. A backward that is split spends equal times on inputs and weights;
    with recomputation it runs whole in its first half (`compute/parallelize/pipeline.py`).

    Args:
        sending: seconds from one stage to the next.
    """
    stages = {stage: cost for rank in ranks for stage, cost in rank.backward.items()}
    seconds = {("forward", stage): cost.seconds for rank in ranks for stage, cost in rank.forward.items()}
    for stage, cost in stages.items():
        weights = 0.0 if cost["recomputation"] else cost.seconds / 2
        seconds |= {("backward", stage): cost.seconds, ("weight gradient", stage): weights}
        seconds["input gradient", stage] = cost.seconds - weights
    return simulate(order, lambda kind, stage: seconds[kind, stage], lambda _: sending)
