"""Routing replay: experts that are given, in place of the routers' choice."""

import pytest
import torch

from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.router import Router, RoutingOptions
from glm46.compute.model.routes import compact_routes, moe_layers, no_routes
from glm46.compute.parallelize import activation_checkpoint
from glm46.config.errors import UserError

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
