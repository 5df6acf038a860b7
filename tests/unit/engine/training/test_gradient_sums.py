"""Gradients of many micro-batches are summed without losing small ones, in every pair of types."""

from unittest import mock

import pytest
import torch

from glm46.engine.observe.observers import observing
from glm46.engine.training import build, loop
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
