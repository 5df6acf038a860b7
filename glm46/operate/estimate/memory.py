"""Memory of each rank in bytes, by formula.

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
from glm46.config.rules_layout import STATE_BLOCK, STATE_LEAST_ENTRIES
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.activation_memory import ActivationMemory, pinned
from glm46.operate.estimate.activations import FP32, INDEX
from glm46.operate.estimate.other_networks import frozen_plan, generation_memory, other_networks, other_passes
from glm46.operate.estimate.plan_sizes import batches_of
from glm46.operate.estimate.rank_parts import (
    HeldRows,
    StagePart,
    alike,
    fsdp_units,
    held_rows,
    in_flight,
    local_shape,
    mesh_of_stage,
    parts_of_ranks,
)
from glm46.run.checkpoint_size import STATE_WIDTHS
from glm46.run.layout import Layout
from glm46.run.parameters import DECODED_AT_ONCE, DECODING_BYTES, Parameter
from glm46.run.plan import Plan, gradients_are_summed_once, resolve_plan
from glm46.run.sizes import OFFLOAD_SLOTS, PROBE_BYTES

OFFLOAD_ITEM_BYTES = 512 * 2**20
"""Largest item, unless a single tensor is larger: Muon's default workspace and bucket allow matrices of 256 MiB in
BF16, whose momentum is FP32."""

PROCESS_BYTES = {"cpu": 350 * 2**20, "gpu": 2 * 2**30}
"""Memory of a process before the first weight. cpu: resident memory after importing torch and its distributed parts
(measured, rounded up). gpu: CUDA context and communication buffers (an allowance, not measured)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes of the rank that needs most."""

    weights: float
    """Master weights that this rank holds on the device, the routers' selection biases, and both of the frozen
    reference of a preference, or of a teacher."""
    gradients: float
    """Their gradients, or the copies that Muon takes of offloaded ones. Under a pipeline FSDP2 keeps whole gradients of
    all layers, in the reduce type, until the last micro-batch."""
    optimizer: float
    """States of Muon and AdamW on the device: all, or the slots in use while the rest is in host memory."""
    gathered: float
    """Gathered weights of embedding, head and the current layers, with the whole gradient of one layer or, where they
    take more, the logits of one chunk. Of a quantised base the weight that is computed with, in the compute type, and
    what converts it. DoRA's norms of all rows, and the factors that follow from them."""
    activations: float
    """Tensors that forward keeps for backward, those of a layer that is computed again, and what pipeline stages
    receive."""
    gathered_keys: float
    """Keys and values of other ranks, under context parallelism."""
    loss: float
    """The gradients of the head's weight, which forward computes and backward uses."""
    process: float
    """Memory of the process without tensors."""
    attention: float = 0.0
    """On a GPU: what the backward of one layer's attention takes beyond what that of the rest of the layer has freed
    before."""
    host: float = 0.0
    """With a GPU: offloaded weights (those of a reference too) and gradients, and optimizer states in host memory, all
    of them or those on their way to a file and back. Not part of the total; on a CPU all memory is."""
    host_activations: float = 0.0
    """With a GPU: what checkpointed layers keep in host memory, not part of the total."""
    disk: float = 0.0
    """Optimizer states in a file of the rank, not part of the total. A step reads and writes each byte once."""
    text: float = 0.0
    """On a CPU: token data of a step, see `step_text`."""
    networks: float = 0.0
    """With [rl]: see `other_networks.other_networks`."""
    generation: float = 0.0
    """With [rl]: see `other_networks.generation_memory`."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self)) - self.host - self.host_activations - self.disk


def plan_memory(config: RunConfig, world_size: int, *, device: str = "gpu") -> MemoryPlan:
    """`largest_stage` of a run on this many processes; ``device`` as in `rank_memory`."""
    return largest_stage(stage_memory(resolve_plan(config, world_size), device=device))


def largest_stage(stages: list[MemoryPlan]) -> MemoryPlan:
    """The stage of text that needs most memory."""
    return max(stages, key=lambda memory: memory.total)


def stage_memory(plan: Plan, *, device: str = "gpu") -> list[MemoryPlan]:
    """Memory in bytes of the rank that needs most, in each stage of text that the run reaches; ``device`` as in
    `rank_memory`."""
    return [largest_stage(rank_memory(plan, index, device=device)) for index in _reached(plan)]


def rank_memory(plan: Plan, stage_index: int = 0, *, device: str = "gpu") -> list[MemoryPlan]:
    """Memory in bytes of the first rank of each pipeline rank, which holds most, in one of `Plan.text_stages`.

    Args:
        device: "gpu" or "cpu"; decides the memory of the process itself.
    """
    step, generation, optimizers = _Step(plan, stage_index, device), generation_memory(plan), 1 + other_passes(plan)[1]
    has_probe = plan.config.comm.bandwidth_interval and plan.layout.world_size > 1
    process, found = PROCESS_BYTES[device] + PROBE_BYTES[device] * bool(has_probe), []
    for rank, parts in enumerate(parts_of_ranks(plan)):
        memory = step.memory_of(rank, parts)
        networks, host = other_networks(plan, memory.weights, memory.gradients + memory.optimizer)
        host, disk = optimizers * memory.host + host, optimizers * memory.disk
        memory = replace(memory, networks=networks, generation=generation, host=host, disk=disk, process=process)
        if device == "cpu":
            # A CPU has one memory, so offloaded states and token data are in it too.
            text = _text(plan, stage_index)
            memory = replace(memory, optimizer=memory.optimizer + memory.host, host=0.0, text=text)
        elif plan.config.training.parameter_offload:
            # Muon copies gradients to the device item by item, and those of whole weights, which a pipeline sums until
            # the last micro-batch, stay on it.
            held, whole = step.gradients_of(parts)
            gradients = max(min(held, OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES), whole)
            host = memory.host + memory.weights + held + step.pinned_rounding(parts)
            memory = replace(memory, weights=0.0, gradients=gradients, host=host)
        found.append(replace(memory, attention=step.attention_backward(parts) if device == "gpu" else 0.0))
    return found


def step_text(plan: Plan) -> float:
    """Bytes of token data of one step, which a rank reads at once, in the largest stage of text."""
    return max(_text(plan, index) for index in _reached(plan))


def _reached(plan: Plan) -> list[int]:
    """The stages of text that the run reaches."""
    return [index for index, tokens in enumerate(plan.stage_tokens) if tokens or not index]


def _text(plan: Plan, stage_index: int) -> float:
    """Bytes of token data of one step: four numbers per token, and two more per MTP layer."""
    rows = batches_of(plan, stage_index)[1] / plan.layout.dp_degree
    numbers = INDEX * (4 + 2 * plan.shape.num_nextn_predict_layers)
    return rows * plan.text_stages[stage_index].seq_len * numbers


@lru_cache(maxsize=4096)  # a search of layouts asks again for each kind of recomputation
def _layer_sizes(parts: tuple[StagePart, ...], shape: ModelShape, layout: Layout) -> dict[str, tuple[int, int, int]]:
    """Sizes of what FSDP2 gathers, of each layer by the prefix of its names, "" of the root: elements in the compute
    type, bytes of those that are gathered as they are stored, and elements that have a gradient."""
    found, of_units = dict[str, tuple[int, int, int]](), dict[int, tuple[int, int, int]]()
    for unit in [unit for part in parts for unit in fsdp_units(part, shape, layout)]:
        if id(unit.rows) not in of_units:
            sizes = [(row, prod(local_shape(row, shape, layout))) for row in unit.rows]
            computed = sum(size for row, size in sizes if row.stored_bytes is None)
            stored = sum(int(size * (row.stored_bytes or 0)) for row, size in sizes)
            of_units[id(unit.rows)] = computed, stored, sum(size for row, size in sizes if row.is_trained)
        before, added = found.get(unit.prefix, (0, 0, 0)), of_units[id(unit.rows)]
        found[unit.prefix] = before[0] + added[0], before[1] + added[1], before[2] + added[2]
    return found


class _Step(ActivationMemory):
    """The largest step of a plan in one stage of text."""

    def __init__(self, plan: Plan, stage_index: int, device: str):
        super().__init__(plan, stage_index, device)
        self._sums_once, self._frozen = gradients_are_summed_once(plan), frozen_plan(plan)
        self._frozen_parts = parts_of_ranks(self._frozen) if self._frozen else []
        self._teacher = _Step(self._frozen, stage_index, device) if plan.config.teacher and self._frozen else None

    def memory_of(self, rank: int, parts: list[StagePart]) -> MemoryPlan:
        """Of a rank with these stages, all offloaded weights and gradients on the device."""
        rows = self.held(parts)
        held = self._trained(parts)
        frozen = sum(each.elements * (each.row.stored_bytes or self.width) for each in rows if each.row.is_frozen)
        buffers = sum(each.elements for each in rows if each.row.optimizer is None)
        states = [(self._state_bytes(each), each.number) for each in rows if each.row.is_trained]
        on_device = all_states = sum(size * count for size, count in states)
        offload = self.config.optimizer.state_offload
        if offload != "none":
            # AdamW updates whole tensors; embedding and head may be larger than any item of Muon.
            on_device = min(all_states, OFFLOAD_SLOTS * max(OFFLOAD_ITEM_BYTES, *(size for size, _ in states)))
        # Of a reference or a teacher with weights of its own, as they are computed with.
        others = held_rows(self._frozen_parts[rank], self._frozen.shape, self.layout) if self._frozen else ()
        reference = sum(n * prod(sizes) * (self.width if row.optimizer else FP32) for row, n, sizes in others)
        here = {part.index for part in parts}
        kept = {part.index: self.of_micro_batch(part, here) for part in parts}
        is_whole = self.checkpointing.mode != "none"
        counts, waiting = in_flight(self.config.parallelism, rank, self.micro_batches, kept, whole_backward=is_whole)
        freed, in_host = self.in_host(parts, counts)
        activations = sum(counts[index] * size for index, size in kept.items())
        activations = in_host * (self.device == "cpu") - freed + activations
        activations += waiting and waiting * max(self.output_gradients(part) for part in parts)
        gathered = self._gathered(parts, self.loss_buffers() if any(part.has_head for part in parts) else 0.0)
        if self._teacher is not None:  # in its pass there are no activations yet
            gathered = max(gathered, self._teacher._gathered(self._frozen_parts[rank]) - activations)
        return MemoryPlan(
            weights=held * self.master + frozen + buffers * FP32 + reference,
            gradients=max(self.gradients_of(parts)),
            optimizer=on_device,
            gathered=gathered
            + self._converted(each.row for each in rows)
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
        """Bytes of the gradients of this rank's shards; and of whole weights, if they are summed over ranks once: in
        the reduce type those that FSDP2 gets."""
        of_shards = self._trained(parts) * self.master
        if not self._sums_once:
            return of_shards, 0
        whole = sum(trained for *_, trained in self._layer_sizes(parts).values())
        return of_shards, whole * self.reduce + sum(each.elements for each in self._unsharded(parts)) * self.master

    def _unsharded(self, parts: list[StagePart]) -> list[HeldRows]:
        """The parameters that this rank trains and FSDP2 does not get."""
        rows = self.held(parts)
        return [each for each in rows if each.row.is_trained and (each.row.is_expert, True) in parts[0].unsharded]

    def _trained(self, parts: list[StagePart]) -> int:
        """Elements of this rank's shards that have a gradient."""
        return sum(each.elements for each in self.held(parts) if each.row.is_trained)

    def _layer_sizes(self, parts: list[StagePart]) -> dict[str, tuple[int, int, int]]:
        return _layer_sizes(alike(parts), self.shape, mesh_of_stage(self.layout))

    def pinned_rounding(self, parts: list[StagePart]) -> float:
        """Bytes that torch's pinned allocator adds to offloaded weights and gradients of a rank: it rounds the shard of
        each parameter up to a power of two."""
        rounding = 0
        for row, count, sizes in self.held(parts):
            size = int(prod(sizes) * (self.master if row.is_trained else row.stored_bytes or self.width))
            copies = (row.optimizer is not None) * (1 + row.is_trained)
            rounding += count * copies * (pinned(size) - size)
        return rounding

    def _state_bytes(self, of_rank: HeldRows) -> float:
        """One momentum under Muon, two moments under AdamW; codes of 8 bits have an FP32 scale per block of columns."""
        optimizer, row, sizes = self.config.optimizer, of_rank.row, of_rank.sizes
        states = row.states(optimizer)
        if optimizer.state_dtype != "8bit":
            return states * prod(sizes) * STATE_WIDTHS[optimizer.state_dtype]
        if not row.is_matrix or row.numel(self.shape) < STATE_LEAST_ENTRIES:
            return states * prod(sizes) * FP32
        return states * prod(sizes[:-1]) * (sizes[-1] + -(-sizes[-1] // STATE_BLOCK) * FP32)

    def _converted(self, rows: Iterable[Parameter]) -> float:
        """The quantised weight that a layer computes with, in the compute type, and what converts it."""
        rows = [row for row in rows if row.is_quantised]
        largest = max((self.elements(row) for row in rows), default=0)
        is_compiled = self.config.compile.enable and self.device == "gpu"
        is_packed = any(row.stored_bytes == 0.5 for row in rows) and not is_compiled
        return largest * self.width + is_packed * min(largest, DECODED_AT_ONCE) * DECODING_BYTES

    def _gathered(self, parts: list[StagePart], loss_buffers: float | None = None) -> float:
        """Gathered weights; and what only one part of the step needs: the gradient of a layer in the compute and the
        reduce type, or of a weight that FSDP2 does not get, or before it the logits. None: of weights alone."""
        sizes = self._layer_sizes(parts)
        layers = {prefix: computed * self.gathered + stored for prefix, (computed, stored, _) in sizes.items()}
        trained = [size for *_, size in sizes.values()] or [0]
        root, is_piped, largest = layers.pop("", 0), self.layout.pp > 1, max(layers.values(), default=0)
        # Otherwise the current layer and the prefetched one.
        keeps_all = self.config.parallelism.keeps_gathered
        weights = sum(layers.values()) if keeps_all else min(2 * largest, sum(layers.values()))
        gradient = max(trained) * (self.gathered + self.reduce)
        if is_piped:
            # Backward in halves leaves the gradients of a micro-batch until the next one.
            splits = PIPELINE_SCHEDULES[self.config.parallelism.pipeline_parallel_schedule].splits_backward
            gradient = (sum if splits else max)(trained) * self.width
        # The gradient of one weight, to be added to that of the micro-batches before.
        added = max((prod(each.sizes) for each in self._unsharded(parts)), default=0) * (self.micro_batches > 1)
        beside = 0.0 if loss_buffers is None else max(gradient, added * self.width, loss_buffers)
        return weights + self._rounded(parts) + root + beside

    def _rounded(self, parts: list[StagePart]) -> float:
        """The experts' weights in FP8, for forward and for backward, with scales; emulated in the compute type."""
        if not keeps_rounded_experts(self.config):
            return 0
        mesh = mesh_of_stage(self.layout)
        width, scales = (self.width, 0) if self.config.float8.emulate else (1, FP32)
        rows = (row for part in parts for row in part.rows(self.shape) if row.is_expert and row.optimizer)
        sizes = [local_shape(row, self.shape, mesh) for row in rows]
        return sum(2 * width * prod(size) + scales * size[0] * (size[1] + size[2]) for size in sizes)
