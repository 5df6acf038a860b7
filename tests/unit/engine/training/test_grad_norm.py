"""The global norm of gradients in a type of few digits."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.engine.training.gradients import global_grad_norm, scale_gradients


def parameters_of(dtype):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((300, 70), (7,), (0, 4), (50, 3))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    parameters = parameters_of(torch.bfloat16)
    exact = torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm()
    norm = global_grad_norm(parameters, torch.device("cpu"))
    # A CPU adds thousands of squares one after another in FP32, each sum rounded by 6e-8 of itself.
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(exact.item(), rel=1e-5)
    assert abs(exact.bfloat16().double() / exact - 1) > 1e-4  # the example tells the two apart


def test_the_norm_of_fp32_gradients_has_the_bits_of_torch():
    parameters = parameters_of(torch.float32)
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    assert torch.equal(global_grad_norm(parameters, torch.device("cpu")), expected.square().sqrt())


class Calls(TorchDispatchMode):
    """Names of the operators that are called and compute."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is not torch.ops.aten.detach.default:
            self.names.append(operator._schema.name)
        return operator(*args, **kwargs or {})


def test_gradients_of_one_dtype_are_scaled_by_one_operator_and_have_the_bits_of_a_product_for_each():
    parameters = [*parameters_of(torch.float32), *parameters_of(torch.bfloat16), nn.Parameter(torch.zeros(3))]
    factor = torch.tensor(0.37)
    expected = [parameter.grad * factor for parameter in parameters[:-1]]
    with Calls() as calls:
        scale_gradients(parameters, factor)
    assert calls.names == ["aten::_foreach_mul_"] * 2
    assert all(torch.equal(parameter.grad, of) for parameter, of in zip(parameters, expected, strict=False))
    assert [parameter.grad.dtype for parameter in parameters[:-1]] == [of.dtype for of in expected]
