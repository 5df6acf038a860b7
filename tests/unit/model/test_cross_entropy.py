"""The chunked loss equals the plain one, and its memory grows with the chunk, not with tokens times vocabulary."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from glm46.model.cross_entropy import IGNORE, chunked_cross_entropy, reference_cross_entropy


def example(tokens=23, vocabulary=61, width=12, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (2 * torch.randn(tokens, width, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.2] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 23, 24, 1024])
def test_value_and_both_gradients_equal_the_plain_loss(chunk, relative_error):
    hidden, weight, labels = example()
    loss, predictions = chunked_cross_entropy(hidden, weight, labels, chunk)
    want = reference_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32 and relative_error(loss, want) < 1e-6
    assert torch.equal(predictions, (hidden @ weight.t()).argmax(-1))
    # A factor, because the caller divides by its token count.
    got = torch.autograd.grad(loss * 0.37, (hidden, weight))
    for ours, theirs in zip(got, torch.autograd.grad(want * 0.37, (hidden, weight)), strict=True):
        assert relative_error(ours, theirs) < 1e-6


def test_positions_without_target_cost_nothing():
    hidden, weight, labels = example()
    labels[4:12] = IGNORE  # two whole chunks of four
    loss, _ = chunked_cross_entropy(hidden, weight, labels, 4)
    assert torch.allclose(loss, reference_cross_entropy(hidden, weight, labels), rtol=1e-6)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert (grad[labels == IGNORE] == 0).all() and (grad[labels != IGNORE].abs().sum(-1) > 0).all()
    nothing, _ = chunked_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), 4)
    grads = torch.autograd.grad(nothing, (hidden, weight))
    assert nothing == 0 and all((grad == 0).all() for grad in grads)


def test_huge_logits_do_not_overflow():
    hidden, weight, labels = example()
    loss, _ = chunked_cross_entropy(hidden * 1e4, weight, labels, 5)
    assert torch.isfinite(loss)
    assert torch.allclose(loss, reference_cross_entropy(hidden * 1e4, weight, labels), rtol=1e-5)
    assert torch.isfinite(torch.autograd.grad(loss, weight)[0]).all()


def test_batched_labels_keep_their_shape():
    hidden, weight, labels = example(tokens=24)
    loss, predictions = chunked_cross_entropy(hidden.view(2, 3, 4, 12), weight, labels.view(2, 3, 4), 5)
    assert loss.shape == () and predictions.shape == (2, 3, 4)


def test_bf16_sums_stay_fp32(relative_error):
    """Against the FP32 loss of the same BF16 numbers: each logit and each term of a gradient is rounded by at most
    2**-9 relative, and errors of many terms average out."""
    hidden, weight, labels = example(tokens=300, dtype=torch.bfloat16)
    loss, _ = chunked_cross_entropy(hidden, weight, labels, 32)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    want = reference_cross_entropy(*exact, labels)
    assert loss.dtype == torch.float32 and relative_error(loss, want) < 2e-3
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, exact), strict=True):
        assert ours.dtype == torch.bfloat16 and relative_error(ours, theirs) < 1e-2


def test_without_gradient_nothing_is_kept():
    hidden, weight, labels = example()
    with torch.no_grad():
        loss, _ = chunked_cross_entropy(hidden, weight, labels, 4)
    assert loss.grad_fn is None and torch.allclose(loss, reference_cross_entropy(hidden, weight, labels), rtol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the most bytes that one operation's result holds, views not counted."""

    def __init__(self, inputs):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in inputs}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_flatten(result)[0]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def peak_bytes(tokens, vocabulary, width, chunk):
    """Most bytes allocated at once during forward and backward, beyond what existed before: the allocator's own record
    of every allocation and release on the CPU, summed in order; and the largest single tensor."""
    hidden, weight, labels = example(tokens, vocabulary, width)
    with LargestTensor((hidden, weight, labels)) as recorder:
        chunked_cross_entropy(hidden, weight, labels, chunk)[0].backward()
    hidden, weight, labels = example(tokens, vocabulary, width)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        chunked_cross_entropy(hidden, weight, labels, chunk)[0].backward()
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, recorder.largest


def test_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary():
    tokens, vocabulary, width = 2048, 4096, 16
    all_logits = 4 * tokens * vocabulary
    gradients = 4 * (tokens + vocabulary) * width
    peaks = {}
    for chunk in (64, 128, 256):
        logits = 4 * chunk * vocabulary
        peaks[chunk], largest = peak_bytes(tokens, vocabulary, width, chunk)
        assert largest == max(logits, 4 * vocabulary * width)
        # Two chunks of logits (before and after the softmax) live together, and each gradient twice at the end.
        assert peaks[chunk] < 2 * logits + 3 * gradients < all_logits
    assert peaks[256] - peaks[128] == pytest.approx(2 * (peaks[128] - peaks[64]), rel=0.05)
    twice, _ = peak_bytes(2 * tokens, vocabulary, width, 64)
    assert twice - peaks[64] < 4 * 4 * tokens * width + 1e5  # hidden and its gradient; the logits do not grow


def test_the_plain_loss_does_grow_with_tokens_times_vocabulary():
    """The measurement above sees what it should."""
    hidden, weight, labels = example(2048, 4096, 16)
    with LargestTensor((hidden, weight, labels)) as recorder:
        reference_cross_entropy(hidden, weight, labels).backward()
    assert recorder.largest == 4 * 2048 * 4096
