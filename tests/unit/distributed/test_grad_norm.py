"""The global norm of gradients in a type of few digits."""

import pytest
import torch
from torch import nn

from glm46.distributed.grad_norm import global_grad_norm


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
