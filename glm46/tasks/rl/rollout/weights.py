"""Whole weights of a network on any layout, with adapters merged: as a stream of tensors, and as folders for inference
servers."""

import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46.compat import gather_rows
from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.ranks import ALONE, CheckpointError
from glm46.compute.model.adapters import merged_rows
from glm46.compute.model.quantised_weights import in_compute_type
from glm46.compute.model.router import folded
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.engine.training.network import Network
from glm46.run.parameters import named_rows, scales_name
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.adapter_origin import AdapterOrigin
from glm46.storage.huggingface.export_weights import export_weights
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter
from glm46.storage.huggingface.schemes import quantised_names
from glm46.tasks.weights.exports import export_options, write_weights
from glm46.tasks.weights.write_model import LazyTensors

_SMALL_BYTES = 4 * 2**20
"""Maximum bytes of whole tensors that are gathered in one call. A call takes up to 2 ms on a CPU, however small."""


@torch.no_grad()
def whole_weights(network: Network, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of the whole model by name, in the order of the table of parameters. Collective:
    all ranks iterate to the end.

    Tensors are gathered one at a time, small ones several at a time. Parameters are cast to the compute dtype of the
    layers before they are sent. Adapters are added in FP32 and the sum is rounded once.

    Args:
        network: a network with an output head for tokens.
        shape: shape of the network, perhaps without prediction layers.

    Yields:
        Name and tensor on the device of this rank. A tensor that this rank holds whole and in the right dtype is the
        network's own memory, not a copy.
    """
    dtype = getattr(torch, network.plan.config.training.mixed_precision_param)
    weights = network.weights()
    pipeline = network.cluster.meshes.pipeline
    entries = [(name, size, buffer_dtype or dtype) for name, size, buffer_dtype in _tensors(shape)]
    owners = _owners([name in weights for name, _, _ in entries], pipeline)
    ready: dict[str, Tensor] = {}
    for number, ((name, size, tensor_dtype), owner) in enumerate(zip(entries, owners, strict=True)):
        if name in weights:
            if name not in ready:
                ready |= _small_ones(weights, entries[number:], ready)
            small = ready.pop(name, None)
            whole = _merged(network, weights, name, tensor_dtype) if small is None else small.to(network.cluster.device)
        else:
            whole = torch.empty(size, dtype=tensor_dtype, device=network.cluster.device)
        if pipeline is not None:
            dist.broadcast(whole, group=pipeline, group_src=owner)
        yield name, whole


@lru_cache(maxsize=1)  # building the modules takes longer than the rest of a small update
def _tensors(shape: ModelShape) -> list[tuple[str, torch.Size, torch.dtype | None]]:
    """Return name and size of all parameters and buffers of a model, and the dtype of buffers."""
    with torch.device("meta"):
        model = Transformer(shape)
    sizes: dict[str, tuple[torch.Size, torch.dtype | None]] = {
        name: (parameter.shape, None) for name, parameter in model.named_parameters()
    }
    sizes |= {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}
    return [(name, *sizes[name]) for name in named_rows(shape)]


def _owners(is_held: list[bool], pipeline: dist.ProcessGroup | None) -> list[int]:
    """Return for each name the first rank of the pipeline that holds it. Collective."""
    if pipeline is None:
        return [0] * len(is_held)
    held = torch.tensor(is_held, dtype=torch.uint8)
    held_by_rank = [torch.empty_like(held) for _ in range(dist.get_world_size(pipeline))]
    dist.all_gather(held_by_rank, held, group=pipeline)
    return torch.stack(held_by_rank).max(0).indices.tolist()


def _merged(network: Network, weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Return a whole weight with its adapter, on this rank's device. Collective over the ranks that hold its parts."""
    owner, _, key = name.rpartition(".")
    prefix = f"{owner}." if key == "weight" else f"{owner}.{key}_"
    weight = _whole(weights, name, dtype)
    device = network.cluster.device
    adapter = network.plan.config.adapter
    if adapter is None or f"{prefix}lora_A" not in weights:
        return weight.to(device)
    a, b = (_gathered(weights[prefix + part], torch.float32).to(device) for part in ("lora_A", "lora_B"))
    magnitude = weights.get(f"{prefix}magnitude")
    magnitude = None if magnitude is None else _gathered(magnitude, torch.float32).to(device)
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    matrices = (x if x.ndim == 3 else x.unsqueeze(0) for x in (out, weight, a, b))
    for number, (sums, base, low, high) in enumerate(zip(*matrices, strict=True)):
        rows = magnitude if magnitude is None or magnitude.ndim == 1 else magnitude[number]
        base = base.to(device, torch.float32)
        sums.copy_(merged_rows(base, low, high, rows, adapter.scale))
    return out


def _whole(weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Return a whole weight without its adapter. A quantised base is gathered first, then converted."""
    scales = weights.get(scales_name(name))
    if scales is None:
        return _gathered(weights[name], dtype)
    whole = _gathered(scales, torch.int32).to(scales.dtype)  # gloo does not send int16
    return in_compute_type(_gathered(weights[name], torch.uint8), whole, dtype)


def _small_ones(
    weights: Mapping[str, Tensor], entries: list[tuple[str, torch.Size, torch.dtype]], ready: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gather the first of these weights in one call with others that are sharded equally and not ready yet. Empty if
    the first one is large, has an adapter or scales, or is sharded otherwise than along its rows. Collective."""
    kind = _sharding(weights, entries[0][0], entries[0][2])
    bytes_left = _SMALL_BYTES
    names = list[str]()
    if kind is None:
        return {}
    for name, size, dtype in entries:
        if (nbytes := size.numel() * dtype.itemsize) > bytes_left and not names:
            return {}
        if nbytes > bytes_left or name in ready or name not in weights:
            continue
        if _sharding(weights, name, dtype) == kind:
            bytes_left -= nbytes
            names.append(name)
    group, dtype = kind
    ranks = dist.get_world_size(group)
    parts = []
    for name in names:
        local = local_tensor(weights[name]).to(dtype)
        missing = -(-len(weights[name]) // ranks) - len(local)
        parts.append(torch.cat([local, local.new_zeros(missing, *local.shape[1:])]).flatten())
    flat = torch.cat(parts)
    gathered = flat.new_empty(ranks * len(flat))
    gather_rows(gathered, flat, group)
    pieces = zip(names, gathered.view(ranks, -1).split([len(part) for part in parts], 1), strict=True)
    return {name: piece.reshape(-1, *weights[name].shape[1:])[: len(weights[name])] for name, piece in pieces}


def _sharding(
    weights: Mapping[str, Tensor], name: str, dtype: torch.dtype
) -> tuple[dist.ProcessGroup, torch.dtype] | None:
    """Return the ranks that shard the rows of a weight, and its dtype; None if `_small_ones` does not gather it."""
    tensor = weights[name]
    owner = name.rpartition(".")[0]
    if not isinstance(tensor, DTensor) or {scales_name(name), f"{owner}.lora_A", f"{name}_lora_A"} & weights.keys():
        return None
    mesh = tensor.device_mesh
    split = []
    for axis, placement in enumerate(tensor.placements):
        if mesh.size(axis) > 1 and not isinstance(placement, Replicate):
            split.append((axis, placement))
    if len(split) != 1 or type(split[0][1]) is not Shard or split[0][1].dim != 0:
        return None
    return mesh.get_group(split[0][0]), dtype


def _gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a whole DTensor, or a plain tensor, in this dtype."""
    local = local_tensor(tensor).to(dtype)
    if not isinstance(tensor, DTensor):
        return local
    mesh = tensor.device_mesh
    placements = tensor.placements
    if all(mesh.size(axis) == 1 or isinstance(placement, Replicate) for axis, placement in enumerate(placements)):
        return local
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return whole.full_tensor()


def served_tensors(policy: Network, scheme: Fp8 | None) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face name and value of each tensor of the policy, with adapters merged, in the dtypes of
    `whole_weights`, or with projections in FP8 as an export with this scheme stores them. Collective: all ranks iterate
    to the end."""
    names = HFNames(policy.shape, repeat_shared=False)
    temperature = policy.function.router_temperature
    quantised = quantised_names(names, scheme)
    for name, whole in whole_weights(policy, policy.shape):
        for part in names.entries[name].parts:
            value = folded(name, whole[part.index()], temperature).to(whole.dtype)
            stored = {"": value}
            if scheme is not None and part.hf_name in quantised:
                stored = scheme.quantise(value.float())
            yield from ((part.hf_name + suffix, tensor) for suffix, tensor in stored.items())


def write_policy(
    policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype, scheme: Fp8 | None = None
) -> None:
    """Write the policy as a Hugging Face folder, with adapters merged like in `whole_weights`, and projections in FP8
    if there is a scheme. Collective.

    Merged weights work for any adapter. Servers refuse adapters of experts and DoRA that are separate from the base.
    """
    if scheme is not None:
        _write_quantised(policy, tokenizer, folder, dtype, scheme)
        return
    if policy.plan.config.adapter is None:
        write_weights(policy, tokenizer, folder, dtype)
        return
    adapter = folder.with_name(f"{folder.name}-adapter")
    if (
        dist.get_rank() == 0 and adapter.exists()
    ):  # from a killed run; remove it before export, which begins with a collective
        shutil.rmtree(adapter)
    write_adapters(policy, tokenizer, adapter, dtype)
    merge_adapter(base_folder(policy, folder.parent), adapter, folder, target=dtype)


class _InOrder(LazyTensors):
    """Tensors of an iterator, each read once and in order."""

    def __init__(self, names: Mapping[str, object], tensors: Iterator[tuple[str, Tensor]]):
        self.names = names
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        next_name, tensor = next(self._tensors)
        assert next_name == name, (next_name, name)
        return tensor


def _write_quantised(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype, scheme: Fp8) -> None:
    """Write a folder in FP8 on rank 0, because a scale needs its whole block, which no rank may hold. Collective."""
    config, options = export_options(policy, tokenizer, dtype, scheme)
    tensors = whole_weights(policy, policy.shape)
    shape = policy.shape

    def write() -> None:
        try:
            if dist.get_rank() == 0:
                export_weights(
                    folder, shape, config, _InOrder(named_rows(shape), tensors), options=options, ranks=ALONE
                )
        except CheckpointError as error:
            raise UserError(*error.faults) from error
        finally:
            deque(tensors, maxlen=0)  # other ranks, and rank 0 after an error, must take part in gathering

    run_on_all_ranks(write)


def write_adapters(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapters of the policy as a PEFT folder. Collective.

    A base in another format than Hugging Face's is written once, next to the versions.
    """
    base = base_folder(policy, folder.parent)
    if not run_on_all_ranks(base.exists):
        write_weights(policy, tokenizer, base, dtype)
    adapter = policy.plan.config.adapter
    parameters = policy.parameters
    assert adapter is not None, "of a policy with adapters"
    origin = AdapterOrigin(base_dtype=adapter.base_dtype)
    export_adapter(folder, policy.plan.shape, parameters, scale=adapter.scale, base=str(base), origin=origin)


def base_folder(policy: Network, versions: Path) -> Path:
    """Return the Hugging Face folder of the base, inside ``versions`` if the run began with another format."""
    start = policy.plan.config.checkpoint
    return Path(start.initial_load_path or "") if start.initial_load_in_hf else versions / "base"
