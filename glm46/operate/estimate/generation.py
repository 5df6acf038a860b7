"""Predicts the time of rollouts: how long engines take to generate completions for reinforcement learning, next to the
trainer.

A decoding step takes the longer of its memory reads and its products, plus the collectives of its layers. Assumptions:
experts get equal loads, prompts cost nothing compared with completions, a server replays its kernels without launching
each from the host, and no token is drafted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import ceil, prod
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.operate.estimate.kernels import KERNELS, form
from glm46.operate.estimate.other_networks import cached_elements, inference_bytes
from glm46.operate.estimate.plan_sizes import hugging_face_bytes
from glm46.operate.estimate.rank_parts import local_shape
from glm46.operate.estimate.requirement import usable_bytes
from glm46.operate.estimate.run_cost import SECONDS_PER_DAY, RunCost
from glm46.operate.estimate.server_split import leaves_room, split_model
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.units import amount, duration, plan_line, run_time
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import Layout, generation_layout
from glm46.run.parameters import count_parameters, layer_counts, named_rows
from glm46.run.plan import Plan

_MAX_RANKS = 1024
_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are spread evenly for any number of them."""


class _RankWeights(NamedTuple):
    """Elements that a rank multiplies with in a decoding step."""

    experts: float
    others: float


@dataclass(frozen=True)
class DecodingEngine:
    """GPUs that hold one copy of the model and generate together."""

    plan: Plan
    cluster: TargetCluster
    layout: Layout
    is_server: bool

    @property
    def ranks(self) -> int:
        return self.layout.world_size

    @property
    def _width(self) -> int:
        return WIDTHS[self.plan.config.training.mixed_precision_param]

    @cached_property
    def _weights(self) -> _RankWeights:
        experts = 0.0
        others = 0.0
        for name, row in named_rows(self.plan.shape).items():
            if not row.is_matrix or row.part == "embedding" or name.startswith("mtp."):
                continue
            elements = prod(local_shape(row, self.plan.shape, self.layout)) / self.layout.pp
            if row.is_expert:
                experts += elements
            else:
                others += elements
        return _RankWeights(experts, others)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight element."""
        rollout = self.plan.config.rollout
        return 1 if rollout is not None and rollout.weights_dtype else self._width

    def _cache_bytes(self, tokens: float) -> float:
        """Return the bytes of the keys and values of one row, on each rank of the group that computes its attention."""
        layers = self.plan.shape.num_hidden_layers / self.layout.pp
        return tokens * layers * cached_elements(self.plan.shape, self.layout.tp) * self._width

    def free_bytes(self) -> float:
        """Return the free bytes of a GPU after loading the weights; negative if they do not fit."""
        dtype = self.plan.config.training.mixed_precision_param
        weights = inference_bytes(self.plan.shape, self.layout, dtype, drafts=False)
        return usable_bytes(self.cluster.gpu.memory_bytes) - weights * self.weight_bytes / self._width

    def at_once(self, context: float) -> int:
        """Return the rows that the engine holds: the number in the config; for servers, at most as many as fit in
        memory.

        Args:
            context: mean tokens per row.
        """
        _, rollout = self.plan.config.reinforcement
        groups = self.layout.dp_shard
        if not self.is_server:  # the memory plan has counted these rows already
            return rollout.samples_at_once * groups
        return max(min(rollout.samples_at_once, int(groups * self.free_bytes() / self._cache_bytes(context))), 1)

    def step_seconds(self, rows: int, context: float) -> float:
        """Return the seconds in which each of these rows gets a token."""
        shape = self.plan.shape
        layout = self.layout
        share = self.cluster.efficiencies
        gpu = self.cluster.gpu
        group_rows = rows / layout.dp_shard
        weights = self._weights
        expert_share = shape.num_experts_per_tok / shape.n_routed_experts
        # Only the weights of experts that some row chooses are read.
        chosen_share = 1 - (1 - expert_share) ** rows
        read_bytes = (weights.others + chosen_share * weights.experts) * self.weight_bytes
        read_bytes += group_rows * self._cache_bytes(context)
        read_seconds = read_bytes / (gpu.memory_bandwidth * share.memory)
        flops = 2 * (weights.others * group_rows + weights.experts * expert_share * rows * share.imbalance)
        seconds = max(read_seconds, flops / (gpu.bf16_flops * share.products)) * layout.pp
        return seconds + self._collective_seconds(group_rows) + (0.0 if self.is_server else self._launch_seconds())

    def _collective_seconds(self, group_rows: float) -> float:
        """Return the seconds of two sums over tensor-parallel ranks per layer, and of the exchanges with experts."""
        shape = self.plan.shape
        layout = self.layout
        share = self.cluster.efficiencies
        _, moe, _ = layer_counts(shape)
        hidden_bytes = group_rows * shape.hidden_size * self._width
        seconds = 0.0
        if layout.tp > 1:
            rate = self.cluster.link(1, layout.tp).bytes_per_second
            sum_seconds = 2 * hidden_bytes * (layout.tp - 1) / layout.tp / rate
            seconds += 2 * shape.num_hidden_layers * (share.call_seconds + sum_seconds)
        if layout.ep > 1:
            copies = min(shape.num_experts_per_tok, layout.ep)
            sent_bytes = copies * hidden_bytes / layout.tp * (layout.ep - 1) / layout.ep
            rate = self.cluster.link(1, layout.ep).exchange_bytes_per_second
            seconds += 2 * moe * (share.call_seconds + sent_bytes / rate * share.imbalance)
        return seconds

    def _launch_seconds(self) -> float:
        """Return the host's time to launch the kernels of our own engine."""
        shape = self.plan.shape
        form_index = form(self.plan.config.training.mixed_precision_param, is_compiled=False)
        dense, moe, norms = (KERNELS[name][form_index][0] for name in ("dense", "moe", "head_norms"))
        dense_layers, moe_layers, _ = layer_counts(shape)
        norms = norms * shape.use_qk_norm
        launched = dense_layers * (dense + norms) + moe_layers * (moe + norms)
        return launched * self.cluster.efficiencies.launch_seconds


