"""Memory of each rank in bytes, by formula.

The formulas follow the allocations of FSDP2, our model and our optimizers, on the rank that needs most, with tokens
spread evenly over experts. Uneven routing needs more.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod

from glm46.config.float8_layers import keeps_rounded_experts
from glm46.config.model import ModelShape
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.config.rules_layout import STATE_BLOCK, STATE_LEAST_ENTRIES
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.activations import (
    FP32,
    INDEX,
    Frozen,
    Spread,
    attention_backward_bytes,
    freed_before_attention,
    head_bytes,
    kept_tensors,
    layer_bytes,
    output_gradient_bytes,
    travelling_key_bytes,
)
from glm46.operate.estimate.other_networks import frozen_plan, generation_memory, other_networks, other_passes
from glm46.operate.estimate.rank_parts import (
    Block,
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
from glm46.run.checkpoint_size import STATE_WIDTHS, WIDTHS
from glm46.run.context_keys import (
    SHARED_KEYS,
    attended_keys,
    gathered_key_bytes,
    kept_of_key,
    kernel_runs,
    keys_travel,
    sent_of_key,
)
from glm46.run.layout import Layout
from glm46.run.parameters import DECODED_AT_ONCE, DECODING_BYTES, Parameter, part_rows
from glm46.run.plan import Plan, gradients_are_summed_once, resolve_plan
from glm46.run.sizes import OFFLOAD_SLOTS, PROBE_BYTES, loss_chunk_tokens

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


def offloaded_activations(plan: Plan, stage_index: int, part: StagePart) -> list[float]:
    """Bytes that the checkpointed layers of a stage copy to host memory in a micro-batch, and back; of each layer."""
    if not plan.config.activation_checkpoint.cpu_checkpointing:
        return []
    return [*map(sum, _Step(plan, stage_index, "gpu").kept_tensors(part))]


def step_text(plan: Plan) -> float:
    """Bytes of token data of one step, which a rank reads at once, in the largest stage of text."""
    return max(_text(plan, index) for index in _reached(plan))


def _reached(plan: Plan) -> list[int]:
    """The stages of text that the run reaches."""
    return [index for index, tokens in enumerate(plan.stage_tokens) if tokens or not index]


def _text(plan: Plan, stage_index: int) -> float:
    """Bytes of token data of one step: four numbers per token, and two more per MTP layer."""
    rows = plan.batches_of(stage_index)[1] / plan.layout.dp_degree
    numbers = INDEX * (4 + 2 * plan.shape.num_nextn_predict_layers)
    return rows * plan.text_stages[stage_index].seq_len * numbers


@lru_cache(maxsize=4096)  # a search of layouts asks again for each kind of recomputation
def _layer_sizes(parts: tuple[StagePart, ...], shape: ModelShape, layout: Layout) -> dict[str, tuple[int, int, int]]:
    """Sizes of what FSDP2 gathers, of each layer by the prefix of its names, "" of the root: elements in the compute
    type, bytes of those that are gathered as they are stored, and elements that have a gradient."""
    sizes, of_units = dict[str, tuple[int, int, int]](), dict[int, tuple[int, int, int]]()
    units = [unit for part in parts for unit in fsdp_units(part, shape, layout)]
    for unit in units:
        if id(unit.rows) not in of_units:
            computed = stored = trained = 0
            for row in unit.rows:
                size = prod(local_shape(row, shape, layout))
                computed += size * (row.stored_bytes is None)
                stored += int(size * (row.stored_bytes or 0))
                trained += size * row.is_trained
            of_units[id(unit.rows)] = computed, stored, trained
        before, added = sizes.get(unit.prefix, (0, 0, 0)), of_units[id(unit.rows)]
        sizes[unit.prefix] = before[0] + added[0], before[1] + added[1], before[2] + added[2]
    return sizes


def _pinned(size: float) -> int:
    """Bytes that torch's pinned allocator takes for a tensor: a power of two."""
    return 1 << max(ceil(size) - 1, 0).bit_length()


