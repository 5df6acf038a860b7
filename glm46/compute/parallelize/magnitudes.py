"""DoRA's norms of the rows of ``W + scale * B A``, computed on the shards: the ranks divide the rows."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.mesh import Meshes
from glm46.compute.model.row_norms import base_squares, row_squares
from glm46.compute.model.transformer import Transformer
from glm46.config.adapter import AdapterConfig
from glm46.run.parameters import Parameter, find_parameter, scales_name


class Magnitudes:
    """The magnitudes of a model, and the norms that they replace. Every method is collective over the stage."""

    def __init__(self, model: Transformer, adapter: AdapterConfig, meshes: Meshes | None):
        """``meshes``: None for a model on one device. The parameters are taken now: during a forward the attributes of
        modules are gathered weights."""
        self._scale = adapter.scale
        self._meshes = meshes
        self._sets: list[tuple[nn.Module, str, Parameter, list[Any]]] = [
            (module, prefix, find_parameter(f"{name}.{prefix}magnitude"), [getattr(module, key, None) for key in keys])
            for name, module in model.named_modules()
            for prefix, keys in _keys(module)
        ]
        self._base: list[Tensor] = []

    @torch.no_grad()
    def start(self, new_adapters: bool = True) -> None:
        """Compute the norms after the base was loaded. New adapters get the norms of the loaded weights as magnitudes,
        with which the model equals its base."""
        self._base = [
            base_squares(local_tensor(weight), _quantised(module, scales))
            for module, *_, (weight, scales, *_) in self._sets
        ]
        if new_adapters:
            for base, (module, _, _, (*factors, magnitude)) in zip(self._base, self._sets, strict=True):
                indices = torch.meshgrid(*global_indices(magnitude), indexing="ij")
                local_tensor(magnitude).copy_(self._norm(module, base, *factors)[indices])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the norms again; call it after each change of the adapters."""
        for base, (module, prefix, row, (*factors, magnitude)) in zip(self._base, self._sets, strict=True):
            self._set(module, prefix, row, magnitude, self._norm(module, base, *factors))

    def _norm(
        self, module: nn.Module, base: Tensor, weight: Tensor, scales: Tensor | None, a: Tensor, b: Tensor
    ) -> Tensor:
        """FP32 [O] or [E, O], whole, on the device of this rank."""
        *rows, columns = global_indices(weight)
        a = _whole(a)
        a = a.unflatten(-1, (weight.shape[-1], -1))[..., columns.to(a.device), :].flatten(-2)  # of packed columns
        if len(rows) == 2:
            a = a[rows[0].to(a.device)]
        quantised = _quantised(module, scales)
        squares = row_squares(base, local_tensor(weight), a, local_tensor(b), self._scale, quantised)
        whole = squares.new_zeros(weight.shape[:-1])
        whole[torch.meshgrid(*(index.to(whole.device) for index in rows), indexing="ij")] = squares
        if isinstance(weight, DTensor):
            for axis, placement in enumerate(weight.placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(whole, group=weight.device_mesh.get_group(axis))
        return whole.sqrt_()

    def _set(self, module: nn.Module, prefix: str, row: Parameter, magnitude: Tensor, norm: Tensor) -> None:
        """Hand the module its part of the norms and of ``m / |V| - 1``."""
        excess = _whole(magnitude) / norm - 1.0
        mesh = None
        if self._meshes is not None and (row.is_expert or row.tensor_dim is not None):
            mesh = self._meshes.expert if row.is_expert else self._meshes.tensor
        for key, value in (("norm", norm), ("excess", excess)):
            part = value if mesh is None else value.chunk(mesh.size())[mesh.get_local_rank()]
            setattr(module, f"{prefix}{key}", part)


def _keys(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The prefix of each adapted weight of a module, and the keys of weight, its scales, A, B and magnitude."""
    if hasattr(module, "magnitude"):
        yield "", ("weight", scales_name("weight"), "lora_A", "lora_B", "magnitude")
    for name in ("gate_up", "down"):
        if hasattr(module, f"{name}_magnitude"):
            yield f"{name}_", (name, scales_name(name), *(f"{name}_{key}" for key in ("lora_A", "lora_B", "magnitude")))


def _quantised(module: Any, scales: Tensor | None) -> tuple[Tensor, torch.dtype] | None:
    """See `row_squares`."""
    return None if scales is None else (local_tensor(scales), module.compute_type)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
