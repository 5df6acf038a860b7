"""FP8 products compute what their recipes say, held to a model of the recipes in FP64."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from glm46 import compat
from glm46.compute.model.experts import Experts
from glm46.compute.model.layers import Linear
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.float8 import linear_product
from glm46.compute.parallelize.float8_experts import (
    E4M3,
    Emulated,
    _rounded,
    _rounded_in_groups,
    experts_product,
)
from glm46.config.float8 import Float8Config
from glm46.config.float8_layers import EXPERTS_MULTIPLES, MX_BLOCK, linear_layers
from glm46.config.model import ModelConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.run.parameters import dimensions, named_rows

TYPES = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
"""Bits of the mantissa, smallest exponent of a normal number, largest number."""


def rounded(
    x: Tensor, dim: int | None, kind: str = "e4m3", power_of_2: bool = True, block: int | None = None
) -> Tensor:
    """FP64: `x` in 8 bits with a scale for each slice along `dim`, or each ``block`` elements of it, the last ones
    possibly fewer, or one for all; the format from its definition."""
    if block is not None:
        return torch.cat([rounded(part, dim, kind) for part in x.split(block, dim)], dim)
    mantissa, least, largest = TYPES[kind]
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / amax.clamp(min=1e-12)
    scale = 2.0 ** scale.log2().floor() if power_of_2 else scale
    scaled = (x * scale).clamp(-largest, largest)
    unit = 2.0 ** (scaled.abs().clamp(min=2.0**least).log2().floor() - mantissa)
    return (scaled / unit).round() * unit / scale


def recipe_in_fp64(recipe: str, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of x and gradient of the weight, from operands in FP64."""
    if recipe == "mxfp8":
        y = rounded(x, 1, block=32) @ rounded(weight, 1, block=32).T
        grad_x = rounded(grad, 1, block=32) @ rounded(weight, 0, block=32)
        return y, grad_x, rounded(grad, 0, block=32).T @ rounded(x, 0, block=32)
    if recipe == "tensorwise":
        x8, weight8 = rounded(x, None, power_of_2=False), rounded(weight, None, power_of_2=False)
        grad8 = rounded(grad, None, "e5m2", power_of_2=False)
        return x8 @ weight8.T, grad8 @ weight8, grad8.T @ x8
    y = rounded(x, 1) @ rounded(weight, 1).T
    if recipe == "rowwise":
        return y, rounded(grad, 1) @ rounded(weight, 0), rounded(grad, 0).T @ rounded(x, 0)
    return y, rounded(grad, 1) @ rounded(weight, None), grad.T @ x


