"""Estimates the memory of each rank in bytes, by formula.

The formulas follow the allocations of FSDP2, our model and our optimizers, on the rank that needs most, with tokens
spread evenly over experts. Uneven routing needs more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod

from glm46.config.float8_layers import keeps_rounded_experts
from glm46.config.model import ModelShape
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.activation_memory import ActivationMemory, pinned
from glm46.operate.estimate.activations import FP32, INDEX
from glm46.operate.estimate.other_networks import generation_memory, other_networks, other_passes
from glm46.operate.estimate.plan_sizes import batches_of
from glm46.operate.estimate.rank_parts import (
    HeldRows,
    StagePart,
    alike,
    fsdp_units,
    in_flight,
    local_shape,
    mesh_of_stage,
    parts_of_ranks,
)
from glm46.operate.estimate.state_bytes import state_bytes
from glm46.run.layout import Layout
from glm46.run.parameters import DECODED_AT_ONCE, DECODING_BYTES, Parameter
from glm46.run.plan import Plan, gradients_are_summed_once, replicas_reduce_once, resolve_plan
from glm46.run.sizes import OFFLOAD_SLOTS, PROBE_BYTES

OFFLOAD_ITEM_BYTES = 512 * 2**20
"""Maximum size of one offloaded item, unless a single tensor is larger: Muon's default workspace and bucket allow
matrices of 256 MiB in BF16, whose momentum is FP32."""

PROCESS_BYTES = {"cpu": 350 * 2**20, "gpu": 2 * 2**30}
"""Memory of a process before the first weight. cpu: resident memory after importing torch with its distributed modules
(measured, rounded up). gpu: CUDA context and communication buffers (an allowance, not measured)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes of the rank that needs most."""

    weights: float
    """Master weights of this rank on the device with the routers' selection biases; in preference training also the
    weights and biases of the frozen reference."""
    gradients: float
    """Gradients of the weights, or Muon's device copies of offloaded gradients. With a pipeline, FSDP2 keeps unsharded
    gradients of all layers, in the reduce type, until the last micro-batch."""
    optimizer: float
    """States of Muon and AdamW on the device: all of them, or, with offloaded states, the slots that hold the states of
    a few items at a time."""
    gathered: float
    """Gathered weights of embedding, head and the current layers, plus the larger of the full gradient of one layer and
    the logits of one chunk. For a quantised base also the weight converted to the compute type and its conversion
    buffers; for DoRA the norms of all rows and the factors derived from them."""
    activations: float
    """Tensors that forward keeps for backward, tensors of the layer that backward recomputes, and receive buffers of
    pipeline stages."""
    gathered_keys: float
    """With context parallelism: keys and values gathered from other ranks."""
    loss: float
    """Gradients of the head's weight, which forward computes and backward uses."""
    process: float
    """Memory of the process without any tensors."""
    attention: float = 0.0
    """On a GPU: memory that backward needs for the attention of one layer, minus what backward of the rest of the layer
    has freed before."""
    host: float = 0.0
    """With a GPU: offloaded weights (the reference's too), gradients and optimizer states in host memory. States in a
    file count only while they are copied. Not in the total. 0 on a CPU, whose only memory is the host's."""
    host_activations: float = 0.0
    """With a GPU: offloaded activations of checkpointed layers in host memory. Not in the total."""
    disk: float = 0.0
    """Optimizer states in this rank's file, which each step reads and writes once. Not in the total."""
    text: float = 0.0
    """On a CPU: token data of a step, see `step_text`."""
    networks: float = 0.0
    """With [rl]: see `other_networks.other_networks`."""
    generation: float = 0.0
    """With [rl]: see `other_networks.generation_memory`."""

    @property
    def total(self) -> float:
        total: float = sum(getattr(self, field.name) for field in fields(self))
        return total - self.host - self.host_activations - self.disk


def plan_memory(config: RunConfig, world_size: int, *, device: str = "gpu") -> MemoryPlan:
    """Return the memory of the largest stage of text of a run on this many processes; ``device`` as in
    `rank_memory`."""
    return largest_stage(stage_memory(resolve_plan(config, world_size), device=device))


