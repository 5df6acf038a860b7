"""Both forms of the output head equal the plain formula in bounded memory; what a forward pass reports."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from glm46.compute.model.cross_entropy import IGNORE, HeadOutput, summed_loss, token_logprobs
from glm46.compute.model.router import RoutingOptions

CHUNKS = [1, 2, 7, 22, 23, 24, 1024]


def example(tokens=23, vocabulary=61, width=12, dtype=torch.float32, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (spread * torch.randn(tokens, width, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.2] = IGNORE
    return hidden, weight, labels


def plain(hidden, weight, labels, temperature=1.0) -> HeadOutput:
    """Both forms with all logits at once, as the formulas are written down."""
    logprobs = torch.log_softmax((hidden @ weight.t()) / temperature, -1)
    is_target = labels != IGNORE
    of_labels = logprobs.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).where(is_target, 0)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return HeadOutput(logprobs.argmax(-1), -of_labels.sum(), of_labels, entropy.where(is_target, 0))


def in_fp64(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def token_weights(labels):
    """Weights of log-probabilities and of entropies, of both signs and some of them 0, as advantages have them."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, *labels.shape, generator=generator)
    return weights.where(torch.rand(weights.shape, generator=generator) < 0.8, 0)


def weighted(output: HeadOutput, weights):
    """The objective of a policy gradient with an entropy bonus."""
    objective = (weights[0].to(output.logprobs.dtype) * output.logprobs).sum()
    return objective if output.entropy is None else objective + (weights[1].to(objective.dtype) * output.entropy).sum()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_loss_and_both_gradients_equal_the_plain_formula(chunk, relative_error):
    hidden, weight, labels = example()
    found = summed_loss(hidden, weight, labels, chunk_tokens=chunk)
    exact = in_fp64(hidden, weight)
    want = plain(*exact, labels)
    assert found.loss.dtype == torch.float32 and relative_error(found.loss, want.loss) < 1e-6
    assert torch.equal(found.predictions, want.predictions)
    # A factor, because the caller divides by its token count.
    got = torch.autograd.grad(found.loss * 0.37, (hidden, weight))
    for ours, theirs in zip(got, torch.autograd.grad(want.loss * 0.37, exact), strict=True):
        assert relative_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropies_and_both_gradients_equal_the_plain_formula(chunk, entropy, temperature, relative_error):
    """Logits up to 30 have rounding errors up to 30 x 2**-24, about 2e-6, which an exponential makes relative ones."""
    hidden, weight, labels = example()
    found = token_logprobs(hidden, weight, labels, chunk_tokens=chunk, entropy=entropy, temperature=temperature)
    exact, weights = in_fp64(hidden, weight), token_weights(labels)
    want = plain(*exact, labels, temperature)
    assert found.logprobs.dtype == torch.float32 and relative_error(found.logprobs, want.logprobs) < 2e-6
    assert (found.logprobs[labels == IGNORE] == 0).all() and torch.equal(found.predictions, want.predictions)
    if entropy:
        assert found.entropy.dtype == torch.float32 and relative_error(found.entropy, want.entropy) < 2e-6
        assert (found.entropy[labels == IGNORE] == 0).all()
    else:
        assert found.entropy is None
        want = want._replace(entropy=None)
    got = torch.autograd.grad(weighted(found, weights), (hidden, weight))
    for ours, theirs in zip(got, torch.autograd.grad(weighted(want, weights), exact), strict=True):
        assert relative_error(ours, theirs) < 2e-6


def kept_tokens(labels, vocabulary, most=9):
    """Sets of 1 to ``most`` tokens with the label among them, int32 [1, K, T]; some labels have none."""
    generator = torch.Generator().manual_seed(3)
    kept = torch.full((len(labels), most), -1, dtype=torch.int32)
    for token, label in enumerate(labels.tolist()):
        size = token % (most + 1)  # 0: the whole vocabulary
        others = torch.randperm(vocabulary, generator=generator)
        chosen = torch.cat([torch.tensor([max(label, 0)]), others[others != label]])[:size]
        kept[token, :size] = chosen[torch.randperm(size, generator=generator)].int()
    return kept.t().unsqueeze(0)