@dataclass(frozen=True)
class EngineOptions:
    """Options for planning that no config has."""

    gpus: int | None = None
    """GPUs of all server engines together; None: one engine for each of `rollout.urls`."""
    engine_gpus: int | None = None
    """GPUs of one engine; None: the smallest power of two that leaves memory for keys and values."""
    completion_tokens: int | None = None
    """Mean tokens of a completion; None: half of the longest."""


@dataclass(frozen=True)
class Rollouts:
    """The predicted generation of a run with [rl], and its training, for one rollout."""

    engines: int
    engine: DecodingEngine
    at_once: int
    """Samples that an engine generates at the same time."""
    completion_tokens: float
    """Mean tokens of a completion."""
    generation: float
    """Seconds in which the engines generate one rollout."""
    update: float
    """Seconds in which the engines receive new weights."""
    training: float
    """Seconds in which the trainer runs the steps of one rollout."""
    seconds: float
    """Seconds from one rollout to the next."""
    rollouts: int
    other_gpus: int
    """GPUs that only generate."""

    @property
    def days(self) -> float:
        return self.rollouts * self.seconds / SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        return (self.engine.cluster.gpus + self.other_gpus) * self.days * 24

    @property
    def dollars(self) -> float | None:
        """Cost at the cluster's price; None without a price."""
        price = self.engine.cluster.price
        return None if price is None else self.gpu_hours * price


