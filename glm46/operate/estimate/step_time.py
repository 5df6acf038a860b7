"""Time of an optimizer step, predicted: kernels by a roofline, collectives by their links, a pipeline by the order of
its schedule.

What is assumed: sequences are full, experts get equal loads but for `Efficiencies.imbalance`, and nothing else uses the
machines. FSDP2's gathers and reductions run beside the products of their stage and cost what is longer; exchanges of
tokens run beside shared and routed experts as `exchange_time` says; all other collectives cost their whole time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from glm46.config.parallelism import ParallelismConfig
from glm46.operate.estimate.activations import Frozen
from glm46.operate.estimate.exchange_time import (
    BESIDE_OTHERS,
    CONTENTION,
    backward_steps,
    exposed_seconds,
    forward_steps,
)
from glm46.operate.estimate.kernels import MicroBatch, PartOfModel, Work, part_work, work_beside_exchange
from glm46.operate.estimate.memory import offloaded_activations, rank_memory
from glm46.operate.estimate.micro_batch_traffic import TOKENS, exchanges
from glm46.operate.estimate.muon_cost import muon_cost
from glm46.operate.estimate.other_networks import frozen_plan, other_networks, other_passes
from glm46.operate.estimate.rank_parts import StagePart, held_rows, parts_of_ranks
from glm46.operate.estimate.target_cluster import TargetCluster, groups
from glm46.operate.estimate.timeline import Order, Timeline, bubble, simulate
from glm46.operate.estimate.traffic import MUON, Traffic, reference_traffic, step_traffic
from glm46.run.flops import training_flops_per_token
from glm46.run.plan import Plan
from glm46.run.tree import rounds

OrderOf = Callable[[ParallelismConfig, int], Order]
"""The order of the actions of a pipeline for a number of micro-batches: `pipeline_order`."""
_FP32_SHARE = 1 / 15
"""Of the BF16 peak, by FP32 products without tensor cores: 67 of 989 TFLOP/s on an H100, 19.5 of 312 on an A100."""
_TENSOR_CORES = 7.0
"""Least compute capability with them. A GPU described without a capability has its peak in the type that is used."""
_UPDATE_BYTES = {"muon": 28, "adamw": 40}
"""Read and written per element by norm, clipping and update in FP32: gradient three times, states and weight twice."""
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


class _Cost(dict[str, float]):
    """Seconds by cause; 0 of a cause that is not there."""

    def __missing__(self, cause: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float]) -> None:
        for cause, seconds in other.items():
            self[cause] += seconds

    @property
    def seconds(self) -> float:
        return sum(self.values())

    def times(self, factor: float) -> "_Cost":
        return _Cost({cause: factor * seconds for cause, seconds in self.items()})


class Roofline:
    """Times of kernels and collectives on one cluster, for one compute type and mesh."""

    def __init__(self, cluster: TargetCluster, plan: Plan):
        gpu, share = cluster.gpu, cluster.efficiencies
        is_slow = plan.config.training.mixed_precision_param == "float32" and gpu.compute_capability >= _TENSOR_CORES
        self._share, self._launch, self._call = share, share.launch_seconds, share.call_seconds
        self._bf16 = gpu.bf16_flops * (_FP32_SHARE if is_slow else 1)
        self._fp8, self._memory = gpu.fp8_flops, gpu.memory_bandwidth * share.memory
        self._links = {axis: cluster.link(*group) for axis, group in groups(plan).items()}
        self.overlap = share.overlap
        self.host_bytes_per_second = share.host_bytes_per_second
        self.published_exchange = cluster.exchange == "deepep" and plan.expert_levels is not None
        """Tokens travel as `TargetCluster.exchange` says, not as the run sends them."""
        # Published benchmarks force equal loads.
        self._imbalance = share.imbalance if plan.layout.ep > 1 and not self.published_exchange else 1.0
        self._states = "host", share.host_bytes_per_second
        if plan.config.optimizer.state_offload == "nvme":  # a ring in host memory: both links at once
            self._states = "disk", min(share.host_bytes_per_second, share.disk_bytes_per_second)

    def kernels(self, work: Iterable[Work]) -> _Cost:
        """Seconds of kernels one after the other, by kind; at least what the host takes to launch them."""
        cost, launched = _Cost(), 0.0
        for each in work:
            cost[each.kind] += self.kernel(each)
            launched += each.kernels * self._launch
        waited = launched - cost.seconds
        return cost if waited <= 0 else _Cost({**cost, "launches": waited})

    def kernel(self, work: Work) -> float:
        """Seconds of one kernel."""
        moved = work.nbytes / self._memory
        if work.kind == "memory":
            return moved
        is_own = work.kind == "experts" and not self.published_exchange  # others have faster grouped products in FP8
        in_fp8 = self._share.fp8_experts if is_own else self._share.fp8
        peak = self._fp8 * in_fp8 if work.in_fp8 and self._fp8 > self._bf16 else self._bf16
        share = getattr(self._share, work.kind)
        if work.rows:
            share *= work.rows / (work.rows + getattr(self._share, f"{work.kind}_rows"))
        computed = max(work.flops / (peak * share), moved)
        return computed * (self._imbalance if work.kind == "experts" else 1.0)

    def update(self, elements: dict[str, float], products: float, exchanges: list[Traffic], offloaded: float) -> _Cost:
        """Seconds of the optimizer: elements by optimizer, FLOPs of Newton-Schulz iterations in BF16, and bytes of
        states in host memory or in a file, which are copied in and out at once, beside the update.

        Muon's products hide its exchanges, but for the first one of matrices and the last one of updates
        (`compute/optim/muon_step.py`): with few buckets that is most of them.
        """
        moved = sum(_UPDATE_BYTES[name] * count for name, count in elements.items()) / self._memory
        computed, sent = products / (self._bf16 * self._share.products), sum(map(self.traffic, exchanges))
        calls = sum(each.calls for each in exchanges)
        waited = max(sent - computed, 2 * sent / calls) if calls else 0.0
        place, rate = self._states
        cost, copied = _Cost({"optimizer": moved + computed}), offloaded / rate
        cost.add({"waiting for Muon's matrices": waited} if waited else {})
        cost.add({f"waiting for the {place}": copied - cost.seconds} if copied > cost.seconds else {})
        return cost

    def copies(self, traffic: Traffic) -> float:
        """Seconds of FSDP2's kernels that copy gathered weights apart, or gradients together."""
        return 2 * traffic.nbytes / self._memory

    def traffic(self, traffic: Traffic) -> float:
        """Seconds of the collectives of one kind."""
        link, others = self._links[traffic.axis], traffic.ranks - 1
        calls = traffic.calls * self._call
        if traffic.kind == "send" or traffic.what == MUON:
            return calls + traffic.nbytes / link.exchange_bytes_per_second
        sent = traffic.nbytes * others / traffic.ranks
        if traffic.kind == "all_to_all":
            return calls + sent / link.exchange_bytes_per_second * self._imbalance
        return calls + sent * (2 if traffic.kind == "all_reduce" else 1) / link.bytes_per_second


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
    stage, layout = plan.text_stages[stage_index], plan.layout
    micro_batches = sequences // plan.rows_per_micro_batch
    roofline = Roofline(cluster, plan)
    traffic = step_traffic(plan, stage_index, micro_batches)
    offload, offloaded = plan.config.optimizer.state_offload, [0.0] * layout.pp
    if offload == "nvme" or (offload == "cpu" and not plan.config.training.parameter_offload):
        memory, networks = rank_memory(plan, stage_index), 1 + other_passes(plan)[1]
        # Without an offloaded reference, which no update reads, and without a critic, which is added below.
        hosts = [m.host - other_networks(plan, m.weights, 0.0)[1] for m in memory]
        offloaded = [(m.disk or host) / networks for m, host in zip(memory, hosts, strict=True)]
    costs = _Costs(plan, stage_index, roofline)

    def ranks_of(plan: Plan, costs: _Costs, traffic: list[list[Traffic]]) -> list[_Rank]:
        of_ranks = zip(parts_of_ranks(plan), traffic, offloaded, strict=True)
        return [_rank(plan, costs, *of_rank, micro_batches) for of_rank in of_ranks]

    ranks = ranks_of(plan, costs, traffic)
    slowest = max(ranks, key=lambda rank: rank.seconds)
    parts, timeline = slowest.parts(micro_batches), None
    if layout.pp > 1 and order_of is not None:
        sends = [each for of_rank in traffic for each in of_rank if each.axis == "pp" and each.kind == "send"]
        sending = max(roofline.traffic(each) / each.calls for each in sends)
        timeline = _timeline(ranks, sending, order_of(plan.config.parallelism, micro_batches))
        parts["pipeline bubble"] = timeline.seconds - slowest.seconds * micro_batches
    elif layout.pp > 1:
        idle = bubble(plan.config.parallelism, micro_batches)
        parts["pipeline bubble"] = slowest.seconds * micro_batches * idle / (1 - idle)
    forwards, critics = other_passes(plan)
    if critics:
        parts["critic"] = critics * sum(parts.values())
    if forwards:  # from stage to stage without an order of its own
        of = frozen_plan(plan) or plan
        if of is not plan:
            traffic = step_traffic(of, stage_index, micro_batches)
            ranks = ranks_of(of, _Costs(of, stage_index, Roofline(cluster, of)), traffic)
        forward = max(sum(cost.seconds for cost in rank.forward.values()) for rank in ranks)
        computed = forwards * (micro_batches + layout.pp - 1) * forward
        gathered = max(
            sum(roofline.traffic(each) for each in of_rank if each.axis in _OVERLAPPED)
            for of_rank in reference_traffic(plan, stage_index, micro_batches)
        )
        parts["passes without gradient"] = computed + gathered - min(roofline.overlap * gathered, computed)
    tokens = sequences * stage.seq_len
    flops = tokens * training_flops_per_token(stage.shape, stage.seq_len, plan.document_tokens, plan.config.adapter)
    seconds = sum(parts.values())
    peak = layout.world_size * cluster.gpu.bf16_flops
    return StepTime(dict(parts), tokens, flops, flops / (seconds * peak), timeline)