def operands(*sizes: tuple[int, ...]) -> list[Tensor]:
    """FP32, with rows and columns of very unequal size, so that recipes differ."""
    generator = torch.Generator().manual_seed(0)

    def one(size: tuple[int, ...]) -> Tensor:
        spread = [torch.randn(*(n if d == axis else 1 for d in range(len(size))), generator=generator)
                  for axis, n in enumerate(size)]  # fmt: skip
        return torch.randn(size, generator=generator) * math.prod(spread[1:], start=spread[0]).exp()

    return [one(size) for size in sizes]


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_linear_product_follows_its_recipe(recipe, dtype):
    x, weight, grad, bias = (t.to(dtype) for t in operands((64, 128), (96, 128), (64, 96), (96,)))
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    y = linear_product(Float8Config(recipe_name=recipe, emulate=True))(x.view(4, 16, 128), weight, bias)
    assert y.shape == (4, 16, 96) and y.dtype == dtype
    y.backward(grad.view_as(y))
    exact = [t.detach().double() for t in (x, weight, grad)]
    wanted = recipe_in_fp64(recipe, *exact)
    # FP32: 128 products rounded to 2**-24 each. BF16: operands and result rounded to 2**-9, and the bias' own rounding.
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert distance(y.view(64, 96), wanted[0] + bias.detach().double()) < bound
    assert distance(x.grad, wanted[1]) < bound
    assert distance(weight.grad, wanted[2]) < bound
    assert distance(bias.grad, exact[2].sum(0)) < bound
    # The recipes are told apart: each is far from the exact product, but for the weight gradient of the last.
    plain = exact[2].T @ exact[0]
    assert (distance(wanted[2], plain) > 5e-3) == (recipe != "rowwise_with_gw_hp")
    others = [recipe_in_fp64(other, *exact) for other in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
    assert sum(all(distance(a, b) < 1e-3 for a, b in zip(other, wanted, strict=True)) for other in others) == 1


SIZES = [32, 0, 64, 32, 96]
"""Multiples of 32, as the dispatcher makes them."""
OFFSETS = torch.tensor(SIZES).cumsum(0).to(torch.int32)
ROWS = sum(SIZES) + 32
"""The last rows are in no group, as behind the padding of the dispatcher."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_grouped_product_follows_its_recipe(recipe, dtype):
    x, weight, grad = (t.to(dtype) for t in operands((ROWS, 96), (5, 64, 96), (ROWS, 64)))
    # Powers of two as scales differ only where an element is too small for one scale per row.
    blocks = 2.0 ** torch.tensor([-12.0, 0.0, 12.0]).repeat_interleave(MX_BLOCK).to(dtype)
    x, weight = (x * blocks).requires_grad_(), (weight / blocks).requires_grad_()
    y = experts_product(Float8Config(recipe_name="rowwise", experts_recipe_name=recipe, emulate=True))(
        x, weight, OFFSETS
    )
    assert y.dtype == dtype
    end = int(OFFSETS[-1])
    y[:end].backward(grad[:end])
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    for expert, (start, stop) in enumerate(zip([0, *OFFSETS[:-1].tolist()], OFFSETS.tolist(), strict=True)):
        rows = slice(start, stop)
        exact = [t.detach().double() for t in (x[rows], weight[expert], grad[rows])]
        if start == stop:
            assert not weight.grad[expert].any()
            continue
        wanted = recipe_in_fp64(recipe, *exact)
        found = y[rows], x.grad[rows], weight.grad[expert]
        assert all(distance(a, b) < bound for a, b in zip(found, wanted, strict=True)), expert
        assert (distance(wanted[0], exact[0] @ exact[1].T) > 0.1) == (recipe == "rowwise")


def test_groups_are_rounded_as_torchao_rounds_them():
    from torchao.prototype.moe_training.utils import torch_to_float8_per_group_colwise

    (x,) = operands((int(OFFSETS[-1]), 48))
    filled = torch.tensor([size for size in SIZES if size]).cumsum(0)
    codes, scales = torch_to_float8_per_group_colwise(x, filled, E4M3, round_scales_to_power_of_2=True)
    group = torch.searchsorted(filled, torch.arange(len(x)), right=True)
    assert torch.equal(_rounded_in_groups(x, OFFSETS, None), codes.float() / scales.view(-1, 48)[group])


def test_blocks_are_rounded_as_torchao_rounds_them():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    (x,) = operands((40, 96))
    x[3, :MX_BLOCK] = 0.0
    scales, codes = to_mx(x, E4M3, MX_BLOCK, ScaleCalculationMode.RCEIL)
    wanted = (codes.float().unflatten(-1, (-1, MX_BLOCK)) * scales.float().unsqueeze(-1)).flatten(-2)
    assert torch.equal(_rounded(x, -1, MX_BLOCK), wanted)


def test_padding_changes_no_scale():
    """A MoE layer in FP8 gives the same with its groups padded, as kernels want them, and without, which the emulation
    of rowwise takes too. A changed scale would round anew: 1e-2."""
    shape = PRESETS["debug"].model_copy(update={"hidden_size": 96, "moe_intermediate_size": 64})
    x, grad = operands((2, 37, 96), (2, 37, 96))

    def results(multiple: int) -> list[Tensor]:
        layer = MoE(shape)
        torch.manual_seed(0)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        layer.experts.product = experts_product(
            Float8Config(recipe_name="rowwise", experts_recipe_name="rowwise", emulate=True)
        )
        layer.dispatcher.multiple = multiple
        inputs = x.clone().requires_grad_()
        y, _ = layer(inputs, None, RoutingOptions())
        y.backward(grad)
        return [y.detach(), inputs.grad, *(parameter.grad for parameter in layer.parameters())]

    for padded, plain in zip(results(EXPERTS_MULTIPLES["rowwise"]), results(1), strict=True):
        assert distance(padded, plain.double()) < 1e-6  # products of other sizes sum in another order


def test_gpu_kernels_of_the_experts_take_these_arguments():
    """They run only on a GPU; here their signature is read."""
    import inspect

    from torchao.prototype.moe_training import mxfp8_grouped_mm

    parameters = inspect.signature(mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm).parameters
    assert list(parameters)[:3] == ["A", "B_t", "offs"]
    assert {"out_dtype", "pad_token_groups_for_grouped_mm"} <= set(parameters)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_no_rows_reach_no_fp8_kernel_and_empty_experts_get_no_gradient(is_compiled, monkeypatch):
    """The kernels raise in backward of no rows, and on some GPUs of compute capability 10.x leave the gradients of
    empty experts undefined; the stand-in does both."""

    class Kernels(Emulated):
        def outer(self, grad, x, offsets):
            assert len(x) > 0, "Invalid strides/sizes"
            return torch.where(compat.empty_groups(offsets), torch.nan, super().outer(grad, x, offsets))

    monkeypatch.setattr(compat, "RowwiseKernels", Kernels)
    monkeypatch.setattr(compat, "gradients_of_empty_groups_are_undefined", lambda device: True)
    product = experts_product(Float8Config(recipe_name="rowwise", experts_recipe_name="rowwise"))
    if is_compiled:
        product = torch.compile(product, backend="aot_eager", dynamic=True)
    for sizes in ([16, 0, 32], [0, 0, 0], [0, 16, 0]):
        x = torch.randn(sum(sizes), 32, requires_grad=True)
        weight = torch.randn(3, 16, 32, requires_grad=True)
        product(x, weight, torch.tensor(sizes).cumsum(0).to(torch.int32)).backward(torch.randn(sum(sizes), 16))
        assert x.grad.shape == x.shape and weight.grad.isfinite().all()
        assert [bool(of_expert.any()) for of_expert in weight.grad] == [size > 0 for size in sizes]


@pytest.mark.slow
def test_gpu_kernels_of_the_experts_follow_the_recipe_in_tritons_interpreter():
    """With the layouts and the padding that they get on a GPU. Triton comes with the CUDA builds of torch."""
    pytest.importorskip("triton", minversion="3.7")  # before, its interpreter does not work with numpy 2.4
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parents[4]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, here.with_name("interpreted_float8.py")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert len(rows) == 4 and all(error < 2**-8 for row in rows for error in row), rows  # results rounded to BF16


def test_the_list_of_linear_layers_is_the_model():
    shape = resolve_shape(ModelConfig(flavor="debug", shape={"num_nextn_predict_layers": 2}))
    with torch.device("meta"):
        model = Transformer(shape)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    layers = {layer.name: (layer.outputs, layer.inputs) for layer in linear_layers(shape, Float8Config())}
    assert layers == {name: (module.out_features, module.in_features) for name, module in modules.items()}
    assert any(isinstance(module, Experts) for module in model.modules())


def test_the_list_of_linear_layers_is_split_as_the_parameters():
    shape = resolve_shape(ModelConfig(flavor="debug"))
    sizes, rows = dimensions(shape), named_rows(shape)
    for layer in linear_layers(shape, Float8Config(), tp=2):
        row = rows[f"{layer.name}.weight"]
        wanted = [sizes[dim] // (2 if axis == row.tensor_dim else 1) for axis, dim in enumerate(row.dims.split())]
        assert [layer.outputs, layer.inputs] == wanted


def test_few_forms_of_torchaos_kernels_are_tuned(monkeypatch):
    """Of all block sizes, warps and stages, and not again for another number of rows."""
    triton = pytest.importorskip("triton")
    asked = []
    monkeypatch.setattr(compat, "has_triton", lambda: True)
    monkeypatch.setattr(triton, "autotune", lambda configs, key, **_: asked.append((configs, key)) or (lambda x: x))
    forms = [
        {"BLOCK_SIZE": block, "ITER": rows, "warps": warps, "stages": stages}
        for block in (32, 64, 128) for rows in (64, 128, 256) for warps in (4, 8) for stages in (2, 3)
    ]  # fmt: skip
    kernel = SimpleNamespace(arg_names=["offsets_ptr", "K", "N1", "N_GROUPS"])
    with compat._tuned_once():
        triton.autotune(configs=forms, key=["K", "N_GROUPS"])(kernel)
        triton.autotune(configs=forms[:1], key=["K", "num_elements"])(SimpleNamespace(arg_names=["K"]))
    (few, key), (one, of_one) = asked
    assert len(few) == 4 and key == ["N_GROUPS", "N1"] and one == forms[:1] and of_one == ["K"]
    assert {form["BLOCK_SIZE"] for form in few} == {32, 64, 128} and {form["stages"] for form in few} == {2, 3}
    assert {form["warps"] for form in few} == {4, 8}