def largest_stage(stages: list[MemoryPlan]) -> MemoryPlan:
    """Return the stage of text that needs most memory."""
    return max(stages, key=lambda memory: memory.total)


def stage_memory(plan: Plan, *, device: str = "gpu") -> list[MemoryPlan]:
    """Return the memory of the rank that needs most, for each stage of text that the run reaches; ``device`` as in
    `rank_memory`."""
    return [largest_stage(rank_memory(plan, index, device=device)) for index in _reached(plan)]


def rank_memory(plan: Plan, stage_index: int = 0, *, device: str = "gpu") -> list[MemoryPlan]:
    """Estimate the memory of each pipeline rank in one of `Plan.text_stages`, on its first rank, which holds most.

    Args:
        device: "gpu" or "cpu"; determines the memory of the process itself.
    """
    step = _Step(plan, stage_index, device)
    generation = generation_memory(plan)
    optimizers = 1 + other_passes(plan)[1]
    has_probe = plan.config.comm.bandwidth_interval and plan.layout.world_size > 1
    process = PROCESS_BYTES[device] + PROBE_BYTES[device] * bool(has_probe)
    plans = []
    for rank, parts in enumerate(parts_of_ranks(plan)):
        memory = step.memory_of(rank, parts)
        networks = other_networks(plan, memory.weights, memory.gradients + memory.optimizer)
        host = optimizers * memory.host
        disk = optimizers * memory.disk
        memory = replace(memory, networks=networks, generation=generation, host=host, disk=disk, process=process)
        if device == "cpu":
            # A CPU has one memory, so it also holds offloaded states and token data.
            text = _text(plan, stage_index)
            memory = replace(memory, optimizer=memory.optimizer + memory.host, host=0.0, text=text)
        elif plan.config.training.parameter_offload:
            # Muon copies gradients to the device item by item; unsharded gradients, which a pipeline sums until the
            # last micro-batch, stay on the device.
            held, whole = step.gradients_of(parts)
            gradients = max(min(held, OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES), whole)
            host = memory.host + memory.weights + held + step.pinned_rounding(parts)
            memory = replace(memory, weights=0.0, gradients=gradients, host=host)
        plans.append(replace(memory, attention=step.attention_backward(parts) if device == "gpu" else 0.0))
    return plans


def step_text(plan: Plan) -> float:
    """Return the bytes of one step's token data, which a rank reads at once, in the largest stage of text."""
    return max(_text(plan, index) for index in _reached(plan))


def _reached(plan: Plan) -> list[int]:
    """Return the indices of the stages of text that the run reaches."""
    return [index for index, tokens in enumerate(plan.stage_tokens) if tokens or not index]


def _text(plan: Plan, stage_index: int) -> float:
    """Return the bytes of one step's token data: four numbers per token, and two more per prediction depth."""
    rows = batches_of(plan, stage_index)[1] / plan.layout.dp_degree
    numbers = INDEX * (4 + 2 * plan.mtp_depths)
    return rows * plan.text_stages[stage_index].seq_len * numbers


@lru_cache(maxsize=4096)  # a search evaluates the same parts for each recomputation setting
def _layer_sizes(parts: tuple[StagePart, ...], shape: ModelShape, layout: Layout) -> dict[str, tuple[int, int, int]]:
    """Return the sizes of what FSDP2 gathers for each layer, by name prefix ("" is the root unit): elements in the
    compute type, bytes of weights gathered in their stored type, and elements that have a gradient."""
    by_prefix = dict[str, tuple[int, int, int]]()
    unit_sizes = dict[int, tuple[int, int, int]]()
    for unit in [unit for part in parts for unit in fsdp_units(part, shape, layout)]:
        if id(unit.rows) not in unit_sizes:
            sizes = [(row, prod(local_shape(row, shape, layout))) for row in unit.rows]
            computed = sum(size for row, size in sizes if row.stored_bytes is None)
            stored = sum(int(size * (row.stored_bytes or 0)) for row, size in sizes)
            unit_sizes[id(unit.rows)] = computed, stored, sum(size for row, size in sizes if row.is_trained)
        previous = by_prefix.get(unit.prefix, (0, 0, 0))
        added = unit_sizes[id(unit.rows)]
        by_prefix[unit.prefix] = previous[0] + added[0], previous[1] + added[1], previous[2] + added[2]
    return by_prefix


