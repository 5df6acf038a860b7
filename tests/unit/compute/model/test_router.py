"""Routing against plain loops: choice, weights, counts, capacity, losses; and replayed routes."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.router import Router, RoutingOptions
from glm46.compute.model.routes import compact_routes, moe_layers, no_routes
from glm46.compute.parallelize import activation_checkpoint
from glm46.config.errors import UserError


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
    {}, dict(num_experts_per_tok=1, routed_scaling_factor=1.0), dict(num_experts_per_tok=8),
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
    assert (dropless.weights > 0).all(1).tolist() == dropless.weights.any(1).tolist() == real
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


OPTIONS = RoutingOptions(record=True)


@pytest.fixture
def shape(tiny_shape):
    return tiny_shape(num_nextn_predict_layers=1)


@pytest.fixture
def model(shape, random_model):
    return random_model(shape)


@pytest.fixture
def batch(shape, random_batch):
    return random_batch(shape)


def run(model, batch, routes=None, form=token_logprobs):
    """Output, gradients, and the recorded routes: [B, S, L, A] of the decoder layers, and [B, S, A] of the prediction
    layer."""
    found = []
    keep = lambda *call: found.append(call[-1].statistics.routes)  # noqa: E731
    handles = [router.register_forward_hook(keep) for router in model.routers().values()]
    model.zero_grad()
    output = model(**batch, routes=routes, options=OPTIONS, form=form)
    for handle in handles:
        handle.remove()
    (output.logprobs.sum() + output.mtp_losses.sum()).backward()
    *main, prediction = found
    return output, {n: p.grad.clone() for n, p in model.named_parameters()}, torch.stack(main, 2), prediction


def move_choice(model):
    """Another bias of every router: other experts, equal scores."""
    for router in model.routers().values():
        router.e_score_correction_bias.copy_(router.e_score_correction_bias.flip(0) * 3)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_replay_of_the_own_choice_is_bitwise_the_live_forward_and_its_gradients(mode, model, batch, shape):
    live, gradients, routes, _ = run(model, batch)
    assert routes.dtype == torch.uint8 and routes.shape == (2, 19, moe_layers(shape), 2)
    if mode != "none":
        activation_checkpoint.apply(model, mode)
    again, same, recorded, _ = run(model, batch, routes)
    assert torch.equal(recorded, routes)
    assert torch.equal(again.logprobs, live.logprobs) and torch.equal(again.tokens_per_expert, live.tokens_per_expert)
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in same.items())


def test_another_choice_of_the_router_changes_nothing_under_replay_and_prediction_layers_stay_live(model, batch):
    before, gradients, routes, prediction = run(model, batch)
    move_choice(model)
    live = run(model, batch)[0]
    assert (live.logprobs - before.logprobs).abs().max() > 1e-2
    output, same, recorded, moved = run(model, batch, routes)
    assert torch.equal(output.logprobs, before.logprobs) and torch.equal(recorded, routes)
    assert not torch.equal(moved, prediction)
    main = [name for name in gradients if name.endswith("mlp.router.weight") and name.startswith("layers")]
    assert len(main) == 2 and all(same[name].norm() > 0 for name in main)


def test_tokens_without_a_route_choose_live(model, batch, shape):
    _, _, routes, _ = run(model, batch)
    move_choice(model)
    live, gradients, chosen, _ = run(model, batch)
    none, same, _, _ = run(model, batch, no_routes((2, 19), shape))
    assert torch.equal(none.logprobs, live.logprobs)
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in same.items())
    routes[:, 5:9] = no_routes((2, 4), shape)
    _, _, recorded, _ = run(model, batch, routes)
    is_given = torch.ones(19, dtype=torch.bool)
    is_given[5:9] = False
    assert torch.equal(recorded[:, is_given], routes[:, is_given])
    assert torch.equal(recorded[:, 5:9, 0], chosen[:, 5:9, 0])  # only a dense layer before


def test_weights_of_given_experts_are_those_of_their_live_scores_with_gradient(tiny_shape):
    generator = torch.Generator().manual_seed(0)
    router = Router(tiny_shape())
    router.weight.data.normal_(0, 0.2, generator=generator)
    x = torch.randn(2, 5, 48, generator=generator, requires_grad=True)
    routes = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(10)]).view(2, 5, 2).to(torch.uint8)
    routing = router(x, None, RoutingOptions(), routes)
    scores = (x.reshape(10, 48) @ router.weight.t()).sigmoid()
    given = torch.stack([scores[t, e] for t, pair in enumerate(routes.view(10, 2).tolist()) for e in pair]).view(10, 2)
    weights = given / given.sum(1, keepdim=True) * 2.5
    torch.testing.assert_close(routing.weights, weights, rtol=1e-5, atol=0)
    assert routing.statistics.tokens_per_expert.tolist() == routes.flatten().long().bincount(minlength=8).tolist()
    factors = torch.randn(10, 2, generator=generator)
    got = torch.autograd.grad((routing.weights * factors).sum(), (router.weight, x))
    want = torch.autograd.grad((weights * factors).sum(), (router.weight, x))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("experts", [8, 255, 256, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int64])
def test_compact_routes_keep_every_expert_and_every_mark(experts, dtype, tiny_shape):
    if dtype == torch.uint8 and experts > 256:
        return
    shape = tiny_shape(n_routed_experts=experts)
    wide = torch.tensor([[[0, experts - 1], [3, 1]], [[2, 0], [experts - 2, 5]]])
    compact = compact_routes(wide.to(dtype), (2,), shape)
    assert compact.dtype == (torch.uint8 if experts < 256 else torch.int16) and torch.equal(compact.long(), wide)
    assert compact_routes(compact, (2,), shape) is compact
    if dtype.is_signed:
        marked = compact_routes(torch.full_like(wide, -1, dtype=dtype), (2,), shape)
        assert torch.equal(marked, no_routes((2,), shape))
    assert torch.equal(compact_routes(no_routes((2,), shape), (2,), shape), no_routes((2,), shape))


@pytest.mark.parametrize(
    ("routes", "parts"),
    [
        (torch.zeros(3, 3, 2), ("[3, 3, 2]", "[3, 2, 2]", "MoE layers")),  # a dense layer too many
        (torch.zeros(2, 2, 2), ("[2, 2, 2]", "[3, 2, 2]")),
        (torch.tensor([[[0, 1], [2, 8]]] * 3), ("[2, 8]", "token [0]", "MoE layer 1", "0 to 7")),
        (torch.tensor([[[0, 1], [2, -7]]] * 3), ("[2, -7]", "0 to 7")),
        (torch.tensor([[[0, 1], [2, -1]]] * 3), ("[2, -1]", "0 to 7")),  # half a route
        (torch.tensor([[[0, 1], [2, 255]]] * 3, dtype=torch.uint8), ("[2, 255]", "0 to 7")),
        (torch.tensor([[[4, 4], [2, 1]]] * 3), ("[4, 4]", "differ")),
    ],
    ids=["layers", "tokens", "beyond", "negative", "half", "half uint8", "twice"],
)
def test_routes_of_another_model_are_refused(routes, parts, tiny_shape):
    with pytest.raises(UserError) as caught:
        compact_routes(routes if routes.dtype == torch.uint8 else routes.long(), (3,), tiny_shape())
    assert all(part in str(caught.value) for part in parts), caught.value
