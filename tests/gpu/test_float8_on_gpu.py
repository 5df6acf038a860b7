"""FP8 products by the kernels of a GPU, held to the model of their recipes in FP64."""

import pytest
import torch

from glm46.config.float8 import Float8
from glm46.parallelize.float8 import experts_product, linear_product
from tests.unit.parallelize.test_float8 import OFFSETS, ROWS, distance, operands, recipe_in_fp64

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="no CUDA device with FP8 products on this machine"),
]
# Triton has code of its own for numbers that 16 divides. With as many groups as a real layer has, it is compiled once.
ENDS = torch.cat([OFFSETS, OFFSETS[-1:].expand(11)])
# BF16 rounds results to 2**-9. Fast accumulation keeps 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
BOUND = 2**-7


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_linear_product_follows_its_recipe(recipe):
    x, weight, grad = (t.bfloat16() for t in operands((256, 512), (384, 512), (256, 384)))
    inputs = [t.cuda().requires_grad_() for t in (x, weight)]
    y = linear_product(Float8(recipe_name=recipe))(*inputs, None)
    y.backward(grad.cuda())
    wanted = recipe_in_fp64(recipe, x.double(), weight.double(), grad.double())
    found = (y.detach(), inputs[0].grad, inputs[1].grad)
    for got, want in zip(found, wanted, strict=True):
        assert distance(got.cpu(), want) < BOUND


@pytest.mark.skipif(CAPABILITY[0] not in (9, 10), reason="no CUDA device with grouped FP8 products on this machine")
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_grouped_product_follows_its_recipe(recipe):
    if recipe == "mxfp8" and CAPABILITY[0] != 10:
        pytest.skip("no CUDA device with MXFP8 on this machine")
    x, weight, grad = (t.bfloat16() for t in operands((ROWS, 512), (len(ENDS), 256, 512), (ROWS, 256)))
    inputs, end = [t.cuda().requires_grad_() for t in (x, weight)], int(ENDS[-1])
    float8 = Float8(recipe_name="rowwise", experts_recipe_name=recipe)
    y = experts_product(float8)(*inputs, ENDS.cuda())
    y[:end].backward(grad[:end].cuda())
    for expert, (start, stop) in enumerate(zip([0, *ENDS[:-1].tolist()], ENDS.tolist(), strict=True)):
        if start == stop:
            assert not inputs[1].grad[expert].any()
            continue
        rows = slice(start, stop)
        wanted = recipe_in_fp64(recipe, x[rows].double(), weight[expert].double(), grad[rows].double())
        found = (y.detach()[rows], inputs[0].grad[rows], inputs[1].grad[expert])
        for got, want in zip(found, wanted, strict=True):
            assert distance(got.cpu(), want) < BOUND, expert
