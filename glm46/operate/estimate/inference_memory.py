"""Memory of a model that generates or is evaluated, beside what this machine has, before its weights are read."""

from math import prod

from glm46.config.faults import counted
from glm46.config.model import ModelShape
from glm46.operate.estimate.machine import Machine
from glm46.operate.estimate.memory import FP32, PROCESS_BYTES
from glm46.operate.estimate.rank_parts import local_shape
from glm46.operate.estimate.requirement import USABLE_CPU_RATIO, compare_memory, usable_bytes
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import Layout
from glm46.run.parameters import Parameter, dense_layer, moe_layer, mtp_layer, part_rows
from glm46.run.stages import split_layers


def inference_bytes(
    shape: ModelShape, layout: Layout, dtype: str, *, drafts: bool = True, rows: int = 0, length: int = 0
) -> float:
    """Bytes of the weights, and of the keys and values of the decoder layers, on the rank that holds most.

    Args:
        layout: see `generation_layout`.
        dtype: of the weights but the selection biases, which are FP32, and of keys and values.
        drafts: with the prediction layers.
        rows: sequences of a rank in the cache.
        length: tokens of each.
    """
    width, depths = WIDTHS[dtype], shape.num_nextn_predict_layers if drafts else 0

    def of(rows: list[Parameter]) -> float:
        return sum(prod(local_shape(row, shape, layout)) * (FP32 if row.optimizer is None else width) for row in rows)

    layers = range(shape.num_hidden_layers)
    stages = [layers] if layout.pp == 1 else split_layers(shape, layout.pp, shape.max_position_embeddings)
    heads = max(shape.num_key_value_heads // layout.tp, 1)
    cache = 2 * rows * length * heads * shape.head_dim * width
    sizes = []
    for stage in stages:
        is_last = stage.stop >= len(layers)
        dense = len(range(stage.start, min(stage.stop, shape.first_k_dense_replace)))
        predicting = depths * is_last
        size = dense * of(dense_layer(shape)) + (len(stage) - dense) * of(moe_layer(shape))
        size += predicting * of(mtp_layer(shape)) if predicting else 0
        size += of(part_rows(shape, "embedding")) * (not stage.start or bool(predicting))
        size += of(part_rows(shape, "head")) * is_last
        sizes.append(size + len(stage) * cache)
    return max(sizes)


def memory_faults(machine: Machine, needed: float, processes: int = 1) -> list[str]:
    """Lines that say what of this machine is too little for equal processes.

    Args:
        machine: without its GPUs if the processes run on the CPU.
        needed: bytes of tensors of each process.
    """
    if not machine.gpus:
        who = f"{processes:,} processes need" if processes > 1 else "one process needs"
        usable, free = machine.free_bytes * USABLE_CPU_RATIO, machine.free_bytes
        fits, text = compare_memory(who, (needed + PROCESS_BYTES["cpu"]) * processes, usable, free)
        return [] if fits else [text]
    faults = []
    if processes > len(machine.gpus):
        faults.append(f"it needs {counted(processes, 'GPU')}, one for each process; found: {len(machine.gpus)}")
    sizes = [gpu.memory_bytes for gpu in machine.gpus if gpu.memory_bytes is not None]
    if sizes:
        least = min(sizes)
        fits, text = compare_memory("each GPU needs", needed + PROCESS_BYTES["gpu"], usable_bytes(least), least)
        faults += [] if fits else [text]
    return faults