def plain_over(kept, hidden, weight, labels, temperature):
    """`plain` with a logit of minus infinity for each token that is not kept."""
    logits = (hidden @ weight.t()) / temperature
    is_kept = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool)
    is_kept.scatter_(1, kept[0].t().long() % (logits.shape[1] + 1), True)  # -1 is the column too many
    is_kept = is_kept[:, :-1] | (kept[0] < 0).all(0).unsqueeze(1)
    logprobs = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    is_target = labels != IGNORE
    of_labels = logprobs.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).where(is_target, 0)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~is_kept, 0)).sum(-1)
    return HeadOutput(logprobs.argmax(-1), None, of_labels, entropy.where(is_target, 0))


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distributions_over_kept_tokens_equal_the_plain_formula(chunk, dtype, relative_error):
    """Logits of order 10: FP32 sums of 12 products. In BF16 the logits are rounded to 2**-9 of themselves."""
    hidden, weight, labels = example(spread=1.0, dtype=dtype)
    kept, weights = kept_tokens(labels, len(weight)), token_weights(labels)
    exact = in_fp64(hidden, weight)
    found = token_logprobs(
        hidden.unsqueeze(0), weight, labels.unsqueeze(0), chunk_tokens=chunk, entropy=True, temperature=0.7, kept=kept
    )
    found = HeadOutput(found.predictions[0], None, found.logprobs[0], found.entropy[0])
    want = plain_over(kept, *exact, labels, 0.7)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative_error(found.logprobs, want.logprobs) < bound and relative_error(found.entropy, want.entropy) < bound
    is_target = labels != IGNORE
    alone = is_target & ((kept[0] >= 0).sum(0) == 1)
    assert alone.any() and not found.logprobs[alone].any() and not found.entropy[alone].any()
    got = torch.autograd.grad(weighted(found, weights), (hidden, weight))
    for ours, theirs in zip(got, torch.autograd.grad(weighted(want, weights), exact), strict=True):
        assert relative_error(ours, theirs) < bound
    assert not got[0][alone].any()
    if dtype == torch.float32:
        assert torch.equal(found.predictions[is_target], want.predictions[is_target])


@pytest.mark.parametrize("which", ["logprobs", "entropy"])
def test_an_objective_may_use_one_of_the_two_alone(which, relative_error):
    hidden, weight, labels = example()
    exact = in_fp64(hidden, weight)
    found = getattr(token_logprobs(hidden, weight, labels, chunk_tokens=5, entropy=True), which).square().sum()
    want = getattr(plain(*exact, labels), which).square().sum()
    for ours, theirs in zip(
        torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(want, exact), strict=True
    ):
        assert relative_error(ours, theirs) < 2e-6


FORMS = {
    "summed": lambda *arguments: summed_loss(*arguments).loss,
    "by token": lambda *arguments: -token_logprobs(*arguments).logprobs.sum(),
    "with entropy": lambda *arguments: weighted(
        token_logprobs(*arguments, entropy=True), -torch.ones(2, *arguments[2].shape)
    ),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@every_form
def test_positions_without_label_cost_nothing(form):
    hidden, weight, labels = example()
    labels[4:12] = IGNORE  # two whole chunks of four
    (grad,) = torch.autograd.grad(form(hidden, weight, labels, None, 4), hidden)
    assert (grad[labels == IGNORE] == 0).all() and (grad[labels != IGNORE].abs().sum(-1) > 0).all()
    nothing = form(hidden, weight, torch.full_like(labels, IGNORE), None, 4)
    grads = torch.autograd.grad(nothing, (hidden, weight))
    assert nothing == 0 and all((grad == 0).all() for grad in grads)


def test_what_an_objective_gives_to_positions_without_label_is_ignored():
    """exp(0 - old) of a position without label may be anything."""
    hidden, weight, labels = example()
    weights = token_weights(labels)
    clean = torch.autograd.grad(weighted(token_logprobs(hidden, weight, labels, entropy=True), weights), weight)[0]
    found = token_logprobs(hidden, weight, labels, entropy=True)
    spoilt = weights.masked_fill(labels == IGNORE, torch.nan)
    grad = torch.autograd.grad((found.logprobs, found.entropy), weight, tuple(spoilt))[0]
    assert torch.equal(grad, clean)


@every_form
def test_huge_logits_do_not_overflow(form):
    hidden, weight, labels = example()
    value = form(hidden * 1e4, weight, labels, None, 5)
    assert torch.allclose(value.double(), plain(*in_fp64(hidden * 1e4, weight), labels).loss, rtol=1e-5)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(value, (hidden, weight)))


