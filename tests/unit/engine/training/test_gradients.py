"""Gradients: their sums over micro-batches, their norm, and their scaling."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.engine.observe.observers import observing
from glm46.engine.training import build, loop
from glm46.engine.training.gradients import global_grad_norm, scale_gradients
from glm46.engine.training.network import TrainedNetwork
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.weights.weight_folders import WeightFolders

MICRO_BATCHES = 6


def gradients_of(network: TrainedNetwork) -> dict[str, torch.Tensor]:
    """Copies of the gradients in FP64."""
    return {
        name: parameter.grad.full_tensor().double()
        if hasattr(parameter.grad, "full_tensor")
        else parameter.grad.double()
        for name, parameter in network.parameters.items()
        if parameter.grad is not None
    }


def errors_of_sums(config) -> dict[str, float]:
    """For each parameter, the error of the sum over micro-batches relative to the FP64 sum of each one alone."""
    errors: dict[str, float] = {}
    sum_gradients = TrainedNetwork.forward_backward

    def compared(network, batches, *arguments):
        assert len(batches) == MICRO_BATCHES
        expected: dict[str, torch.Tensor] = {}
        for batch in batches:
            network.optimizer.zero_grad()
            sum_gradients(network, [batch], *arguments)
            for name, gradient in gradients_of(network).items():
                expected[name] = expected.get(name, 0.0) + gradient
        network.optimizer.zero_grad()
        outputs = sum_gradients(network, batches, *arguments)
        for name, actual in gradients_of(network).items():
            errors[name] = ((actual - expected[name]).norm() / expected[name].norm()).item()
        return outputs

    def work(task, services, progress, weights) -> int:
        with mock.patch.object(TrainedNetwork, "forward_backward", compared):
            assert loop.train(task, services, progress, weights) == 0
        return 0

    with mock.patch.object(build, "train", work):
        assert build.run(config, Pretraining, WeightFolders(), observing) == 0
    return errors


# With equal types FSDP2 does not get the parameters of a single process, and autograd adds up the gradients.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "param"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_sums_over_micro_batches_are_those_of_fp32(make_config, dtype, param):
    errors = errors_of_sums(
        make_config(
            training={
                "steps": 1,
                "global_batch_size": MICRO_BATCHES,
                "local_batch_size": 1,
                "dtype": dtype,
                "mixed_precision_param": param,
            },
        )
    )
    assert len(errors) > 20
    assert max(errors.values()) < 1e-6, max(errors.items(), key=lambda item: item[1])


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
