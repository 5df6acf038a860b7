"""Layout of a run for its first message: the mesh, and the memory of each rank."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.attention_runs import describe_core, flash_package
from glm46.compute.model.quantised_weights import columns_of
from glm46.config.float8_layers import describe_float8
from glm46.engine.training.network import Network, TrainedNetwork
from glm46.engine.training.task import Task
from glm46.run.parameters import describe_base, scales_name
from glm46.run.plan import describe_exchange

_RANKS_SHOWN = 4


def describe_layout(task: Task) -> list[str]:
    """Return lines about the mesh and the memory of the ranks. Collective."""
    layout = task.plan.layout
    parallelism = task.plan.config.parallelism
    several = f", {parallelism.stages_per_rank} stages each" if parallelism.stages_per_rank > 1 else ""
    schedule = f"other layers, schedule {parallelism.pipeline_parallel_schedule}{several}"
    axes = [
        ("pp", layout.pp, layout.world_size // layout.pp, schedule),
        ("dp_replicate", layout.dp_replicate, layout.dense_shards * layout.tp, "replicas of the same parameters"),
        ("dp_shard", layout.dp_shard, layout.ranks_per_dp_rank, "other parts of each parameter, other sequences"),
        ("cp", layout.cp, layout.tp, "other parts of each sequence, and of each parameter"),
        ("tp", layout.tp, 1, "other parts of each matrix, and of the sequence between the matrices"),
        ("ep", layout.ep, 1, "other experts; borrowed from dp_shard, cp and tp"),
    ]
    used = [axis for axis in axes if axis[1] > 1]
    product = " x ".join(f"{name} {degree}" for name, degree, *_ in used if name != "ep")
    lines = [f"ranks        {layout.world_size}{' = ' + product if product else ''} on {task.cluster.device.type}"]
    for name, degree, stride, meaning in used:
        ranks = [str(index * stride) for index in range(degree)]
        if degree > _RANKS_SHOWN:
            ranks[_RANKS_SHOWN - 1 : -1] = ["..."]
        lines.append(f"  {name:<12} rank 0 is with {', '.join(ranks[1:])}: {meaning}")
    lines.append(f"attention    {_attention(task)}")
    if layout.ep > 1:
        lines.append(f"exchange     {describe_exchange(task.plan)}")
    if task.plan.config.float8.recipe_name is not None:
        lines.append(f"float8       {describe_float8(task.plan.shape, task.plan.config.float8, layout.tp)}")
    if task.plan.config.adapter is not None and task.plan.config.adapter.base_dtype is not None:
        lines.append(f"base         {describe_base(task.plan.shape, task.plan.config.adapter.base_dtype)}")
    rank_memory: list[Any] = [None] * layout.world_size
    dist.all_gather_object(rank_memory, _rank_memory(list(task.networks.values())))
    return lines + _memory_lines(rank_memory, layout.pp)


def _attention(task: Task) -> str:
    """Describe the attention kernel, and the tokens that each token attends to."""
    config = task.plan.config
    cp = task.plan.layout.cp
    windows = dict.fromkeys(stage.shape.sliding_window for stage in task.plan.text_stages)
    has_window = any(window is not None for window in windows)
    if cp == 1 and not config.data.document_mask and not has_window:
        return f"causal, by torch's scaled_dot_product_attention{flash_package()}"
    parts = [describe_core(task.cluster.device, getattr(torch, config.training.mixed_precision_param))]
    if config.data.document_mask:
        parts.append("within documents")
    if has_window:
        parts.append(f"window of {', then '.join('all' if w is None else f'{w:,}' for w in windows)} tokens")
    if cp > 1:
        rows = config.training.local_batch_size
        travel = any(task.plan.keys_travel(s.shape, (rows, s.seq_len)) for s in task.plan.text_stages)
        how = "passed around" if travel else "exchanged over" if has_window else "gathered over"
        parts.append(f"keys {how} {cp} ranks")
    return ", ".join(parts)


def _rank_memory(networks: list[Network]) -> tuple[list[tuple[int, int]], int, int, int]:
    """Return the first and last layer of each local stage, the number of local parameters, the bytes of parameters and
    gradients (which have the same types), and the bytes of optimizer states."""
    layers = [[int(number) for number in model.layers] for model in networks[0].models]
    trained = [local_tensor(parameter) for network in networks for parameter in network.parameters.values()]
    frozen = [local_tensor(parameter) for network in networks for parameter in network.frozen.values()]
    weights = sum(_weights(network.frozen) for network in networks)
    optimizers = [network.optimizer for network in networks if isinstance(network, TrainedNetwork)]
    states = [local_tensor(state) for optimizer in optimizers for state in optimizer.state_tensors().values()]
    return (
        [(numbers[0], numbers[-1]) for numbers in layers],
        sum(parameter.numel() for parameter in trained) + weights,
        sum(parameter.nbytes for parameter in (*trained, *trained, *frozen)),
        sum(state.nbytes for state in states),
    )


def _weights(frozen: Mapping[str, Tensor]) -> int:
    """Count the weights of this rank's parts, without scales."""
    scales = {scales_name(name): frozen.get(scales_name(name)) for name in frozen}
    local = {name: local_tensor(parameter) for name, parameter in frozen.items() if name not in scales}
    return sum(prod(part.shape[:-1]) * columns_of(part, scales[scales_name(name)]) for name, part in local.items())


def _memory_lines(held: list[Any], stages: int) -> list[str]:
    """Format one line per pipeline rank: its layers, and the smallest and largest memory among its ranks."""
    per_stage = len(held) // stages
    lines = []
    for stage in range(stages):
        ranks = held[stage * per_stage :][:per_stage]
        first = stage * per_stage
        where = f"rank {first}" if per_stage == 1 else f"ranks {first}-{first + per_stage - 1}"
        layers = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranks[0][0])
        counts, with_gradients, states = (sorted(rank[column] for rank in ranks) for column in (1, 2, 3))
        lines.append(
            f"  {where:<12} layers {layers}: {_span(counts)} parameters each, "
            f"{_span(with_gradients, 2**20)} MiB with gradients, {_span(states, 2**20)} MiB of optimizer states"
        )
    return lines


def _span(values: list[int], unit: int = 1) -> str:
    """Format the smallest and the largest value, or one of them if they look the same."""
    shown = [f"{value / unit:,.1f}" if unit > 1 else f"{value:,}" for value in (values[0], values[-1])]
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"