def test_batched_labels_keep_their_shape():
    hidden, weight, labels = example(tokens=24)
    hidden, labels = hidden.view(2, 3, 4, 12), labels.view(2, 3, 4)
    found = summed_loss(hidden, weight, labels, chunk_tokens=5)
    assert found.loss.shape == () and found.predictions.shape == (2, 3, 4)
    by_token = token_logprobs(hidden, weight, labels, chunk_tokens=5, entropy=True)
    assert {x.shape for x in (by_token.predictions, by_token.logprobs, by_token.entropy)} == {(2, 3, 4)}
    assert not by_token.logprobs._is_view() and not by_token.entropy._is_view()  # FSDP warns of views
    turned = token_logprobs(hidden.transpose(0, 1), weight, labels.transpose(0, 1), chunk_tokens=5)
    torch.testing.assert_close(turned.logprobs.transpose(0, 1), by_token.logprobs)


def test_bf16_sums_stay_fp32(relative_error):
    """Against the exact loss of the same BF16 numbers: each logit and each term of a gradient is rounded by at most
    2**-8 relative, and errors of many terms average out."""
    hidden, weight, labels = example(tokens=300, dtype=torch.bfloat16)
    loss = summed_loss(hidden, weight, labels, chunk_tokens=32).loss
    exact = in_fp64(hidden, weight)
    want = plain(*exact, labels).loss
    assert loss.dtype == torch.float32 and relative_error(loss, want) < 2e-3
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, exact), strict=True):
        assert ours.dtype == torch.bfloat16 and relative_error(ours, theirs) < 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bf16_logprobs_err_by_no_more_than_their_roundings(temperature):
    """Bounds of every element, from the exact numbers: a logit z is rounded by at most u |z|, a gradient of a logit and
    each product of a chunk by u of itself, with u = 2**-8. Log-probabilities change by the rounding of their logit and
    the mean one, probabilities by the same as a factor; second orders of these, and FP32, are the last 5 %."""
    unit, second_order = 2.0**-8, 1.05
    hidden, weight, labels = example(tokens=300, dtype=torch.bfloat16, spread=0.4)
    weights = token_weights(labels)
    found = token_logprobs(hidden, weight, labels, chunk_tokens=32, temperature=temperature)
    exact = in_fp64(hidden, weight)
    want = plain(*exact, labels, temperature)
    got = torch.autograd.grad(weighted(found, weights), (hidden, weight))
    grads = torch.autograd.grad((weights[0].double() * want.logprobs).sum(), exact)

    h, w = (x.detach() for x in exact)
    logits = h @ w.t() / temperature
    probability, rounding = logits.softmax(-1), unit * logits.abs()
    mean_rounding = (probability * rounding).sum(-1, keepdim=True)
    of_label = rounding.gather(1, labels.clamp(min=0).unsqueeze(1)) + mean_rounding
    is_target = labels != IGNORE
    assert found.logprobs.dtype == torch.float32
    assert ((found.logprobs - want.logprobs).abs() <= second_order * of_label.squeeze(1) * is_target).all()

    factor = (weights[0].double() * is_target / temperature).unsqueeze(1)
    one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), 61)
    grad_logits = (factor * (one_hot - probability)).abs()
    error = factor.abs() * probability * (rounding + mean_rounding) + unit * grad_logits
    bounds = (
        second_order * error @ w.abs() + unit * grads[0].abs(),
        second_order * error.t() @ h.abs() + 2 * unit * grad_logits.t() @ h.abs(),
    )
    for ours, theirs, bound in zip(got, grads, bounds, strict=True):
        assert ours.dtype == torch.bfloat16 and ((ours - theirs).abs() <= bound).all()
        assert bound.norm() < 0.1 * theirs.norm()


class Operations(TorchDispatchMode):
    """Counts matrix products, and remembers the most bytes that one operation's result holds, views not counted."""

    def __init__(self, *inputs):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in inputs}
        self.largest = self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        result = function(*args, **(kwargs or {}))
        for x in tree_flatten(result)[0]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


