"""The loss of indexers and its gradients equal formulas in FP64, for all visible keys and for the chosen ones."""

import pytest
import torch

from glm46.compute.model import index_loss as module
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.index_loss import AttentionInputs, HeadShare, index_loss
from glm46.compute.model.indexer import IndexTensors, choose_keys, key_spans

# FP32 has 6e-8 of rounding; sums over some hundred keys and queries give a few times more.
TOLERANCE = 1e-6
LENGTHS = (5, 31, 12, 16)
TOP_K = 8
SCALE = 0.2


class Case:
    """Random inputs of two rows, the second without bounds of documents where ``packed`` is false."""

    def __init__(self, seed: int, *, packed: bool = True, heads: int = 4):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        rows, length = 2, sum(LENGTHS)
        tokens = rows * length
        documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).expand(rows, -1)
        self.layout = attention_layout(documents, (rows, length), None) if packed else None
        self.spans = key_spans(self.layout, rows, length, torch.device("cpu"))
        self.index = IndexTensors(normal(tokens, 3, 6), normal(tokens, 6), normal(tokens, 3))
        self.attention = AttentionInputs(normal(tokens, heads, 10) * SCALE, normal(tokens, 10))
        self.is_real = torch.rand(tokens, generator=generator) > 0.1
        key = torch.arange(tokens)
        self.is_visible = (key >= self.spans.first_N[:, None]) & (key < self.spans.end_N[:, None])
        self.chosen = choose_keys(*self.index, *self.spans, TOP_K)

    def is_compared(self, is_sparse: bool) -> torch.Tensor:
        if not is_sparse:
            return self.is_visible
        mask = torch.zeros_like(self.is_visible)
        for query, keys in enumerate(self.chosen.long()):
            mask[query, keys[keys >= 0]] = True
        return mask

    def run(self, is_sparse: bool, **changes):
        """Loss, attention mass, and the gradients of the index tensors."""
        index = IndexTensors(*(x.clone().requires_grad_() for x in self.index))
        chosen = self.chosen if is_sparse else None
        arguments = {"attention": self.attention, "is_real_N": self.is_real} | changes
        losses = index_loss(index, spans=self.spans, chosen_NK=chosen, top_k=TOP_K, **arguments)
        losses[0].backward()
        return losses.detach(), [x.grad for x in index]


def expected(case: Case, is_sparse: bool):
    """The same by a formula over all pairs, in FP64."""
    q, k, weights = (x.double().requires_grad_() for x in case.index)
    hidden = ~case.is_compared(is_sparse)
    scores = torch.einsum("nhw,tw->hnt", case.attention.q_NHW.double(), case.attention.rows_TW.double())
    target = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean(0)
    products = torch.einsum("ngj,tj->ngt", q, k) / q.shape[-1] ** 0.5
    index_scores = torch.einsum("ng,ngt->nt", weights, products.relu()).masked_fill(hidden, float("-inf"))
    log_share = index_scores.log_softmax(-1).masked_fill(hidden, 0.0)
    divergence = (torch.special.xlogy(target, target) - target * log_share).sum(-1)
    loss = (divergence * case.is_real).sum()
    loss.backward()
    # Of equal scores, often 0, the first keys are chosen; test_sparse_attention.py judges the choice.
    mass = ((target * case.is_compared(True)).sum(1) * case.is_real).sum()
    return loss.item(), 0.0 if is_sparse else mass.item(), [q.grad, k.grad, weights.grad]


def assert_equal(losses, gradients, wanted):
    loss, mass, wanted_gradients = wanted
    assert losses[0].item() == pytest.approx(loss, rel=TOLERANCE) and loss > 1
    assert losses[1].item() == pytest.approx(mass, rel=TOLERANCE)
    for actual, right in zip(gradients, wanted_gradients, strict=True):
        assert (actual - right).norm() / right.norm() < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["documents", "rows"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["all keys", "chosen keys"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradients_equal_the_formula(seed, is_sparse, packed):
    case = Case(seed, packed=packed)
    assert_equal(*case.run(is_sparse), expected(case, is_sparse))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["all keys", "chosen keys"])
@pytest.mark.parametrize("elements", [1, 2000])
def test_the_result_does_not_depend_on_the_chunks(elements, is_sparse, monkeypatch):
    case = Case(3)
    monkeypatch.setattr(module, "_MAX_ELEMENTS", elements)
    assert_equal(*case.run(is_sparse), expected(case, is_sparse))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["all keys", "chosen keys"])
def test_ranks_with_other_heads_add_up(is_sparse, monkeypatch):
    # Chunks of five queries, which two ranks cannot divide evenly.
    case = Case(4, packed=False)
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 5 * 4 * sum(LENGTHS) if not is_sparse else 5 * 10 * TOP_K)
    halves = [case.attention._replace(q_NHW=case.attention.q_NHW[:, heads]) for heads in (slice(0, 2), slice(2, 4))]
    parts = []
    for rank in range(2):
        monkeypatch.setattr(module, "_sum_over_heads", Sums(case, halves[1 - rank], is_sparse))
        parts.append(case.run(is_sparse, heads=HeadShare(rank, 2, "both"), attention=halves[rank]))
    losses = parts[0][0] + parts[1][0]
    gradients = [sum(pair) for pair in zip(parts[0][1], parts[1][1], strict=True)]
    assert_equal(losses, gradients, expected(case, is_sparse))


class Sums:
    """Adds what the other rank contributes to each chunk, in the order of the chunks."""

    def __init__(self, case: Case, other: AttentionInputs, is_sparse: bool):
        chunks = module._chunks(other, case.index, case.spans, case.chosen if is_sparse else None)
        self._targets = iter([module._target(other, chunk) for chunk in chunks])

    def __call__(self, x, group_name):
        assert group_name == "both"
        return x + next(self._targets)


def test_the_size_of_the_loss_scales_the_gradient():
    case = Case(5)
    index = IndexTensors(*(x.clone().requires_grad_() for x in case.index))
    losses = index_loss(index, case.attention, case.spans, case.chosen, case.is_real, TOP_K)
    (losses[0] * 0.25).backward()
    for x, whole in zip(index, case.run(True)[1], strict=True):
        assert torch.equal(x.grad, whole * 0.25)
