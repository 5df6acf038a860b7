"""Low-rank adapters: products with ``W + scale * B A`` in place of those with a frozen weight W."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46 import compat
from glm46.config.adapter import Adapter
from glm46.model.experts import Experts, grouped_mm, grouped_outer
from glm46.model.layers import Linear, local_weight
from glm46.model.transformer import Transformer
from glm46.planner.parameters import adapter_layer


def add_adapters(model: Transformer, adapter: Adapter, dtype: torch.dtype = torch.float32) -> None:
    """Freeze a model, or a part of it, and add the adapters of [adapter], which are trained; in place.

    The adapters are on the device of the model, without values: `fill_parameter` has the initial ones.
    """
    model.requires_grad_(False)
    for index, layer in model.layers.items():
        for row in adapter_layer(model.shape, adapter, int(index)):
            owner, _, key = row.name.rpartition(".")
            module = layer.get_submodule(owner)
            device = next(module.parameters()).device
            module.register_parameter(
                key, nn.Parameter(torch.empty(row.shape(model.shape), dtype=dtype, device=device))
            )
            if isinstance(module, Experts):
                module.project = partial(_project, module, adapter.scale)
            elif key == "lora_A":
                module.product = partial(_linear_product, module, adapter.scale)


def _linear_product(module: Linear, scale: float, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `Linear.product`; of a module with adapters."""
    a, b = (local_weight(part).to(x.dtype) for part in (module.lora_A, module.lora_B))
    low = F.linear(x, a) * scale
    # One kernel adds: no second result of this size.
    rows = torch.addmm(F.linear(x, weight, bias).flatten(0, -2), low.flatten(0, -2), b.t())
    return rows.view(*x.shape[:-1], -1)


def _project(module: Experts, scale: float, name: str, x_NI: Tensor, offsets: Tensor) -> Tensor:
    """See `Experts.project`; of experts with adapters."""
    weight = local_weight(getattr(module, name))
    a, b = (local_weight(getattr(module, f"{name}_{key}")).to(x_NI.dtype) for key in ("lora_A", "lora_B"))
    return adapted_grouped_mm(x_NI, weight, a, b, offsets, scale)[0]


@torch.library.custom_op("glm46::adapted_grouped_mm", mutates_args=())
def adapted_grouped_mm(
    x_NI: Tensor, weight_EOI: Tensor, a_ERI: Tensor, b_EOR: Tensor, offsets: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Multiply each group of rows by the transpose of ``weight + scale * b @ a`` of its expert.

    One operator, because selective checkpointing keeps the results of grouped products: this way it keeps the sum, and
    not both terms of it. The weight has no gradient.

    Args:
        x_NI: [N, I], sorted by expert; results of rows past the last offset are undefined.
        offsets: int32 [E], running sum of the group sizes.

    Returns:
        [N, O], and for backward ``scale * x @ a.T``, [N, R]; dtype of `x_NI`.
    """
    low_NR = compat.grouped_mm(x_NI, a_ERI.transpose(1, 2), offsets).mul_(scale)
    y_NO = compat.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offsets)
    return y_NO.add_(compat.grouped_mm(low_NR, b_EOR.transpose(1, 2), offsets)), low_NR


@adapted_grouped_mm.register_fake
def _(x_NI: Tensor, weight_EOI: Tensor, a_ERI: Tensor, b_EOR: Tensor, offsets: Tensor, scale: float):
    return x_NI.new_empty(len(x_NI), weight_EOI.shape[1]), x_NI.new_empty(len(x_NI), a_ERI.shape[1])


def _save_for_backward(ctx, inputs, output):
    x_NI, weight_EOI, a_ERI, b_EOR, offsets, ctx.scale = inputs
    ctx.save_for_backward(x_NI, weight_EOI, a_ERI, b_EOR, offsets, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_NO: Tensor, _):
    x_NI, weight_EOI, a_ERI, b_EOR, offsets, low_NR = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()  # grouped_mm rejects the strides of an expanded gradient
    grad_low_NR = grouped_mm(grad_NO, b_EOR, offsets) * ctx.scale
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_mm(grad_NO, weight_EOI, offsets) + grouped_mm(grad_low_NR, a_ERI, offsets)
    return grad_x, None, grouped_outer(grad_low_NR, x_NI, offsets), grouped_outer(grad_NO, low_NR, offsets), None, None


adapted_grouped_mm.register_autograd(_backward, setup_context=_save_for_backward)
