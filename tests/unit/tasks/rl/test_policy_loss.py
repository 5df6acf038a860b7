"""Losses of tokens against the plain formulas in FP64, where the policies are far apart too."""

import pytest
import torch

from glm46.tasks.rl.policy_loss import kl_estimate, token_ratio

FORMULAS = {
    "k1": (lambda d: d, lambda d: torch.ones_like(d)),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: (-d).exp() - 1 + d, lambda d: 1 - (-d).exp()),
}
"""Value and derivative by d, the logarithm of the policy's probability over the other one."""


@pytest.mark.parametrize("estimator", list(FORMULAS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_penalty_and_its_gradient_are_those_of_the_formula(estimator, dtype):
    d = torch.tensor([-40.0, -20.5, -5.0, -2.7, -0.5, -1e-3, 0.0, 1e-3, 0.5, 2.7, 15.0, 25.0, 60.0], dtype=dtype)
    logprobs = (d - 70).requires_grad_()
    found = kl_estimate(logprobs, torch.full_like(d, -70.0), estimator)
    found.sum().backward()
    value, derivative = FORMULAS[estimator]
    exact = (logprobs.detach() + 70).double()
    rtol = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), value(exact), rtol=rtol, atol=1e-7 if dtype is torch.float32 else 1e-15)
    torch.testing.assert_close(logprobs.grad.double(), derivative(exact), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("d", "gradient"), [(-19.0, True), (19.0, True), (21.0, False)])
def test_a_ratio_has_a_gradient_up_to_its_stated_bound(d, gradient):
    logprobs = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    ratio = token_ratio(logprobs, torch.zeros(1, dtype=torch.float64))
    ratio.sum().backward()
    assert ratio.item() == pytest.approx(torch.tensor(min(d, 20.0), dtype=torch.float64).exp().item())
    assert bool(logprobs.grad) == gradient
