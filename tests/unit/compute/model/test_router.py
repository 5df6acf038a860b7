"""Routing against plain loops: choice, weights, counts, capacity, and the losses written out from their papers."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm46.compute.model.router import Router, RoutingOptions


@pytest.fixture
def router_and_input(tiny_shape):
    """A function: a router with random weights and biases, and tokens [B, S, D]."""

    def make(batch=3, length=11, seed=0, **changes):
        generator = torch.Generator().manual_seed(seed)
        router = Router(tiny_shape(**changes))
        with torch.no_grad():
            router.weight.normal_(0, 0.2, generator=generator)
            router.e_score_correction_bias.normal_(0, 0.2, generator=generator)
        x = torch.randn(batch, length, router.shape.hidden_size, generator=generator)
        return router, x

    return make


def slow_routing(router, x, temperature=1.0):
    """Experts and weights of each token, one token and one expert at a time, in FP64."""
    shape, chosen = router.shape, []
    for token in x.reshape(-1, x.shape[-1]).double():
        scores = [1 / (1 + math.exp(-(row @ token).item() / temperature)) for row in router.weight.double()]
        choice = [s + b for s, b in zip(scores, router.e_score_correction_bias.tolist(), strict=True)]
        best = sorted(range(len(choice)), key=lambda e: -choice[e])[: shape.num_experts_per_tok]
        total = sum(scores[e] for e in best)
        chosen.append({e: scores[e] / total * shape.routed_scaling_factor for e in best})
    return chosen


@pytest.mark.parametrize("changes", [
    dict(), dict(num_experts_per_tok=1, routed_scaling_factor=1.0), dict(num_experts_per_tok=8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("temperature", [None, 0.5, 3.0])
def test_choice_weights_and_counts_equal_a_plain_loop(changes, temperature, router_and_input):
    router, x = router_and_input(**changes)
    options = RoutingOptions(temperature=None if temperature is None else torch.tensor(temperature))
    routing = router(x, None, options)
    slow = slow_routing(router, x, temperature or 1.0)
    counts = [0] * 8
    for experts, weights, expected in zip(routing.experts.tolist(), routing.weights.tolist(), slow, strict=True):
        assert set(experts) == set(expected)
        assert dict(zip(experts, weights, strict=True)) == pytest.approx(expected, rel=1e-5)
        for expert in experts:
            counts[expert] += 1
    assert routing.statistics.tokens_per_expert.tolist() == counts
    assert routing.statistics.tokens_per_expert.dtype == torch.int64
    assert routing.statistics.overflow == 0


def test_scores_are_fp32_in_a_bf16_model(router_and_input):
    router, x = router_and_input()
    router.weight.data = router.weight.data.bfloat16()
    x = x.bfloat16()
    expected = Router(router.shape)
    expected.weight.data, expected.e_score_correction_bias = router.weight.data.float(), router.e_score_correction_bias
    got, want = router(x, None, RoutingOptions()), expected(x.float(), None, RoutingOptions())
    assert got.weights.dtype == torch.float32
    assert torch.equal(got.weights, want.weights) and torch.equal(got.experts, want.experts)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5, 100.0])
@pytest.mark.parametrize("padded", [False, True])
def test_capacity_keeps_the_first_tokens_of_each_expert_and_counts_the_rest(factor, padded, router_and_input):
    router, x = router_and_input()
    is_real = None
    real = [True] * 33
    if padded:
        is_real = torch.rand(3, 11, generator=torch.Generator().manual_seed(3)) < 0.7
        real = is_real.flatten().tolist()
    dropless = router(x, is_real, RoutingOptions())
    limited = router(x, is_real, RoutingOptions(capacity_factor=factor))
    capacity = math.ceil(sum(real) * 2 * factor / 8)
    held, lost = [0] * 8, 0
    for t in range(33):
        for a in range(2):
            expert = limited.experts[t, a].item()
            if not real[t]:
                assert limited.weights[t, a] == 0
            elif held[expert] < capacity:
                held[expert] += 1
                assert limited.weights[t, a] == dropless.weights[t, a]
            else:
                lost += 1
                assert limited.weights[t, a] == 0
    assert limited.statistics.tokens_per_expert.tolist() == held
    assert limited.statistics.overflow == lost
    assert (lost > 0) == (factor < 2.0)
    assert sum(held) + lost == 2 * sum(real) == dropless.statistics.tokens_per_expert.sum()


def test_capacity_holds_no_tensor_of_tokens_times_experts(router_and_input):
    """On the meta device. A one-hot tensor of the assignments and its running sum have E numbers for each of them."""
    router, sizes = router_and_input()[0].to("meta"), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            assert "cumsum" not in str(operator)
            found = operator(*arguments, **(options or {}))
            sizes.extend(x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor))
            return found

    experts = torch.empty(400, 2, dtype=torch.int64, device="meta")
    with Sizes():
        router._within_capacity(experts, experts > 0, 1.0)
    assert max(sizes) == experts.numel()


def slow_aux_losses(router, x, is_real):
    """Sum over real tokens of their sequence's balance loss, and of the z-loss.

    Balance, arXiv 2412.19437 eq. 17 to 20 for a sequence of T tokens: sum_i f_i P_i with
        f_i = E / (A T) * number of tokens whose A largest *scores* hold i, P_i = mean of s_i / sum_j s_j.
    z-loss, arXiv 2202.08906 eq. 5: log(sum_j exp(logit_j)) squared.
    """
    shape = router.shape
    E, A = shape.n_routed_experts, shape.num_experts_per_tok
    balance = z = 0.0
    for b in range(x.shape[0]):
        tokens = [x[b, s] for s in range(x.shape[1]) if is_real is None or is_real[b, s]]
        logits = [router.weight @ token for token in tokens]
        scores = [logit.sigmoid() for logit in logits]
        length = len(tokens)
        for i in range(E):
            f = sum(1 for s in scores if i in s.topk(A).indices) * E / (A * max(length, 1))
            probability = sum(s[i] / s.sum() for s in scores) / max(length, 1)
            balance = balance + length * f * probability
        z = z + sum(logit.exp().sum().log() ** 2 for logit in logits)
    return balance, z


@pytest.mark.parametrize("masked", [False, True])
def test_aux_losses_and_their_gradients_equal_the_papers_formulas(masked, router_and_input):
    router, x = router_and_input(num_experts_per_tok=3)
    is_real = None
    if masked:
        is_real = torch.rand(3, 11, generator=torch.Generator().manual_seed(4)) < 0.6
        is_real[1] = False  # a row of padding only
    x.requires_grad_()
    for balance, z, index in ((True, False, 0), (False, True, 1)):
        got = router(x, is_real, RoutingOptions(balance_loss=balance, z_loss=z)).statistics.aux_losses
        assert got[1 - index] == 0
        got_grads = torch.autograd.grad(got[index], (router.weight, x))
        want = slow_aux_losses(router, x, is_real)[index]
        want_grads = torch.autograd.grad(want, (router.weight, x))
        torch.testing.assert_close(got[index], want, rtol=1e-5, atol=0)
        for ours, theirs in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())
        if masked:
            assert (got_grads[1][~is_real] == 0).all()


def test_balance_loss_is_one_per_token_when_balanced_and_grows_with_imbalance(router_and_input):
    router, x = router_and_input(length=4096, batch=1)
    on = RoutingOptions(balance_loss=True)
    x[..., 0] = 1.0
    with torch.no_grad():
        router.weight.mul_(1e-3)
        even = router(x, None, on).statistics.aux_losses[0] / 4096
        router.weight[2, 0] = 3.0  # a score of 0.95 where the others have 0.5: every token chooses expert 2
        skewed = router(x, None, on).statistics.aux_losses[0] / 4096
    assert even == pytest.approx(1.0, abs=1e-3)
    # Expert 2 has f = 8 / 2 and P = 0.953 / (0.953 + 7 * 0.5); the others share one choice per token: f = 4 / 7 each.
    probability = 0.9526 / (0.9526 + 3.5)
    assert skewed == pytest.approx(4 * probability + 4 / 7 * (1 - probability), abs=1e-3)


def test_padding_is_given_no_weight_and_no_count(router_and_input):
    router, x = router_and_input()
    is_real = torch.ones(3, 11, dtype=torch.bool)
    is_real[0, 7:] = False
    routing = router(x, is_real, RoutingOptions())
    assert (routing.weights.view(3, 11, 2)[~is_real] == 0).all()
    assert (routing.weights.view(3, 11, 2)[is_real] > 0).all()
    assert routing.statistics.tokens_per_expert.sum() == 2 * 29