class _Step:
    """The largest step of a plan in one stage of text."""

    def __init__(self, plan: Plan, stage_index: int, device: str):
        self._device = device
        stage = plan.text_stages[stage_index]
        self._config, self._layout, self._shape, self._length = plan.config, plan.layout, stage.shape, stage.seq_len
        self._micro_batches = plan.batches_of(stage_index)[1] // plan.rows_per_micro_batch
        training = plan.config.training
        self._rows, self._checkpointing = training.local_batch_size, plan.config.activation_checkpoint
        self._mode = self._checkpointing.mode
        self._width, self._master = WIDTHS[training.mixed_precision_param], WIDTHS[training.dtype]
        self._reduce = WIDTHS[training.mixed_precision_reduce]
        self._tokens = self._rows * self._length / (self._layout.cp * self._layout.tp)
        self._document_tokens = plan.document_tokens or self._length
        self._spread = Spread(plan.layout.tp, plan.layout.ep, plan.hops(stage.shape))
        self._of_row = {"rows": self._rows, "length": self._length, "cp": plan.layout.cp, "tp": plan.layout.tp}
        self._sums_once, self._frozen = gradients_are_summed_once(plan), frozen_plan(plan)
        self._frozen_parts = parts_of_ranks(self._frozen) if self._frozen else []
        self._teacher = _Step(self._frozen, stage_index, device) if plan.config.teacher and self._frozen else None
        self._known: dict[tuple[Block, Frozen | None, str], float] = {}

    def memory_of(self, rank: int, parts: list[StagePart]) -> MemoryPlan:
        """Of a rank with these stages, all offloaded weights and gradients on the device."""
        rows = held_rows(parts, self._shape, self._layout)
        held = self._trained(parts)
        frozen = sum(each.elements * (each.row.stored_bytes or self._width) for each in rows if each.row.is_frozen)
        buffers = sum(each.elements for each in rows if each.row.optimizer is None)
        states = [(self._state_bytes(each), each.number) for each in rows if each.row.is_trained]
        on_device = all_states = sum(size * count for size, count in states)
        offload = self._config.optimizer.state_offload
        if offload != "none":
            # AdamW updates whole tensors; embedding and head may be larger than any item of Muon.
            on_device = min(all_states, OFFLOAD_SLOTS * max(OFFLOAD_ITEM_BYTES, *(size for size, _ in states)))
        # Of a reference or a teacher with weights of its own, as they are computed with.
        others = held_rows(self._frozen_parts[rank], self._frozen.shape, self._layout) if self._frozen else ()
        reference = sum(n * prod(sizes) * (self._width if row.optimizer else FP32) for row, n, sizes in others)
        here = {part.index for part in parts}
        kept = {part.index: self._of_micro_batch(part, here) for part in parts}
        counts, waiting = {part.index: 1 for part in parts}, 0
        if self._layout.pp > 1:
            counts, waiting = in_flight(
                self._config.parallelism, rank, self._micro_batches, kept, whole_backward=self._mode != "none"
            )
        freed, in_host = self._in_host(parts, counts)
        activations = sum(counts[index] * size for index, size in kept.items())
        activations = in_host * (self._device == "cpu") - freed + activations
        activations += waiting and waiting * max(self._output_gradients(part) for part in parts)
        gathered = self._gathered(parts, self._loss_buffers() if any(part.has_head for part in parts) else 0.0)
        if self._teacher is not None:  # in its pass there are no activations yet
            gathered = max(gathered, self._teacher._gathered(self._frozen_parts[rank]) - activations)
        return MemoryPlan(
            weights=held * self._master + frozen + buffers * FP32 + reference,
            gradients=max(self.gradients_of(parts)),
            optimizer=on_device,
            gathered=gathered
            + self._converted(each.row for each in rows)
            + sum(2 * FP32 * n * row.numel(self._shape) for row, n, _ in rows if row.group == "magnitude"),
            activations=activations + self._buffers(parts),
            gathered_keys=self._gathered_keys(parts, counts),
            loss=sum(self._loss(counts[part.index]) for part in parts if part.has_head),
            process=0.0,
            host={"none": 0.0, "cpu": all_states, "nvme": on_device}[offload],
            host_activations=in_host * (self._device != "cpu"),
            disk=all_states if offload == "nvme" else 0.0,
        )

    def gradients_of(self, parts: list[StagePart]) -> tuple[float, float]:
        """Bytes of the gradients of this rank's shards; and of whole weights, if they are summed over ranks once: in
        the reduce type those that FSDP2 gets."""
        of_shards = self._trained(parts) * self._master
        if not self._sums_once:
            return of_shards, 0
        whole = sum(trained for *_, trained in self._layer_sizes(parts).values())
        return of_shards, whole * self._reduce + sum(each.elements for each in self._unsharded(parts)) * self._master

    def _unsharded(self, parts: list[StagePart]) -> list[HeldRows]:
        """The parameters that this rank trains and FSDP2 does not get."""
        rows = held_rows(parts, self._shape, self._layout)
        return [each for each in rows if each.row.is_trained and (each.row.is_expert, True) in parts[0].unsharded]

    def _trained(self, parts: list[StagePart]) -> int:
        """Elements of this rank's shards that have a gradient."""
        return sum(each.elements for each in held_rows(parts, self._shape, self._layout) if each.row.is_trained)

    def _layer_sizes(self, parts: list[StagePart]) -> dict[str, tuple[int, int, int]]:
        return _layer_sizes(alike(parts), self._shape, mesh_of_stage(self._layout))

    def pinned_rounding(self, parts: list[StagePart]) -> float:
        """Bytes that torch's pinned allocator adds to offloaded weights and gradients of a rank: it rounds the shard of
        each parameter up to a power of two."""
        rounding = 0
        for row, count, sizes in held_rows(parts, self._shape, self._layout):
            size = int(prod(sizes) * (self._master if row.is_trained else row.stored_bytes or self._width))
            copies = (row.optimizer is not None) * (1 + row.is_trained)
            rounding += count * copies * (_pinned(size) - size)
        return rounding

    def _state_bytes(self, of_rank: HeldRows) -> float:
        """One momentum under Muon, two moments under AdamW; codes of 8 bits have an FP32 scale per block of columns."""
        optimizer, row, sizes = self._config.optimizer, of_rank.row, of_rank.sizes
        states = row.states(optimizer)
        if optimizer.state_dtype != "8bit":
            return states * prod(sizes) * STATE_WIDTHS[optimizer.state_dtype]
        if not row.is_matrix or row.numel(self._shape) < STATE_LEAST_ENTRIES:
            return states * prod(sizes) * FP32
        return states * prod(sizes[:-1]) * (sizes[-1] + -(-sizes[-1] // STATE_BLOCK) * FP32)

    def _converted(self, rows: Iterable[Parameter]) -> float:
        """The quantised weight that a layer computes with, in the compute type, and what converts it."""
        rows = [row for row in rows if row.is_quantised]
        largest = max((prod(local_shape(row, self._shape, self._layout)) for row in rows), default=0)
        is_packed = any(row.stored_bytes == 0.5 for row in rows)
        return largest * self._width + is_packed * min(largest, DECODED_AT_ONCE) * DECODING_BYTES

    def _gathered(self, parts: list[StagePart], loss_buffers: float | None = None) -> float:
        """Gathered weights; and what only one part of the step needs: the gradient of a layer in the compute and the
        reduce type, or of a weight that FSDP2 does not get, or before it the logits. None: of weights alone."""
        width = self._width if self._config.training.mixed_precision_param != "float32" else self._master
        sizes = self._layer_sizes(parts)
        layers = {prefix: computed * width + stored for prefix, (computed, stored, _) in sizes.items()}
        trained = [size for *_, size in sizes.values()] or [0]
        root, is_piped, largest = layers.pop("", 0), self._layout.pp > 1, max(layers.values(), default=0)
        # Otherwise the current layer and the prefetched one.
        keeps_all = self._config.parallelism.keeps_gathered
        weights = sum(layers.values()) if keeps_all else min(2 * largest, sum(layers.values()))
        gradient = max(trained) * (width + self._reduce)
        if is_piped:
            # Backward in halves leaves the gradients of a micro-batch until the next one.
            splits = PIPELINE_SCHEDULES[self._config.parallelism.pipeline_parallel_schedule].splits_backward
            gradient = (sum if splits else max)(trained) * self._width
        # The gradient of one weight, to be added to that of the micro-batches before.
        added = max((prod(each.sizes) for each in self._unsharded(parts)), default=0) * (self._micro_batches > 1)
        beside = 0.0 if loss_buffers is None else max(gradient, added * self._width, loss_buffers)
        return weights + self._rounded(parts) + root + beside

    def _rounded(self, parts: list[StagePart]) -> float:
        """The experts' weights in FP8, for forward and for backward, with scales; emulated in the compute type."""
        if not keeps_rounded_experts(self._config):
            return 0
        mesh = mesh_of_stage(self._layout)
        width, scales = (self._width, 0) if self._config.float8.emulate else (1, FP32)
        rows = (row for part in parts for row in part.rows(self._shape) if row.is_expert and row.optimizer)
        sizes = [local_shape(row, self._shape, mesh) for row in rows]
        return sum(2 * width * prod(size) + scales * size[0] * (size[1] + size[2]) for size in sizes)

    def _of_micro_batch(self, part: StagePart, here: Set[int]) -> float:
        """Bytes that a stage keeps of the forward of a micro-batch, on a rank with these stages."""
        shape, layout, heads = self._shape, self._layout, 1 + self._shape.num_nextn_predict_layers
        of_token = sum(self._layers(part))
        rotated = shape.qk_rope_head_dim or shape.head_dim * shape.partial_rotary_factor
        of_token += rotated * self._width * layout.tp  # cosines and sines
        if part.has_embedding:
            of_token += heads * INDEX * layout.tp * (part.adapters is None)
        elif self._width == FP32 or self._mode != "none":
            # What came from the stage before is in a buffer already, where it is not kept as an FP32 copy.
            # The first layer of a stage is checkpointed if any is; prediction layers keep embeddings as they came.
            modes = [self._checkpointing.mode_of(i) for i, block in enumerate(part.blocks) if block == "mtp"]
            embeddings = len(modes) if self._width == FP32 else modes.count("full")
            of_token -= (1 + embeddings) * shape.hidden_size * self._width
        if not part.has_head:  # what it sends is kept until backward; on the same rank, in the buffer of the next stage
            is_sent = part.index + 1 not in here
            return self._tokens * (of_token + is_sent * heads * shape.hidden_size * self._width)
        frozen = None if part.adapters is None else Frozen()
        return self._tokens * (of_token + head_bytes(shape, self._width, layout.tp, frozen))

    def _in_host(self, parts: list[StagePart], counts: dict[int, int]) -> tuple[float, float]:
        """Bytes that leave the device for host memory, where two layers of each stage stay, and those that they take
        there: torch's pinned allocator gives a power of two for each tensor."""
        freed = held = 0.0
        for part in parts if self._checkpointing.cpu_checkpointing else ():
            layers = self.kept_tensors(part)
            sizes = [*map(sum, layers), 0.0]
            freed += counts[part.index] * sum(sizes) - max(map(sum, pairwise(sizes)), default=0.0)
            if self._device == "gpu":
                layers = [[*map(_pinned, tensors)] for tensors in layers]
            held += counts[part.index] * sum(map(sum, layers))
        return freed, held

    def kept_tensors(self, part: StagePart) -> list[list[float]]:
        """Bytes of the tensors of each checkpointed layer of a stage that can wait in host memory."""
        found = []
        for index, (block, rows) in enumerate(self._backward_blocks(part), part.backward_from):
            mode = self._checkpointing.mode_of(index)
            if mode != "none":
                recompute = self._checkpointing.recompute
                tensors = kept_tensors(self._shape, self._width, block, mode, self._spread, rows, recompute)
                # Buffers that a stage receives in stay where they are.
                stays = (not part.has_embedding) * ((index == 0) + ((block, mode) == ("mtp", "full")))
                found.append([self._tokens * size for size in tensors[stays:]])
        return found

    def _output_gradients(self, part: StagePart) -> float:
        shape, width = self._shape, self._width
        of_blocks = sum(output_gradient_bytes(shape, width, block, self._layout.tp) for block in part.blocks)
        return self._tokens * (of_blocks + part.has_head * shape.hidden_size * width)

    def _buffers(self, parts: list[StagePart]) -> float:
        """The layer that is computed again; and for each micro-batch of a pipeline its token data and the buffers that
        stages receive in."""
        size = 0.0
        if self._mode != "none":
            size = self._tokens * max((each for part in parts for each in self._layers(part, again=True)), default=0.0)
        if (of := self._config.distillation) is not None:  # of all micro-batches of a step
            size += self._micro_batches * self._tokens * self._layout.tp * of.top_k * (INDEX + FP32)
        if self._layout.pp > 1:
            depths, schedule = self._shape.num_nextn_predict_layers, self._config.parallelism.pipeline_parallel_schedule
            is_v_shaped = PIPELINE_SCHEDULES[schedule].is_v_shaped
            sent = (1 + depths) * self._shape.hidden_size * self._width
            received = sent * sum((not part.has_embedding) + (not part.has_head) for part in parts)
            if schedule != "GPipe" and (is_v_shaped or not parts[0].has_embedding):
                size += self._tokens * sent  # gradients on their way to a stage before
            text = (3 + 2 * depths) * INDEX * self._layout.tp  # token data of all micro-batches as one
            size += self._micro_batches * self._tokens * (received + text)
        return size

    def _backward_blocks(self, part: StagePart) -> list[tuple[Block, Frozen | None]]:
        """The blocks that have a backward, each with its adapters if its own weights are frozen."""
        frozen = [None] * len(part.blocks) if part.adapters is None else [Frozen(rows) for rows in part.adapters]
        return list(zip(part.blocks, frozen, strict=True))[part.backward_from :]

    def _layers(self, part: StagePart, *, again: bool = False) -> list[float]:
        """Bytes that each block that has a backward keeps, per token of a rank; or those of the blocks that are
        computed ``again``, once they have been."""
        kept = []
        for index, (block, rows) in enumerate(self._backward_blocks(part), part.backward_from):
            mode = self._checkpointing.mode_of(index)
            if again and mode == "none":
                continue
            mode = "none" if again else mode
            # The input of the first norm has no gradient.
            is_first = mode == "none" and part.adapters is not None and not part.index and index == part.backward_from
            kept.append(self._layer(block, rows, mode) - is_first * self._shape.hidden_size * FP32)
        return kept

    def _layer(self, block: Block, frozen: Frozen | None, mode: str) -> float:
        """`layer_bytes` of a block."""
        if (key := (block, frozen, mode)) not in self._known:
            recompute = self._checkpointing.recompute
            self._known[key] = layer_bytes(
                self._shape, self._width, block, mode, self._spread, frozen=frozen, recompute=recompute
            )
        return self._known[key]

    def _gathered_keys(self, parts: list[StagePart], counts: dict[int, int]) -> float:
        """Keys and values that layers keep for backward, and the gathered ones that one layer takes them from."""
        layout, shape = self._layout, self._shape
        heads = max(shape.num_key_value_heads / layout.tp, 1)
        modes = {p.index: [self._checkpointing.mode_of(index) for index in range(len(p.blocks))] for p in parts}
        layers = sum(counts[index] * each.count("none") for index, each in modes.items()) + (self._mode != "none")
        if layout.cp == 1:
            if self._config.rl is None or shape.sliding_window is not None:
                return 0.0
            # Those of shared prompts, once for each sample.
            return layers * (SHARED_KEYS - 1) * 2 * self._rows * self._length * heads * shape.head_dim * self._width
        if keys_travel(shape, self._width, **self._of_row):
            return travelling_key_bytes(shape, self._width, **self._of_row)
        kept = gathered_key_bytes(shape, self._width, **self._of_row)
        # The rank's own keys are counted with its layers, where only what is made of them stays.
        kept -= self._rows * self._length / layout.cp * kept_of_key(shape, layout.tp) * self._width
        # Keys and values come one after the other.
        _, received = attended_keys(shape.sliding_window, self._length, layout.cp)
        gathered = self._rows * received * sent_of_key(shape, layout.tp) * self._width
        return layers * kept + gathered  # with checkpointing of the layer that is computed, or computed again

    def attention_backward(self, parts: list[StagePart]) -> float:
        """`MemoryPlan.attention` of a rank with these stages. Attention in FP32 has no flash kernel."""
        if self._width == FP32:
            return 0.0
        layout, shape, schedule = self._layout, self._shape, self._config.parallelism.pipeline_parallel_schedule
        freed = [
            freed_before_attention(shape, self._width, block, layout.tp, frozen)
            for block, frozen in dict.fromkeys(each for part in parts for each in self._backward_blocks(part))
        ]
        if not freed:
            return 0.0
        splits = layout.pp > 1 and self._mode == "none" and PIPELINE_SCHEDULES[schedule].splits_backward
        queries = keys = self._tokens * layout.tp
        if layout.cp == 1:
            keys *= SHARED_KEYS if self._config.rl is not None and shape.sliding_window is None else 1
        elif not keys_travel(shape, self._width, **self._of_row):
            keys = self._rows * attended_keys(shape.sliding_window, self._length, layout.cp)[0]
        # A rank of context parallelism has two chunks of each row.
        runs = kernel_runs(max(self._rows * min(layout.cp, 2), queries / self._document_tokens))
        needed = attention_backward_bytes(shape, self._width, queries=queries, keys=keys, runs=runs, tp=layout.tp)
        # Weights get their gradients later where backward is split, so that what they need is not free yet.
        return max(needed - self._tokens * max(freed) * (not splits), 0.0)

    def _loss(self, micro_batches: int) -> float:
        """The gradients of the head's weight, of the main model and each depth. `token_logprobs`, which pairs take,
        computes them in backward."""
        if self._config.adapter is not None or self._config.preference or self._config.distillation:
            return 0.0
        heads = 1 + self._shape.num_nextn_predict_layers
        return micro_batches * heads * self._head_elements() * self._width

    def _loss_buffers(self) -> float:
        """Logits of one chunk, their softmax, and the sum of the gradient of the head's weight over the chunks."""
        head, tokens = self._head_elements(), self._tokens * self._layout.tp
        is_cast, is_trained, has_gpu = self._width != FP32, self._config.adapter is None, self._device == "gpu"
        chunk = loss_chunk_tokens(is_trained=is_trained, device=self._device)
        logits = min(chunk, tokens) * head / self._shape.hidden_size * (FP32 + self._width * is_cast)
        sums = is_cast * head * (FP32 + self._width * (not has_gpu and tokens > chunk))
        return logits + sums * is_trained

    def _head_elements(self) -> int:
        head = next(row for row in part_rows(self._shape, "head") if row.name == "lm_head.weight")
        return prod(local_shape(head, self._shape, self._layout))
