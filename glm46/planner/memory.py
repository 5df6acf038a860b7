"""Memory of each rank in bytes, by formula.

The formulas follow the allocations of FSDP2, our model and our optimizers, on the rank that needs most, with tokens
spread evenly over experts. Uneven routing needs more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from glm46.config.model import ModelShape
from glm46.config.optimizer import Optimizer
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.config.presets import resolve_shape
from glm46.config.rules_layout import values_of
from glm46.config.run_config import RunConfig
from glm46.planner.activations import (
    FP32,
    INDEX,
    attended_keys,
    dense_layer_bytes,
    gathered_key_bytes,
    keys_travel,
    moe_layer_bytes,
    mtp_layer_bytes,
    selective_attention_bytes,
    selective_experts_bytes,
    travelling_key_bytes,
    with_key_copies,
)
from glm46.planner.curriculum import TextStage
from glm46.planner.layout import Layout
from glm46.planner.parameters import Parameter, dense_layer, moe_layer, mtp_layer, part_rows
from glm46.planner.plan import Plan, resolve_plan
from glm46.planner.stages import split_layers, stages_of_rank

WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0 + 4.0 / 64.0}
"""Bytes per element; 8bit has an FP32 scale per block of 64. A test holds it equal to `optim/compact_state.py`."""

OFFLOAD_SLOTS = 3
"""Offloaded items of states that are on the device at once, and with a file in host memory; a test holds it equal to
`optim/state_offload.py` and `optim/state_ring.py`."""

OFFLOAD_ITEM_BYTES = 512 * 2**20
"""Largest item, unless a single tensor is larger: Muon's default workspace and bucket allow matrices of 256 MiB in
BF16, whose momentum is FP32."""

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once; a test holds it equal to the default of `model/cross_entropy.py`."""