class _Step(ActivationMemory):
    """The largest step of a plan in one stage of text."""

    def __init__(self, plan: Plan, stage_index: int, device: str):
        super().__init__(plan, stage_index, device)
        self._sums_once = gradients_are_summed_once(plan)

    def memory_of(self, rank: int, parts: list[StagePart]) -> MemoryPlan:
        """Estimate the memory of a rank with these stages, with all offloaded weights and gradients on the device."""
        rows = self.held(parts)
        held = self._trained(parts)
        frozen = sum(
            held_row.elements * (held_row.row.stored_bytes or self.width) for held_row in rows if held_row.row.is_frozen
        )
        buffers = sum(held_row.elements for held_row in rows if held_row.row.optimizer is None)
        states = [
            (state_bytes(self.config.optimizer, held_row, self.shape), held_row.number)
            for held_row in rows
            if held_row.row.is_trained
        ]
        on_device = all_states = sum(size * count for size, count in states)
        offload = self.config.optimizer.state_offload
        if offload != "none":
            # AdamW updates one tensor at a time; embedding and head may be larger than any item of Muon.
            on_device = min(all_states, OFFLOAD_SLOTS * max(OFFLOAD_ITEM_BYTES, *(size for size, _ in states)))
        # The reference model of preference training is stored in the compute type.
        has_reference = self.config.has_preference_reference and self.config.adapter is None
        reference = has_reference * sum(
            held_row.elements * (self.width if held_row.row.optimizer else FP32) for held_row in rows
        )
        stage_indices = {part.index for part in parts}
        kept = {part.index: self.of_micro_batch(part, stage_indices) for part in parts}
        is_whole = self.checkpointing.mode != "none"
        counts, waiting = in_flight(self.config.parallelism, rank, self.micro_batches, kept, whole_backward=is_whole)
        freed, in_host = self.in_host(parts, counts)
        activations = sum(counts[index] * size for index, size in kept.items())
        activations = in_host * (self.device == "cpu") - freed + activations
        activations += waiting and waiting * max(self.output_gradients(part) for part in parts)
        gathered = self._gathered(parts, self.loss_buffers() if any(part.has_head for part in parts) else 0.0)
        return MemoryPlan(
            weights=held * self.master + frozen + buffers * FP32 + reference,
            gradients=max(self.gradients_of(parts)),
            optimizer=on_device,
            gathered=gathered
            + self._converted(held_row.row for held_row in rows)
            + sum(2 * FP32 * n * row.numel(self.shape) for row, n, _ in rows if row.group == "magnitude"),
            activations=activations + self.buffers(parts),
            gathered_keys=self.gathered_keys(parts, counts),
            loss=sum(self.loss(counts[part.index]) for part in parts if part.has_head),
            process=0.0,
            host={"none": 0.0, "cpu": all_states, "nvme": on_device}[offload],
            host_activations=in_host * (self.device != "cpu"),
            disk=all_states if offload == "nvme" else 0.0,
        )

    def gradients_of(self, parts: list[StagePart]) -> tuple[float, float]:
        """Return the bytes of the gradients of this rank's shards, and of unsharded gradients if they are summed over
        ranks once (those that FSDP2 manages in the reduce type, the others in the master type)."""
        shard_bytes = self._trained(parts) * self._gradient_width()
        if not self._sums_once:
            return shard_bytes, 0
        whole = sum(trained for *_, trained in self._layer_sizes(parts).values())
        return shard_bytes, whole * self.reduce + sum(
            held_row.elements for held_row in self._unsharded(parts)
        ) * self.master

    def _gradient_width(self) -> int:
        """Return the bytes per element of a shard's gradient; a sum over several micro-batches is FP32."""
        sums_once = self._sums_once or replicas_reduce_once(self.plan)
        return self.master if sums_once or self.micro_batches == 1 else FP32

    def _unsharded(self, parts: list[StagePart]) -> list[HeldRows]:
        """Return the parameters that this rank trains without FSDP2."""
        rows = self.held(parts)
        return [
            held_row
            for held_row in rows
            if held_row.row.is_trained and (held_row.row.is_expert, True) in parts[0].unsharded
        ]

    def _trained(self, parts: list[StagePart]) -> int:
        """Return the elements of this rank's shards that have a gradient."""
        return sum(held_row.elements for held_row in self.held(parts) if held_row.row.is_trained)

    def _layer_sizes(self, parts: list[StagePart]) -> dict[str, tuple[int, int, int]]:
        return _layer_sizes(alike(parts), self.shape, mesh_of_stage(self.layout))

    def pinned_rounding(self, parts: list[StagePart]) -> float:
        """Return the bytes that torch's pinned allocator adds to offloaded weights and gradients of a rank: it rounds
        each shard up to a power of two, and keeps the gradients of the first micro-batch after they are converted to
        FP32."""
        is_converted = self._gradient_width() != self.master
        extra_bytes = 0
        for row, count, sizes in (held for held in self.held(parts) if held.row.optimizer is not None):
            size = int(prod(sizes) * (self.master if row.is_trained else row.stored_bytes or self.width))
            rounding = pinned(size) - size
            extra_bytes += count * rounding
            if row.is_trained:
                extra_bytes += count * (pinned(size) if is_converted else rounding)
        return extra_bytes

    def _converted(self, rows: Iterable[Parameter]) -> float:
        """Return the bytes of a layer's quantised weight converted to the compute type, and of the conversion
        buffers."""
        rows = [row for row in rows if row.is_quantised]
        max_elements = max((self.elements(row) for row in rows), default=0)
        is_compiled = self.config.compile.enable and self.device == "gpu"
        is_packed = any(row.stored_bytes == 0.5 for row in rows) and not is_compiled
        return max_elements * self.width + is_packed * min(max_elements, DECODED_AT_ONCE) * DECODING_BYTES

    def _gathered(self, parts: list[StagePart], loss_buffers: float | None = None) -> float:
        """Return the bytes of gathered weights plus the largest transient of a step: a layer's gradient in the compute
        and the reduce type, the gradient of a weight outside FSDP2, or the logits. Without ``loss_buffers`` weights
        only."""
        sizes = self._layer_sizes(parts)
        layers = {prefix: computed * self.gathered + stored for prefix, (computed, stored, _) in sizes.items()}
        trained = [size for *_, size in sizes.values()] or [0]
        root = layers.pop("", 0)
        is_piped = self.layout.pp > 1
        max_layer = max(layers.values(), default=0)
        # Without `keeps_gathered` only the current layer and the prefetched one are gathered.
        keeps_all = self.config.parallelism.keeps_gathered
        weights = sum(layers.values()) if keeps_all else min(2 * max_layer, sum(layers.values()))
        gradient = max(trained) * (self.gathered + self.reduce)
        if is_piped:
            # A split backward keeps the gradients of a micro-batch until the next one.
            splits = PIPELINE_SCHEDULES[self.config.parallelism.pipeline_parallel_schedule].splits_backward
            gradient = (sum if splits else max)(trained) * self.width
        # The gradient of one weight, before it is added to the sum over the previous micro-batches.
        added = max((prod(held_row.sizes) for held_row in self._unsharded(parts)), default=0) * (self.micro_batches > 1)
        transient = 0.0 if loss_buffers is None else max(gradient, added * self.width, loss_buffers)
        return weights + self._rounded(parts) + root + transient

    def _rounded(self, parts: list[StagePart]) -> float:
        """Return the bytes of the experts' weights rounded to FP8 for forward and backward, with scales. With emulation
        they are in the compute type."""
        if not keeps_rounded_experts(self.config):
            return 0
        mesh = mesh_of_stage(self.layout)
        width, scales = (self.width, 0) if self.config.float8.emulate else (1, FP32)
        rows = (row for part in parts for row in part.rows(self.shape) if row.is_expert and row.optimizer)
        sizes = [local_shape(row, self.shape, mesh) for row in rows]
        return sum(2 * width * prod(size) + scales * size[0] * (size[1] + size[2]) for size in sizes)
