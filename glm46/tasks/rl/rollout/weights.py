"""The weights of a network on any layout, whole and with adapters added: one tensor after another, and as folders that
inference servers load."""

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
from glm46.engine.training.hf_weights import export_options, write_weights
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
    found: dict[str, tuple[torch.Size, torch.dtype | None]] = {
        name: (parameter.shape, None) for name, parameter in model.named_parameters()
    }
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
    weight, device, adapter = _whole(weights, name, dtype), network.cluster.device, network.plan.config.adapter
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
    kind, bytes_left, names = _sharding(weights, wanted[0][0], wanted[0][2]), _SMALL_BYTES, list[str]()
    if kind is None:
        return {}
    for name, size, dtype in wanted:
        if (nbytes := size.numel() * dtype.itemsize) > bytes_left and not names:
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


def served_tensors(policy: Network, scheme: Fp8 | None) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and value of each tensor of the policy, adapters merged, in the types of `whole_weights`, or
    with projections in FP8 as an export of this scheme stores them. Collective: all ranks iterate to the end."""
    names, temperature = HFNames(policy.shape, repeat_shared=False), policy.function.router_temperature
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
    """Write the policy as a Hugging Face folder, adapters merged as `whole_weights` does, and projections in FP8 if
    there is a scheme. Collective.

    Servers take merged weights of any adapter, those of experts and DoRA too, which they refuse beside a base.
    """
    if scheme is not None:
        _write_quantised(policy, tokenizer, folder, dtype, scheme)
        return
    if policy.plan.config.adapter is None:
        write_weights(policy, tokenizer, folder, dtype)
        return
    adapter = folder.with_name(f"{folder.name}-adapter")
    if dist.get_rank() == 0 and adapter.exists():  # of a run that was killed; export begins with a collective
        shutil.rmtree(adapter)
    write_adapters(policy, tokenizer, adapter, dtype)
    merge_adapter(base_folder(policy, folder.parent), adapter, folder, target=dtype)


class _InOrder(Mapping[str, Tensor]):
    """Tensors of an iterator, each asked for once and in turn."""

    def __init__(self, names: Mapping[str, object], tensors: Iterator[tuple[str, Tensor]]):
        self._names, self._tensors = names, tensors

    def __getitem__(self, name: str) -> Tensor:
        found, tensor = next(self._tensors)
        assert found == name, (found, name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_quantised(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype, scheme: Fp8) -> None:
    """Write a folder in FP8, on rank 0 alone: a scale needs its whole block, which no rank may hold. Collective."""
    config, options = export_options(policy, tokenizer, dtype, scheme)
    tensors, shape = whole_weights(policy, policy.shape), policy.shape

    def write() -> None:
        try:
            if dist.get_rank() == 0:
                export_weights(
                    folder, shape, config, _InOrder(named_rows(shape), tensors), options=options, ranks=ALONE
                )
        except CheckpointError as error:
            raise UserError(*error.faults) from error
        finally:
            deque(tensors, maxlen=0)  # the other ranks gather them too

    run_on_all_ranks(write)


def write_adapters(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapters of the policy as a PEFT folder. Collective.

    A base in another format than Hugging Face's is written beside the versions, once.
    """
    base = base_folder(policy, folder.parent)
    if not run_on_all_ranks(base.exists):
        write_weights(policy, tokenizer, base, dtype)
    adapter, own = policy.plan.config.adapter, policy.parameters
    assert adapter is not None, "of a policy with adapters"
    origin = AdapterOrigin(base_dtype=adapter.base_dtype)
    export_adapter(folder, policy.plan.shape, own, scale=adapter.scale, base=str(base), origin=origin)


def base_folder(policy: Network, versions: Path) -> Path:
    """The Hugging Face folder of the base, in the folder of versions if the run began with another format."""
    start = policy.plan.config.checkpoint
    return Path(start.initial_load_path or "") if start.initial_load_in_hf else versions / "base"
