"""The experts' FP8 product as a GPU computes it, by torchao's Triton kernels in Triton's interpreter; prints JSON.

Replaced are: the choice among forms of a kernel, which needs times of a GPU; the interpreter's conversion to FP8, which
drops the carry of rounding (-124.5 becomes -64); and the grouped product itself, whose rules for types, sizes and
strides are those of torch's meta kernel.

TRITON_INTERPRET=1 PYTHONPATH=. OMP_NUM_THREADS=1 python tests/unit/compute/parallelize/interpreted_float8.py
"""

import json

import numpy as np
import torch
import torch.utils._triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from glm46 import compat
from glm46.compute.parallelize.float8_experts import E4M3, experts_kernels, experts_product
from glm46.config.float8 import Float8Config
from tests.unit.compute.model.test_experts import refuse_as_on_a_gpu
from tests.unit.compute.parallelize.test_float8 import OFFSETS, ROWS, SIZES, distance, operands, recipe_in_fp64

FLOAT8 = Float8Config(recipe_name="rowwise", experts_recipe_name="rowwise")
_convert_float = interpreter._convert_float


def _converted(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
    if (source, target) == (tl.float32, tl.float8e4nv):
        return torch.from_numpy(np.ascontiguousarray(values)).to(E4M3).view(torch.uint8).numpy()
    return _convert_float(values, source, target, mode)


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **options) -> Tensor:
    """`torch._scaled_grouped_mm` in FP64; rows in no group are NaN."""
    meta = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            for x in (a, b, scale_a, scale_b, offs)]  # fmt: skip
    like = torch.ops.aten._scaled_grouped_mm(*meta, **options)
    for operand in (a, b):
        refuse_as_on_a_gpu(operand)
    out = torch.full(like.shape, torch.nan, dtype=like.dtype)
    assert all(width % 16 == 0 for x in (a, b) for width in x.shape[-2:]) and not (offs % 16).any()
    a, b, scale_a, scale_b = (x.double() for x in (a, b, scale_a, scale_b))
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        if b.ndim == 3:
            out[rows] = (a[rows] * scale_a[rows, None] @ (b[group] * scale_b[group])).to(out.dtype)
        else:
            left, right = scale_a.view(len(offs), -1)[group], scale_b.view(len(offs), -1)[group]
            out[group] = (a[:, rows] * left[:, None] @ (b[rows] * right)).to(out.dtype)
        start = end
    return out


def main() -> None:
    # torchao and `compat` ask it, and it asks for a GPU.
    torch.utils._triton.has_triton = compat.has_triton = lambda: True
    product = experts_product(FLOAT8)
    from torchao.prototype.moe_training.kernels import float8_rowwise, jagged_float8_scales

    # Not the number of rows, by which each step would be tuned anew.
    assert jagged_float8_scales._triton_fp8_per_group_colwise_scales_dual_kernel.keys == ["N_GROUPS", "N1", "N2"]
    interpreter._convert_float, torch._scaled_grouped_mm = _converted, _scaled_grouped_mm
    for module in (float8_rowwise, jagged_float8_scales):
        for kernel in vars(module).values():
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
    x, weight, grad = (t.bfloat16() for t in operands((ROWS, 64), (len(OFFSETS), 32, 64), (ROWS, 32)))
    inputs, end = [x.clone().requires_grad_(), weight.clone().requires_grad_()], int(OFFSETS[-1])
    y = product(*inputs, OFFSETS)
    y[:end].backward(grad[:end])
    rows = []
    for expert, (start, stop) in enumerate(zip([0, *OFFSETS[:-1].tolist()], OFFSETS.tolist(), strict=True)):
        part, of_weight = slice(start, stop), inputs[1].grad[expert]
        if start == stop:
            assert not of_weight.any()
            continue
        wanted = recipe_in_fp64("rowwise", *(t.double() for t in (x[part], weight[expert], grad[part])))
        found = y.detach()[part], inputs[0].grad[part], of_weight
        rows.append([distance(got, want) for got, want in zip(found, wanted, strict=True)])
    # torchao's own product, and weights that were rounded before, give the same bits.
    from torchao.prototype.moe_training import fp8_grouped_mm

    fp8_grouped_mm.triton_fp8_rowwise_3d_transpose_rhs = (
        float8_rowwise.triton_fp8_rowwise_3d_transpose_rhs_fused_reduction
    )
    whole = fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm
    kernels = experts_kernels(FLOAT8)
    forms = [form for for_backward in (False, True) for form in kernels.forms(weight, for_backward)]
    for other in (
        lambda x, weight: whole(x, weight.transpose(1, 2), OFFSETS, pad_token_groups_for_grouped_mm=False),
        lambda x, weight: product(x, weight, OFFSETS, *forms),
    ):
        again = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        result = other(*again)
        result[:end].backward(grad[:end])
        pairs = (result[:end], y[:end]), (again[0].grad[:end], inputs[0].grad[:end]), (again[1].grad, inputs[1].grad)
        for group in range(len(SIZES)):
            assert torch.equal(pairs[2][0][group], pairs[2][1][group]) or not SIZES[group]
        assert all(torch.equal(*pair) for pair in pairs[:2])
    nothing = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
    inputs[1].grad = None
    product(nothing, inputs[1], torch.zeros_like(OFFSETS)).backward(torch.empty(0, 32, dtype=torch.bfloat16))
    assert nothing.grad.shape == nothing.shape and not inputs[1].grad.any()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