@dataclass(frozen=True)
class _Rank:
    """The work of one pipeline rank in a step."""

    forward: dict[int, _Cost]
    """Seconds of one micro-batch, by stage."""
    backward: dict[int, _Cost]
    """With the recomputation."""
    once: _Cost
    """Seconds once per step, after the last backward."""

    @property
    def seconds(self) -> float:
        """Of one micro-batch in all stages of the rank."""
        return sum(cost.seconds for cost in (*self.forward.values(), *self.backward.values()))

    def parts(self, micro_batches: int) -> _Cost:
        """Seconds of the step by cause, without waiting for other ranks of the pipeline."""
        total = _Cost(self.once)
        for cost in (*self.forward.values(), *self.backward.values()):
            total.add(cost.times(micro_batches))
        return total


class _Costs:
    """The costs of the parts of the model in a stage of text, each computed once for all pipeline ranks."""

    def __init__(self, plan: Plan, stage_index: int, roofline: Roofline):
        self._plan, self.stage_index, self.roofline = plan, stage_index, roofline
        self._batch = _micro_batch(plan, stage_index)
        if roofline.published_exchange:
            self._batch = replace(self._batch, chunks=1)
        self._known: dict[tuple, tuple[_Cost, _Cost]] = {}

    def of_stage(self, stage: StagePart) -> tuple[_Cost, _Cost]:
        """Seconds of a stage for one micro-batch, forward and backward."""
        total = _Cost(), _Cost()
        for part, number in Counter(_kernel_parts(stage, self._plan)).items():
            if part not in self._known:
                self._known[part] = self._of_part(*part)
            for sum_of_pass, cost in zip(total, self._known[part], strict=True):
                sum_of_pass.add(cost.times(number))
        return total

    def _of_part(self, name: PartOfModel, frozen: Frozen | None, has_backward: bool, mode: str) -> tuple[_Cost, _Cost]:
        """Seconds of a part for one micro-batch, forward, and backward with the recomputation."""
        checkpointing, roofline = self._plan.config.activation_checkpoint, self.roofline
        work = part_work(name, self._batch, mode, frozen, checkpointing.recompute)
        forward, backward, again = map(roofline.kernels, (work.forward, work.backward, work.recomputed))
        backward.add({"recomputation": again.seconds} if again else {})
        if name in ("moe", "mtp") and self._plan.layout.ep > 1:
            repeats = checkpointing.sends_again(mode)
            waits = _waits_for_tokens(self._plan, roofline, self._batch, again.seconds, repeats=repeats)
            forward.add({"waiting for ep": waits[0]})
            backward.add({"waiting for ep": waits[1]} if waits[1] else {})
        return forward, backward if has_backward else _Cost()