@every_form
def test_only_the_gradients_that_are_asked_for_are_made(form):
    hidden, weight, labels = example()
    chunks = 12 if form is FORMS["with entropy"] else 6
    again = 0 if form is FORMS["summed"] else 1  # logits in backward
    for frozen, products in (((), 3 + again), ((weight,), 2 + again), ((hidden,), 2 + again)):
        inputs = [x.detach() if any(x is y for y in frozen) else x for x in (hidden, weight)]
        with Operations() as counter:
            form(*inputs, labels, None, 4).backward()
        assert counter.products == products * chunks
    with Operations() as counter, torch.no_grad():
        value = form(hidden, weight, labels, None, 4)
    assert counter.products == chunks and value.grad_fn is None


def test_logprobs_keep_no_logits_for_backward():
    hidden, weight, labels = example(tokens=64, vocabulary=500)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_logprobs(hidden, weight, labels, chunk_tokens=16, entropy=True)
    inputs = {x.untyped_storage().data_ptr() for x in (hidden, weight, labels)}
    others = [x for x in saved if x.untyped_storage().data_ptr() not in inputs]
    assert others and all(x.numel() == 64 for x in others)


def peak_bytes(form, tokens, vocabulary, width, chunk, dtype=torch.float32):
    """Most bytes allocated at once during forward and backward, beyond what existed before: the allocator's own record
    of every allocation and release on the CPU, summed in order; and the largest single tensor."""
    hidden, weight, labels = example(tokens, vocabulary, width, dtype)
    with Operations(hidden, weight, labels) as recorder:
        form(hidden, weight, labels, None, chunk).backward()
    hidden, weight, labels = example(tokens, vocabulary, width, dtype)
    return allocated(lambda: form(hidden, weight, labels, None, chunk).backward()), recorder.largest


