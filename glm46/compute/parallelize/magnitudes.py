"""DoRA's norms of the rows of ``W + scale * B A``, computed on the shards: the ranks divide the rows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

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


class _AdaptedWeight(NamedTuple):
    module: nn.Module
    prefix: str
    """Prefix of the names of its adapter and norms in the module."""
    row: Parameter
    """Row of the magnitude in `run/parameters.py`."""
    weight: Tensor
    scales: Tensor | None
    """None if the weight is not quantised."""
    a: Tensor
    b: Tensor
    magnitude: Tensor


class Magnitudes:
    """The magnitudes of a model, and the norms that they replace. Every method is collective over the stage."""

    def __init__(self, model: Transformer, adapter: AdapterConfig, meshes: Meshes | None):
        """``meshes``: None for a model on one device. The parameters are taken now: during a forward the attributes of
        modules are gathered weights."""
        self._scale = adapter.scale
        self._meshes = meshes
        self._adapted = [
            adapted for name, module in model.named_modules() for adapted in _adapted_weights(name, module)
        ]
        self._squares: list[Tensor] = []
        """`base_squares` of each weight."""

    @torch.no_grad()
    def start(self, new_adapters: bool = True) -> None:
        """Compute the norms after the base was loaded. New adapters get the norms of the loaded weights as magnitudes,
        with which the model equals its base."""
        self._squares = [base_squares(local_tensor(adapted.weight), _quantised(adapted)) for adapted in self._adapted]
        if new_adapters:
            for squares, adapted in zip(self._squares, self._adapted, strict=True):
                indices = torch.meshgrid(*global_indices(adapted.magnitude), indexing="ij")
                local_tensor(adapted.magnitude).copy_(self._norm(squares, adapted)[indices])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the norms again; call it after each change of the adapters."""
        for squares, adapted in zip(self._squares, self._adapted, strict=True):
            self._set(adapted, self._norm(squares, adapted))

    def _norm(self, squares_of_base: Tensor, adapted: _AdaptedWeight) -> Tensor:
        """FP32 [O] or [E, O], whole, on the device of this rank."""
        weight = adapted.weight
        *rows, columns = global_indices(weight)
        a = _whole(adapted.a)
        # This rank's columns. A column of a packed weight holds two columns of the matrix.
        a = a.unflatten(-1, (weight.shape[-1], -1))[..., columns.to(a.device), :].flatten(-2)
        if len(rows) == 2:  # experts, and rows of each
            a = a[rows[0].to(a.device)]
        b = local_tensor(adapted.b)
        squares = row_squares(squares_of_base, local_tensor(weight), a, b, self._scale, _quantised(adapted))
        whole = squares.new_zeros(weight.shape[:-1])
        whole[torch.meshgrid(*(index.to(whole.device) for index in rows), indexing="ij")] = squares
        if isinstance(weight, DTensor):
            for axis, placement in enumerate(weight.placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(whole, group=weight.device_mesh.get_group(axis))
        return whole.sqrt_()

    def _set(self, adapted: _AdaptedWeight, norm: Tensor) -> None:
        """Hand the module its part of the norms and of ``m / |V| - 1``."""
        excess = _whole(adapted.magnitude) / norm - 1.0
        row = adapted.row
        mesh = None
        if self._meshes is not None and (row.is_expert or row.tensor_dim is not None):
            mesh = self._meshes.expert if row.is_expert else self._meshes.tensor
        for key, value in (("norm", norm), ("excess", excess)):
            part = value if mesh is None else value.chunk(mesh.size())[mesh.get_local_rank()]
            setattr(adapted.module, f"{adapted.prefix}{key}", part)


def _adapted_weights(name: str, module: nn.Module) -> Iterator[_AdaptedWeight]:
    """Yield the weights of a module that have magnitudes: the weight of a linear layer, or both weights of experts."""
    for key, prefix in (("weight", ""), ("gate_up", "gate_up_"), ("down", "down_")):
        if hasattr(module, f"{prefix}magnitude"):
            yield _AdaptedWeight(
                module,
                prefix,
                row=find_parameter(f"{name}.{prefix}magnitude"),
                weight=getattr(module, key),
                scales=getattr(module, scales_name(key), None),
                a=getattr(module, f"{prefix}lora_A"),
                b=getattr(module, f"{prefix}lora_B"),
                magnitude=getattr(module, f"{prefix}magnitude"),
            )


def _quantised(adapted: _AdaptedWeight) -> tuple[Tensor, torch.dtype] | None:
    """See `row_squares`."""
    module: Any = adapted.module
    return None if adapted.scales is None else (local_tensor(adapted.scales), module.compute_type)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