def _rank(
    plan: Plan, costs: _Costs, stages: list[StagePart], traffic: list[Traffic], offloaded: float, micro_batches: int
) -> _Rank:
    """``offloaded``: bytes of optimizer states that a step copies from host memory or a file, and back."""
    forward, backward, checkpointing = {}, {}, plan.config.activation_checkpoint
    roofline = costs.roofline
    for stage in stages:
        forward[stage.index], backward[stage.index] = costs.of_stage(stage)
        layers = offloaded_activations(plan, costs.stage_index, stage)
        # Without a pipeline backward finds the two last layers on the device.
        for of_pass, copied in ((forward, layers), (backward, layers[:-2] if plan.layout.pp == 1 else layers)):
            beyond = sum(copied) / roofline.host_bytes_per_second - of_pass[stage.index].seconds
            of_pass[stage.index].add({"waiting for the host": beyond} if beyond > 0 else {})
    elements = dict.fromkeys(_UPDATE_BYTES, 0.0)  # that the rank updates, by optimizer
    for each in held_rows(stages, plan.shape, plan.layout):
        if each.row.is_trained:
            elements[each.row.choose_optimizer(plan.config.optimizer)] += each.elements
    muon = muon_cost(stages, plan.shape, plan.layout, plan.config.optimizer)
    once = roofline.update(elements, muon.flops, [each for each in traffic if each.what == MUON], offloaded)
    # The hosts agree on the next step while the update runs.
    agreeing = rounds(plan.layout.world_size) * _MESSAGE_SECONDS - once.seconds
    once.update({"waiting for the agreement": agreeing} if agreeing > 0 else {})
    beside = _Cost()
    # A collective of forward runs again with the recomputation, and backward has its counterpart.
    of_layers = [checkpointing.mode_of(i) for stage in stages for i in range(len(stage.blocks))]
    shares = (1, 2 - of_layers.count("none") / len(of_layers))
    for of_kind in (each for each in traffic if each.what not in (MUON, *TOKENS)):
        seconds = roofline.traffic(of_kind)
        if of_kind.axis in _OVERLAPPED:
            beside[of_kind.kind] += seconds
            if of_kind.kind != "all_reduce":
                once["copies of weights and gradients"] += roofline.copies(of_kind)
        elif of_kind.axis == "world":
            once[f"waiting for {of_kind.axis}"] += seconds
        elif of_kind.axis != "pp":
            for of_pass, share in zip((forward, backward), shares, strict=True):
                for cost in of_pass.values():
                    cost[f"waiting for {of_kind.axis}"] += seconds * share / sum(shares) / len(stages) / micro_batches
    rank, hidden = _Rank(forward, backward, once), beside.seconds
    hiding = rank.seconds * micro_batches
    if plan.layout.pp > 1:  # gathers weights beside its first forward, and reduces gradients after its last backward
        hidden, hiding = beside["all_gather"], sum(cost.seconds for cost in forward.values())
    once["waiting for weights and gradients"] = beside.seconds - min(roofline.overlap * hidden, hiding)
    return rank


