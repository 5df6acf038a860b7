"""FP8 products: operands are rounded to 8-bit floating point with one scale per tensor, row, column or part of these.

Each product of a converted layer, forward and backward, rounds what it multiplies; results, weights, gradients and
optimizer states keep their types. A rank scales what it holds: under tensor parallelism its part of a weight, under
data parallelism its own tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from glm46 import compat
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.moe import MoE
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.float8_experts import E4M3, experts_product, scale_to_fp8
from glm46.config.float8 import Float8Config
from glm46.config.float8_layers import EXPERTS_MULTIPLES, linear_layers
from glm46.run.plan import Plan

if TYPE_CHECKING:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_training_tensor import LinearMMConfig

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""See `Linear.product`."""


def apply(model: Transformer, plan: Plan) -> None:
    """Replace the products that [float8] names; in place."""
    float8 = plan.config.float8
    layers = linear_layers(plan.shape, float8, plan.layout.tp)
    converted = {layer.name for layer in layers if layer.excluded_by is None}
    recipe = _read_recipe(float8)
    product = _linear_product(recipe)
    for name, module in model.named_modules():
        if name in converted:
            module.product = product
            if float8.enable_fsdp_float8_all_gather:
                module.weight = nn.Parameter(_gathered_in_fp8(module.weight, recipe))
        elif isinstance(module, MoE) and float8.experts_recipe_name is not None:
            experts: Any = module.experts
            experts.product = experts_product(float8)
            module.dispatcher.multiple = EXPERTS_MULTIPLES[float8.experts_recipe_name]


class _Recipe(NamedTuple):
    """A recipe of torchao, with the parts of torchao that follow it."""

    config: "Float8LinearConfig"
    products: "LinearMMConfig"
    multiply: type[torch.autograd.Function]
    """Takes an input, a transposed weight, `products` and `config`."""
    gathered_weight: Callable[..., Tensor]
    """Makes a weight that FSDP2 gathers in FP8, from a weight, `products` and a dtype."""


def _read_recipe(float8: Float8Config) -> _Recipe:
    # Imported here: only FP8 runs need it.
    compat.quiet_libraries()
    from torchao.float8 import Float8LinearConfig, float8_linear, fsdp_utils

    config = replace(Float8LinearConfig.from_recipe_name(float8.recipe_name), emulate=float8.emulate)
    layer = float8_linear.Float8Linear(1, 1, bias=False, config=config, device="meta")
    return _Recipe(
        layer.config,
        layer.linear_mm_config,
        float8_linear.matmul_with_hp_or_float8_args,
        fsdp_utils.WeightWithDynamicFloat8CastTensor,
    )


def _gathered_in_fp8(weight: Tensor, recipe: _Recipe) -> Tensor:
    """Return a weight that FSDP2 gathers in FP8, with one scale for all shards. `local_tensor` gives the shard as it
    is."""
    if not isinstance(weight, DTensor):
        return recipe.gathered_weight(weight, recipe.products, E4M3)
    local = recipe.gathered_weight(weight.to_local(), recipe.products, E4M3)
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)


class GatheredScales:
    """The scales of the weights that FSDP2 gathers in FP8. torchao computes one in each gather, with a collective;
    between two steps of the optimizer they stay the same, and one collective is enough for all."""

    def __init__(self, parameters: Iterable[Tensor], dense: DeviceMesh):
        """``dense``: see `Meshes.dense`. The parameters are taken now: during a forward they are gathered weights."""
        shards = map(compat.shard_gathered_in_fp8, parameters)
        self._weights = [shard for shard in shards if shard is not None]
        self._group = dense.get_group("shard")

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Let gathers in this context use the scales of the current weights, which must not change in it.
        Collective."""
        if not self._weights:
            yield
            return
        amax = torch.stack([torch.linalg.vector_norm(local_tensor(weight), math.inf) for weight in self._weights])
        dist.all_reduce(amax, dist.ReduceOp.MAX, self._group)
        self._set(scale_to_fp8(amax).unbind())
        try:
            yield
        finally:
            self._set([None] * len(self._weights))

    def _set(self, scales: Sequence[Tensor | None]) -> None:
        for weight, scale in zip(self._weights, scales, strict=True):
            compat.give_fp8_scale(weight, scale)


def linear_product(float8: Float8Config) -> LinearProduct:
    """Return a `Linear.product` by a recipe of torchao, whose autograd function takes plain tensors."""
    return _linear_product(_read_recipe(float8))


def _linear_product(recipe: _Recipe) -> LinearProduct:
    multiply = recipe.multiply
    products = recipe.products
    config = recipe.config

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = multiply.apply(x, weight.t(), products, config)
        return y if bias is None else y + bias

    return product