PROCESS_BYTES = {"cpu": 350 * 2**20, "gpu": 2 * 2**30}
"""Memory of a process before the first weight. cpu: resident memory after importing torch and its distributed parts
(measured, rounded up). gpu: CUDA context and communication buffers (an allowance, not measured)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes of the rank that needs most."""

    weights: float
    """Master weights that this rank holds on the device."""
    gradients: float
    """Their gradients, or the copies that Muon takes of offloaded ones."""
    optimizer: float
    """States of Muon and AdamW on the device: all, or the slots in use while the rest is in host memory."""
    gathered: float
    """Gathered weights of embedding, head and the current layers, with the whole gradient of one layer."""
    activations: float
    """Tensors that forward keeps for backward."""
    gathered_keys: float
    """Keys and values of other ranks, under context parallelism."""
    loss: float
    """Logits of one chunk and the gradient of the head."""
    process: float
    """Memory of the process without tensors."""
    host: float = 0.0
    """With a GPU: offloaded weights and gradients, and optimizer states in host memory, all of them or those on their
    way to a file and back. Not part of the total; on a CPU all memory is."""
    disk: float = 0.0
    """Optimizer states in a file of the rank, not part of the total. A step reads and writes each byte once."""
    text: float = 0.0
    """On a CPU: token data of a step, see `step_text`."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self)) - self.host - self.disk


@dataclass(frozen=True)
class _Layer:
    """A layer, or one of embedding and head, as the planner counts it."""

    rows: list[Parameter]
    activation: float
    """Bytes per token kept for backward."""
    selective: float = 0.0
    """Bytes per token that selective checkpointing keeps besides the input of the layer."""
    attends: bool = True
    """True if it has attention; embedding and head have none."""


def plan_memory(config: RunConfig, world_size: int, *, device: str = "gpu") -> MemoryPlan:
    """`largest_stage` of a run on this many processes; ``device`` as in `stage_memory`."""
    return largest_stage(stage_memory(resolve_plan(config, world_size), device=device))


def largest_stage(stages: list[MemoryPlan]) -> MemoryPlan:
    """The stage of text that needs most memory."""
    return max(stages, key=lambda memory: memory.total)


def stage_memory(plan: Plan, *, device: str = "gpu") -> list[MemoryPlan]:
    """Memory in bytes of the rank that needs most, in each stage of text that the run reaches.

    Args:
        device: "gpu" or "cpu"; decides the memory of the process itself.
    """
    ranks = _layers_of_ranks(plan.config, plan.shape, plan.layout)  # a pipeline divides its layers once
    memory = []
    for stage, config in _stage_configs(plan):
        plans = [_rank_plan(config, stage.shape, plan.layout, rank, layers) for rank, layers in enumerate(ranks)]
        if config.training.parameter_offload and device == "gpu":
            plans = [_offloaded(of_rank) for of_rank in plans]
        largest = max(plans, key=lambda plan: plan.total)
        if device == "cpu":
            # A CPU has one memory, so offloaded states and token data are in it too.
            text = _text(config, plan.layout)
            largest = replace(largest, optimizer=largest.optimizer + largest.host, host=0.0, text=text)
        memory.append(replace(largest, process=PROCESS_BYTES[device]))
    return memory


def step_text(plan: Plan) -> float:
    """Bytes of token data of one step, which a rank reads at once, in the largest stage of text."""
    return max(_text(of_stage, plan.layout) for _, of_stage in _stage_configs(plan))


def _stage_configs(plan: Plan) -> Iterator[tuple[TextStage, RunConfig]]:
    """Each stage of text that the run reaches, and the config with its length and largest batch for the whole run."""
    for index, (stage, tokens) in enumerate(zip(plan.text_stages, plan.stage_tokens, strict=True)):
        if tokens or not index:
            batch = float(plan.batches_of(index)[1])
            training = {"seq_len": stage.seq_len, "global_batch_size": batch}
            yield stage, plan.config.model_copy(update={"training": plan.config.training.model_copy(update=training)})


def _text(config: RunConfig, layout: Layout) -> float:
    """Bytes of token data of one step: four numbers per token, and two more per MTP layer."""
    rows = max(values_of(config.training.global_batch_size), default=0) / layout.dp_degree
    numbers = INDEX * (4 + 2 * resolve_shape(config.model).num_nextn_predict_layers)
    return max(rows, config.training.local_batch_size) * config.training.seq_len * numbers


def _layers_of_ranks(config: RunConfig, shape: ModelShape, layout: Layout) -> list[list[_Layer]]:
    """The layers of each pipeline rank; the first stage has the embedding, the last one head and MTP layers."""
    width = int(WIDTHS[config.training.mixed_precision_param])
    attention = selective_attention_bytes(shape, width)
    both = attention + selective_experts_bytes(shape, width, ep=layout.ep)
    kept = with_key_copies(shape, layout.tp)
    of_dense, of_moe, of_mtp = (f(kept, width) for f in (dense_layer_bytes, moe_layer_bytes, mtp_layer_bytes))
    dense = _Layer(dense_layer(shape), of_dense, attention)
    moe = _Layer(moe_layer(shape), of_moe, both)
    # Selective checkpointing covers only the decoder layer inside an MTP layer.
    mtp = _Layer(mtp_layer(shape), of_mtp, both + of_mtp - of_moe)
    is_dense = [index < shape.first_k_dense_replace for index in range(shape.num_hidden_layers)]
    layers = [dense if flag else moe for flag in is_dense]
    split = split_layers(shape, config.parallelism.stages, config.training.seq_len) if layout.pp > 1 else [slice(None)]
    stages = [layers[part.start : part.stop] for part in split]
    hidden = 2 * shape.hidden_size * width
    stages[0] = [_Layer(part_rows(shape, "embedding"), INDEX, attends=False), *stages[0]]
    stages[-1] = [
        *stages[-1],
        *[mtp] * shape.num_nextn_predict_layers,
        _Layer(part_rows(shape, "head"), hidden, attends=False),
    ]
    if layout.pp == 1:
        return stages
    return [
        [layer for stage in stages_of_rank(config.parallelism, rank) for layer in stages[stage]]
        for rank in range(layout.pp)
    ]


def _rank_plan(config: RunConfig, shape: ModelShape, layout: Layout, rank: int, layers: list[_Layer]) -> MemoryPlan:
    rows = [row for layer in layers for row in layer.rows]
    held = sum(_held(row, shape, layout) for row in rows)
    width = WIDTHS[config.optimizer.state_dtype]
    trained = [row for row in rows if row.optimizer is not None]
    sizes = [_held(row, shape, layout) * _states(row, config.optimizer) * width for row in trained]
    on_device = sum(sizes)
    if config.optimizer.state_offload != "none":
        # AdamW updates whole tensors; embedding and head may be larger than any item of Muon.
        on_device = min(sum(sizes), OFFLOAD_SLOTS * max(OFFLOAD_ITEM_BYTES, *sizes))
    master = WIDTHS[config.training.dtype]
    return MemoryPlan(
        weights=held * master,
        gradients=held * master,
        optimizer=on_device,
        gathered=_gathered(config, shape, layout, layers),
        activations=_activations(config, shape, layout, rank, layers),
        gathered_keys=_gathered_keys(config, shape, layout, rank, layers),
        loss=_loss(config, shape, layout) if any(row.name == "lm_head.weight" for row in rows) else 0.0,
        process=0.0,
        host={"none": 0.0, "cpu": sum(sizes), "nvme": on_device}[config.optimizer.state_offload],
        disk=sum(sizes) if config.optimizer.state_offload == "nvme" else 0.0,
    )


def _offloaded(memory: MemoryPlan) -> MemoryPlan:
    """With weights and gradients in host memory; Muon copies gradients to the device item by item."""
    host = memory.host + memory.weights + memory.gradients
    copies = min(memory.gradients, OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES)
    return replace(memory, weights=0.0, gradients=copies, host=host)


def _whole(row: Parameter, shape: ModelShape, layout: Layout) -> float:
    """Elements that a rank computes with: the size that FSDP gathers."""
    if row.is_expert:
        return row.numel(shape) / layout.ep
    return row.numel(shape) / (1 if row.tensor_dim is None else layout.tp)


def _held(row: Parameter, shape: ModelShape, layout: Layout) -> float:
    """Elements that a rank holds between steps."""
    return _whole(row, shape, layout) / (layout.expert_shards if row.is_expert else layout.dense_shards)


def _states(row: Parameter, optimizer: Optimizer) -> int:
    """Optimizer states per element: one momentum under Muon, two moments under AdamW."""
    return 1 if row.choose_optimizer(optimizer) == "muon" else 2


def _gathered(config: RunConfig, shape: ModelShape, layout: Layout, stage: list[_Layer]) -> float:
    param, reduce = WIDTHS[config.training.mixed_precision_param], WIDTHS[config.training.mixed_precision_reduce]
    is_copied = config.training.mixed_precision_param != config.training.dtype or config.training.parameter_offload
    if layout.world_size == 1 and not is_copied:
        return 0.0
    ends = ("embed_tokens.weight", "lm_head.weight")
    root = sum(_whole(row, shape, layout) for layer in stage for row in layer.rows if row.name in ends)
    blocks = [layer.rows for layer in stage if not any(row.name in ends for row in layer.rows)]
    layers = [sum(_whole(row, shape, layout) for row in rows) for rows in blocks]
    largest = max(layers, default=0.0)
    policy = config.parallelism.fsdp_reshard_after_forward
    keeps_all = policy == "never" or (policy == "default" and layout.pp > 1)
    # The current layer and the prefetched one; a whole gradient, and its copy in the reduce type.
    weights = sum(layers) if keeps_all else min(2 * largest, sum(layers))
    gradient = max(largest, root) * (param + (reduce if reduce != param else 0.0))
    return (weights + root) * param + gradient


def _in_flight(config: RunConfig, layout: Layout, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at once, averaged over its stages."""
    ranks, each = layout.pp, config.parallelism.stages_per_rank
    schedule = PIPELINE_SCHEDULES[config.parallelism.pipeline_parallel_schedule]
    batch = max(values_of(config.training.global_batch_size), default=0.0)
    micro_batches = max(batch // (config.training.local_batch_size * layout.dp_degree), 1.0)
    if config.parallelism.pipeline_parallel_schedule == "GPipe":
        most = micro_batches
    elif schedule.is_v_shaped:
        most = ranks  # the first stage of the V holds most, the last one least
    else:
        # Forwards before the first backward of the rank: Narayanan et al., arXiv 2104.04473.
        ahead = ranks - rank - 1
        most = ahead + 1 if each == 1 else (2 * ahead + (each - 1) * ranks + 1) / each
    return min(most, micro_batches)


def _activations(config: RunConfig, shape: ModelShape, layout: Layout, rank: int, stage: list[_Layer]) -> float:
    tokens = config.training.local_batch_size * config.training.seq_len / (layout.cp * layout.tp)
    in_flight = _in_flight(config, layout, rank) if layout.pp > 1 else 1
    if config.activation_checkpoint.mode == "none":
        return in_flight * tokens * sum(layer.activation for layer in stage)
    kept = len(stage) * shape.hidden_size * WIDTHS[config.training.mixed_precision_param]
    if config.activation_checkpoint.mode == "selective":
        kept += sum(layer.selective for layer in stage)
    return tokens * (in_flight * kept + max(layer.activation for layer in stage))


def _gathered_keys(config: RunConfig, shape: ModelShape, layout: Layout, rank: int, layers: list[_Layer]) -> float:
    """Keys and values that layers keep for backward, and the gathered ones that one layer takes them from."""
    if layout.cp == 1:
        return 0.0
    rows, length = config.training.local_batch_size, config.training.seq_len
    width = WIDTHS[config.training.mixed_precision_param]
    part = {"rows": rows, "length": length, "cp": layout.cp, "tp": layout.tp}
    if keys_travel(shape, width, **part):
        return travelling_key_bytes(shape, width, **part)
    kept = gathered_key_bytes(shape, width, **part)
    # Keys and values come one after the other.
    _, received = attended_keys(shape.sliding_window, length, layout.cp)
    gathered = rows * received * max(shape.num_key_value_heads / layout.tp, 1) * shape.head_dim * width
    if config.activation_checkpoint.mode != "none":
        return kept + gathered  # of the layer that is computed, or computed again
    in_flight = _in_flight(config, layout, rank) if layout.pp > 1 else 1
    return in_flight * sum(layer.attends for layer in layers) * kept + gathered


def _loss(config: RunConfig, shape: ModelShape, layout: Layout) -> float:
    width = WIDTHS[config.training.mixed_precision_param]
    tokens = config.training.local_batch_size * config.training.seq_len / layout.cp
    rows = shape.vocab_size / layout.tp
    logits = min(LOSS_CHUNK_TOKENS, tokens) * rows * (FP32 + (width if width != FP32 else 0.0))
    head_gradient = rows * shape.hidden_size * (FP32 + (width if width != FP32 else 0.0))
    return logits + head_gradient + tokens * shape.hidden_size * width
