"""The weights of a network on any layout, whole and with adapters added, one tensor after another."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46.compat import gather_rows
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.adapters import merged_rows
from glm46.compute.model.quantised_weights import in_compute_type
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelShape
from glm46.engine.training.network import Network
from glm46.run.parameters import named_rows, scales_name

_SMALL_BYTES = 4 * 2**20
"""Of whole tensors that are gathered in one call, which takes up to 2 ms on a CPU however small they are."""


@torch.no_grad()
def whole_weights(network: Network, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of the whole model by name, in the order of the table of parameters. Collective:
    all ranks iterate to the end.

    At any time one tensor is gathered, or several small ones. A parameter is cast to the type of the layers' products
    before it is sent. Adapters are added in FP32 and the sum is rounded once.

    Args:
        network: with an output head for tokens.
        shape: of the network, perhaps without prediction layers.

    Yields:
        Name and tensor on the device of this rank. What this rank holds whole and in this type is the network's own
        memory, not a copy.
    """
    dtype = getattr(torch, network.plan.config.training.mixed_precision_param)
    weights, pipeline = network.weights(), network.cluster.meshes.pipeline
    wanted = [(name, size, own or dtype) for name, size, own in _tensors(shape)]
    owners = _owners([name in weights for name, _, _ in wanted], pipeline)
    ready: dict[str, Tensor] = {}
    for number, ((name, size, kept), owner) in enumerate(zip(wanted, owners, strict=True)):
        if name in weights:
            if name not in ready:
                ready |= _small_ones(weights, wanted[number:], ready)
            found = ready.pop(name, None)
            whole = _merged(network, weights, name, kept) if found is None else found.to(network.cluster.device)
        else:
            whole = torch.empty(size, dtype=kept, device=network.cluster.device)
        if pipeline is not None:
            dist.broadcast(whole, group=pipeline, group_src=owner)
        yield name, whole


@lru_cache(maxsize=1)  # to build the modules takes longer than the rest of a small update
def _tensors(shape: ModelShape) -> list[tuple[str, torch.Size, torch.dtype | None]]:
    """Name and size of all parameters and buffers of a model, and the type of the buffers."""
    with torch.device("meta"):
        model = Transformer(shape)
    found = {name: (parameter.shape, None) for name, parameter in model.named_parameters()}
    found |= {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}
    return [(name, *found[name]) for name in named_rows(shape)]


def _owners(has: list[bool], pipeline: dist.ProcessGroup | None) -> list[int]:
    """For each name the first rank of the pipeline that holds it. Collective."""
    if pipeline is None:
        return [0] * len(has)
    held = torch.tensor(has, dtype=torch.uint8)
    of_ranks = [torch.empty_like(held) for _ in range(dist.get_world_size(pipeline))]
    dist.all_gather(of_ranks, held, group=pipeline)
    return torch.stack(of_ranks).max(0).indices.tolist()


def _merged(network: Network, weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A whole weight on this rank's device, its adapter added. Collective over the ranks that hold its parts."""
    owner, _, key = name.rpartition(".")
    prefix = f"{owner}." if key == "weight" else f"{owner}.{key}_"
    weight, device = _whole(weights, name, dtype), network.cluster.device
    if f"{prefix}lora_A" not in weights:
        return weight.to(device)
    a, b = (_gathered(weights[prefix + part], torch.float32).to(device) for part in ("lora_A", "lora_B"))
    magnitude = weights.get(f"{prefix}magnitude")
    magnitude = None if magnitude is None else _gathered(magnitude, torch.float32).to(device)
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    matrices = (x if x.ndim == 3 else x.unsqueeze(0) for x in (out, weight, a, b))
    for number, (sums, base, low, high) in enumerate(zip(*matrices, strict=True)):
        rows = magnitude if magnitude is None or magnitude.ndim == 1 else magnitude[number]
        base = base.to(device, torch.float32)
        sums.copy_(merged_rows(base, low, high, rows, network.plan.config.adapter.scale))
    return out


def _whole(weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A weight without its adapter. A quantised base is gathered so, and then converted."""
    scales = weights.get(scales_name(name))
    if scales is None:
        return _gathered(weights[name], dtype)
    whole = _gathered(scales, torch.int32).to(scales.dtype)  # gloo does not send int16
    return in_compute_type(_gathered(weights[name], torch.uint8), whole, dtype)


def _small_ones(
    weights: Mapping[str, Tensor], wanted: list[tuple[str, torch.Size, torch.dtype]], ready: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The first of these weights and others that are sharded as it is and not ready, whole, gathered in one call; none
    if it is large, has an adapter or scales, or is not sharded along its rows alone. Collective."""
    kind, bytes_left, names = _sharding(weights, wanted[0][0], wanted[0][2]), _SMALL_BYTES, []
    for name, size, dtype in wanted:
        if kind is None or (nbytes := size.numel() * dtype.itemsize) > bytes_left and not names:
            return {}
        if nbytes > bytes_left or name in ready or name not in weights:
            continue
        if _sharding(weights, name, dtype) == kind:
            bytes_left -= nbytes
            names.append(name)
    group, dtype = kind
    ranks, parts = dist.get_world_size(group), []
    for name in names:
        local = local_tensor(weights[name]).to(dtype)
        missing = -(-len(weights[name]) // ranks) - len(local)
        parts.append(torch.cat([local, local.new_zeros(missing, *local.shape[1:])]).flatten())
    own = torch.cat(parts)
    of_ranks = own.new_empty(ranks * len(own))
    gather_rows(of_ranks, own, group)
    pieces = zip(names, of_ranks.view(ranks, -1).split([len(part) for part in parts], 1), strict=True)
    return {name: piece.reshape(-1, *weights[name].shape[1:])[: len(weights[name])] for name, piece in pieces}


def _sharding(
    weights: Mapping[str, Tensor], name: str, dtype: torch.dtype
) -> tuple[dist.ProcessGroup, torch.dtype] | None:
    """The ranks that the rows of a weight are sharded over, and its type; None if `_small_ones` does not gather it."""
    tensor, owner = weights[name], name.rpartition(".")[0]
    if not isinstance(tensor, DTensor) or {scales_name(name), f"{owner}.lora_A", f"{name}_lora_A"} & weights.keys():
        return None
    mesh, split = tensor.device_mesh, []
    for axis, placement in enumerate(tensor.placements):
        if mesh.size(axis) > 1 and not isinstance(placement, Replicate):
            split.append((axis, placement))
    if len(split) != 1 or type(split[0][1]) is not Shard or split[0][1].dim != 0:
        return None
    return mesh.get_group(split[0][0]), dtype


def _gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of a DTensor in this type, or of a plain tensor itself."""
    local = local_tensor(tensor).to(dtype)
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    if all(mesh.size(axis) == 1 or isinstance(placement, Replicate) for axis, placement in enumerate(placements)):
        return local
    whole = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )  # fmt: skip
    return whole.full_tensor()