def allocated(call):
    """Most bytes that a call allocates at once."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak


def product_scratch(rows, inner, columns):
    """Bytes that a BF16 product takes beside its result: a CPU without BF16 units converts operands and result."""
    left = torch.randn(rows, inner, dtype=torch.bfloat16)
    right = torch.randn(inner, columns, dtype=torch.bfloat16)
    return allocated(lambda: left @ right) - 2 * rows * columns


@every_form
def test_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary(form):
    tokens, vocabulary, width = 1024, 2048, 16
    all_logits = 4 * tokens * vocabulary
    gradients = 4 * (tokens + vocabulary) * width
    peaks = {}
    for chunk in (64, 128, 256):
        logits = 4 * chunk * vocabulary
        peaks[chunk], largest = peak_bytes(form, tokens, vocabulary, width, chunk)
        # Entropies take two tensors of half a chunk.
        assert largest == max(logits // (2 if form is FORMS["with entropy"] else 1), 4 * vocabulary * width)
        # One chunk of logits, which become their gradients; and some numbers per token.
        assert peaks[chunk] < logits + 2 * gradients + 4 * 20 * tokens < all_logits
    assert peaks[256] - peaks[128] == pytest.approx(2 * (peaks[128] - peaks[64]), rel=0.05)
    twice, _ = peak_bytes(form, 2 * tokens, vocabulary, width, 64)
    assert twice - peaks[64] < 4 * 4 * tokens * width + 1e5  # hidden and its gradient; the logits do not grow


@every_form
def test_bf16_logits_have_one_fp32_tensor_beside_them(form):
    """On an H100 they had three."""
    tokens, vocabulary, width, chunk = 256, 2048, 16, 64
    peak, _ = peak_bytes(form, tokens, vocabulary, width, chunk, torch.bfloat16)
    # Entropies take two tensors of half a chunk. The gradient of the weight in FP32, the summand of a chunk in BF16, as
    # a CPU makes it, and at the end in BF16, and times that of the loss.
    logits = chunk * vocabulary * (1 + 4 if form is FORMS["with entropy"] else 2 + 4)
    products = [(chunk, width, vocabulary), (chunk, vocabulary, width), (vocabulary, chunk, width)]
    scratch = max(product_scratch(*sizes) for sizes in products)
    assert peak < logits + scratch + vocabulary * width * (4 + 2 + 2 + 2) + 4 * 40 * tokens


def test_prediction_layers_alone_have_the_gradients_of_their_losses(tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_nextn_predict_layers=2)
    batch, found = random_batch(shape), []
    for alone, weight in ((True, 0.3), (False, 0.3), (False, 0.0)):
        model = random_model(shape)
        model.mtp_alone = alone
        sums = model(**batch)
        (sums.loss + weight * sums.mtp_losses.sum()).backward()
        found.append((sums, {name: p.grad for name, p in model.named_parameters()}))
    (sums, alone), (of_both, both), (_, main) = found
    assert torch.equal(sums.mtp_losses, of_both.mtp_losses) and torch.equal(sums.loss, of_both.loss)
    for name, gradient in alone.items():
        torch.testing.assert_close(gradient, (both if name.startswith("mtp.") else main)[name], rtol=1e-6, atol=1e-9)
    assert (both["embed_tokens.weight"] - main["embed_tokens.weight"]).abs().max() > 1e-3


def test_sums_add_up_over_micro_batches(tiny_shape, random_model, random_batch):
    """A batch of four equals two of two: sums, not means, so the caller may cut as it likes."""
    shape = tiny_shape(num_nextn_predict_layers=1)
    model, batch = random_model(shape), random_batch(shape, rows=4)
    options = RoutingOptions(balance_loss=True, z_loss=True)
    whole = model(**batch, options=options)
    halves = [model(**{key: value[half] for key, value in batch.items()}, options=options) for half in ([0, 1], [2, 3])]
    for field in ("loss", "mtp_losses", "aux_losses"):
        torch.testing.assert_close(getattr(whole, field), sum(getattr(h, field) for h in halves), rtol=1e-6, atol=0)
    assert torch.equal(whole.tokens_per_expert, sum(h.tokens_per_expert for h in halves))
    assert torch.equal(whole.predictions, torch.cat([h.predictions for h in halves], 1))


@pytest.mark.parametrize("with_mtp", [False, True])
def test_rows_of_counts_belong_to_the_routers_in_order(with_mtp, tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_hidden_layers=4, first_k_dense_replace=1, num_nextn_predict_layers=1)
    model, batch = random_model(shape), random_batch(shape)
    names = list(model.routers())
    assert names == [f"layers.{i}.mlp.router" for i in (1, 2, 3)] + ["mtp.0.block.mlp.router"]
    if not with_mtp:
        batch = {key: value for key, value in batch.items() if "mtp" not in key}
        names = names[:-1]
    for row, name in enumerate(names):
        router = model.routers()[name]
        before = router.e_score_correction_bias.clone()
        router.e_score_correction_bias[5] = 1000.0
        counts = model(**batch).tokens_per_expert
        router.e_score_correction_bias.copy_(before)
        assert counts.shape == (len(names), 8)
        assert counts[row, 5] == 2 * 19  # every token of this layer, and of no other
        assert (counts[:, 5] == 2 * 19).sum() == 1


def test_a_model_without_experts_reports_empty_counts(tiny_shape, random_model, random_batch):
    shape = tiny_shape(first_k_dense_replace=3, num_nextn_predict_layers=0)
    sums = random_model(shape)(**random_batch(shape))
    assert sums.tokens_per_expert.shape == (0, 8) and sums.overflow.shape == (0,)
    assert sums.mtp_losses.shape == (0,) and sums.aux_losses.tolist() == [0.0] * 4
    assert sums.tokens_per_expert.dtype == sums.overflow.dtype == torch.int64


def test_the_form_of_the_head_is_chosen_for_the_models_own_labels_alone(tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_nextn_predict_layers=2)
    model, batch = random_model(shape), random_batch(shape)
    sums, by_token = model(**batch), model(**batch, form=partial(token_logprobs, entropy=True))
    assert by_token.loss is None and by_token.entropy.shape == batch["labels"].shape
    torch.testing.assert_close(-by_token.logprobs.sum(), sums.loss, rtol=1e-6, atol=0)
    assert torch.equal(by_token.predictions, sums.predictions) and torch.equal(by_token.mtp_losses, sums.mtp_losses)
    no_mtp = {key: value for key, value in batch.items() if "mtp" not in key}
    alone = model(**no_mtp, form=token_logprobs)
    assert torch.equal(alone.logprobs, by_token.logprobs) and alone.entropy is None and alone.mtp_losses.shape == (0,)