def plan_rollouts(plan: Plan, cost: RunCost, options: EngineOptions) -> Rollouts:
    """Predict the rollouts of a run with [rl].

    Raises:
        UserError: the engines do not fit on the GPUs, or the model does not fit on an engine.
    """
    rl, rollout = plan.config.reinforcement
    cluster = cost.cluster
    is_server = rollout.kind != "local"
    longest = rollout.max_new_tokens
    # Prompts are assumed to have half of the longest length in the mean.
    prompt = (plan.config.training.seq_len - rollout.max_new_tokens) / 2
    mean = min(options.completion_tokens or max(longest // 2, 1), longest)
    if is_server:
        engine = _server_engine(plan, cluster, options.engine_gpus)
        engines = (options.gpus or len(rollout.urls) * engine.ranks) // engine.ranks
        if not engines:
            needed = counted(engine.ranks, "GPU")
            raise UserError(f"command line: --engines {options.gpus}: one takes {needed}; give more")
    else:
        ranks = max(rollout.degrees.ranks, rollout.expert_parallel_degree)
        engine = DecodingEngine(plan, cluster, generation_layout(rollout.degrees, ranks), is_server=False)
        engines = plan.layout.world_size // ranks
    lengths = _lengths(ceil(rl.samples_per_rollout / engines), mean, longest)
    total = sum(lengths)
    # Mean over all decoding steps: a completion takes part in as many steps as it has tokens, and in the mean half of
    # its tokens are then written.
    context = prompt + sum(length * length for length in lengths) / (2 * total)
    at_once = engine.at_once(context)
    generation = _generation_seconds(lengths, at_once, lambda rows: engine.step_seconds(rows, context))
    step = cost.longest.largest
    tokens = rl.samples_per_rollout * (prompt + total / len(lengths))
    training = tokens / step.tokens * step.seconds
    update = _update_seconds(plan, cluster, engine, engines)
    # Servers that may use older weights generate during training; weights are sent in between.
    seconds = update + (max(generation, training) if rollout.max_staleness else generation + training)
    steps_of_rollout = max(round(rl.samples_per_rollout * plan.config.training.seq_len / step.tokens), 1)
    rollouts = ceil(cost.steps / steps_of_rollout)
    others = engines * engine.ranks * is_server
    return Rollouts(
        engines, engine, at_once, total / len(lengths), generation, update, training, seconds, rollouts, others
    )


def _server_engine(plan: Plan, cluster: TargetCluster, ranks: int | None) -> DecodingEngine:
    """Choose an engine as `rl-servers` starts it."""
    room = usable_bytes(cluster.gpu.memory_bytes)
    for size in [ranks] if ranks else [2**power for power in range(_MAX_RANKS.bit_length())]:
        split = split_model(plan.shape, size, cluster.gpus_per_node)
        if split is None:
            continue
        engine = DecodingEngine(plan, cluster, split.layout, is_server=True)
        weights = room - engine.free_bytes()
        if leaves_room(weights, room) or (ranks and weights < room):
            return engine
    what = f"--gpus-per-engine {ranks}" if ranks else f"an engine of up to {_MAX_RANKS} GPUs"
    raise UserError(f"command line: {what}: it does not hold this model; take more or larger GPUs, in whole hosts")


def _lengths(count: int, mean: int, longest: int) -> list[int]:
    """Return lengths without a trend, evenly spread around the mean as far as the longest allows."""
    min_length = max(2 * mean - longest, 0)
    max_length = min(2 * mean, longest)
    return [
        max(round(min_length + (index * _GOLDEN % 1.0) * (max_length - min_length)), 1) for index in range(1, count + 1)
    ]


def _generation_seconds(lengths: list[int], at_once: int, step_seconds: Callable[[int], float]) -> float:
    """Return the seconds in which an engine generates these completions; one starts when another has ended."""
    running = lengths[:at_once]
    waiting = lengths[at_once:][::-1]  # the next one is at the end
    heapify(running)
    now = 0  # in tokens
    seconds = 0.0
    while running:
        ended = heappop(running)
        if ended > now:
            seconds += (ended - now) * step_seconds(len(running) + 1)
            now = ended
        if waiting:
            heappush(running, now + waiting.pop())
    return seconds


def _update_seconds(plan: Plan, cluster: TargetCluster, engine: DecodingEngine, engines: int) -> float:
    """Return the seconds to move the weights from the trainer to the engines: written to and read from files, sent by
    rank 0 to each engine, or gathered by ranks that generate themselves."""
    _, rollout = plan.config.reinforcement
    port_bytes_per_second = cluster.network_gbits / 8 * 1e9 * cluster.efficiencies.network
    size = float(count_parameters(plan.shape).total * engine.weight_bytes)
    if rollout.send_adapters:
        size = hugging_face_bytes(plan)
    if not engine.is_server:
        is_inside = cluster.gpus <= cluster.gpus_per_node
        link_bytes_per_second = cluster.gpu.link_bandwidth * cluster.efficiencies.link
        return size / (link_bytes_per_second if is_inside else port_bytes_per_second)
    if rollout.weights == "broadcast":  # rank 0 sends each engine its own copy, all through one port
        return engines * size / port_bytes_per_second
    nodes = max(engines * engine.ranks / cluster.gpus_per_node, 1)
    return cluster.writing_seconds(size) + engines * size / (nodes * cluster.storage_gbytes * 1e9)


def rollout_numbers(rollouts: Rollouts) -> dict[str, Any]:
    """Return the rollouts as a JSON object: seconds, days, dollars."""
    engine = rollouts.engine
    names = "engines", "at_once", "completion_tokens", "generation", "update", "training", "seconds", "rollouts"
    numbers = {name: getattr(rollouts, name) for name in names}
    sizes = {"engine_gpus": engine.ranks, "tensor_parallel": engine.layout.tp, "expert_parallel": engine.layout.ep}
    return numbers | sizes | {name: getattr(rollouts, name) for name in ("days", "gpu_hours", "dollars")}


def rollout_lines(rollouts: Rollouts) -> dict[str, list[str]]:
    """Format the rollouts as lines under a title."""
    engine = rollouts.engine
    layout = rollouts.engine.layout
    rl, rollout = engine.plan.config.reinforcement
    cluster = engine.cluster
    where = f"{counted(rollouts.other_gpus, 'GPU')} more" if engine.is_server else "the GPUs that train"
    what = f"tp {layout.tp}, experts over {layout.ep}, {rollouts.at_once:,} samples at once"
    generated = rollouts.completion_tokens * rl.samples_per_rollout / rollouts.generation
    beside = "beside each other" if rollout.max_staleness else "one after the other"
    gpus = f"({cluster.gpus:,} + {rollouts.other_gpus:,} GPUs)" if engine.is_server else ""
    title = "rollouts, predicted for completions of"
    time = run_time(rollouts.days * SECONDS_PER_DAY)
    return {
        f"{title} {rollouts.completion_tokens:,.0f} tokens in the mean": [
            plan_line("engines", f"{rollouts.engines:,} x {counted(engine.ranks, 'GPU')}", f"({what}; {where})"),
            plan_line("generation of a rollout", duration(rollouts.generation), f"({generated:,.0f} tokens/s)"),
            plan_line("training on it", duration(rollouts.training), f"({beside})"),
            plan_line("new weights for the engines", duration(rollouts.update)),
            plan_line("time with rollouts", time, f"({rollouts.rollouts:,} rollouts)"),
            plan_line("GPU-hours with rollouts", amount(rollouts.gpu_hours), gpus),
            *([] if rollouts.dollars is None else [plan_line("cost with rollouts", f"${rollouts.dollars:,.0f}")]),
        ]
    }