def _waits_for_tokens(
    plan: Plan, roofline: Roofline, batch: MicroBatch, again: float, *, repeats: bool = False
) -> tuple[float, float]:
    """Seconds in which one layer waits for tokens in forward, and in backward with its recomputation of ``again``
    seconds, which sends rows again if it ``repeats`` the exchange."""
    parallelism, published = plan.config.parallelism, roofline.published_exchange
    found = exchanges(plan, batch.shape, batch.tokens / batch.chunks)
    is_one_kernel = published or parallelism.expert_exchange == "deepep"
    ranks = {axis: size for axis, (_, size) in groups(plan).items()}

    def sends(first: int) -> dict[tuple[int, bool], float]:
        """Seconds of sends by hop; those there are of `TOKENS` from ``first`` on, those back of rows."""
        seconds: dict[tuple[int, bool], float] = {}
        for hop, (axis, *sizes) in enumerate(found):
            calls = [roofline.traffic(Traffic(axis, "all_to_all", ranks[axis], 1, size, "")) for size in sizes]
            seconds |= {(hop, False): sum(calls[first:-1]), (hop, True): calls[-1]}
        if is_one_kernel:  # which forwards rows while others arrive
            return {(0, is_back): max(seconds[hop, is_back] for hop in range(len(found))) for is_back in (False, True)}
        return seconds

    def computed(backward: bool) -> dict[str, float]:
        work = work_beside_exchange(batch, backward).items()
        seconds = {name: sum(map(roofline.kernel, each)) / batch.chunks for name, each in work}
        return seconds | {"shared": seconds["shared"] * batch.chunks, "recomputation": again}

    slowed, forward = 1 - min(roofline.overlap, 1 - CONTENTION), sends(0 if plan.expert_levels else 1)
    order, of_forward = (batch.chunks, 1 if is_one_kernel else len(found)), computed(False)
    waits = exposed_seconds(forward_steps(*order), of_forward, forward, slowed)
    backward = exposed_seconds(backward_steps(*order), computed(True), sends(1), slowed)
    if repeats:
        backward += exposed_seconds(forward_steps(*order, returns=False), of_forward, forward, slowed)
    elif published and plan.layout.pp > 1:
        left = 1 - BESIDE_OTHERS.get(parallelism.pipeline_parallel_schedule, 0.0) * (1 - slowed)
        return left * waits, left * backward
    return waits, backward


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
        shape=stage.shape,
        layout=layout,
        tokens=tokens,
        seq_len=stage.seq_len,
        document_tokens=plan.document_tokens,
        param_dtype=config.training.mixed_precision_param,
        is_compiled=config.compile.enable,
        linear_fp8=config.float8.recipe_name is not None and not config.float8.emulate,
        experts_fp8=config.float8.experts_recipe_name is not None and not config.float8.emulate,
        hops=plan.hops(stage.shape),
        chunks=plan.exchange_chunks,
    )


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
