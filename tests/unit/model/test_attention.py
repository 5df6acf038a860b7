"""Who sees whom: documents packed in one row, windows, and padding that nobody notices."""

import torch
import torch.nn.functional as F

from glm46.model.attention import attention_mask, sdpa_core
from glm46.model.router import RoutingOptions


def test_mask_is_causal_inside_document_and_window():
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    mask = attention_mask(documents, positions, 2)
    for i in range(7):
        for j in range(7):
            sees = j <= i and i - j < 2 and documents[0, i] == documents[0, j]
            assert mask[0, 0, i, j] == sees
    assert mask.any(-1).all()  # a row without any key gives NaN


def test_without_documents_or_window_there_is_no_mask():
    assert attention_mask(None, torch.zeros(1, 5), None) is None


def test_core_equals_written_out_softmax():
    q, k, v = torch.randn(2, 7, 6, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2, -1]])
    for mask in (None, attention_mask(documents, documents, None), attention_mask(documents, documents, 2)):
        allowed = torch.ones(7, 7).tril().bool() if mask is None else mask
        scores = torch.einsum("bihc,bjhc->bhij", q, k.repeat_interleave(3, 2)) * 8**-0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        expected = torch.einsum("bhij,bjhc->bihc", weights, v.repeat_interleave(3, 2))
        torch.testing.assert_close(sdpa_core(q, k, v, mask), expected, rtol=0, atol=2e-6)


LENGTHS = (5, 1, 9, 4)


def packed_row(batch):
    """The documents of a batch in which each row is one, behind each other in one row with three tokens of padding."""
    row = dict(
        document_ids=torch.cat([torch.full((n,), d) for d, n in enumerate(LENGTHS)] + [torch.full((3,), -1)])[None],
        positions=torch.cat([torch.arange(n) for n in (*LENGTHS, 3)])[None],
    )
    for key, value in batch.items():
        filler = torch.full((*value.shape[1:-1], 3), -100 if "labels" in key else 0)
        row[key] = torch.cat([value[d, ..., :n] for d, n in enumerate(LENGTHS)] + [filler], dim=-1)[None]
    return row


def each_document(model, batch, options=RoutingOptions()):  # noqa: B008 - frozen
    """Loss sums of every document run by itself."""
    rows = [{key: value[d : d + 1, ..., :n] for key, value in batch.items()} for d, n in enumerate(LENGTHS)]
    return [model(**row, options=options) for row in rows]


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_packed_row_equals_its_documents(tiny_shape, random_model, random_batch, relative_error):
    """Loss, every prediction depth, counts, and every gradient; the padding behind them included."""
    for window in (None, 3):
        shape = tiny_shape(num_nextn_predict_layers=2, sliding_window=window)
        model = random_model(shape)
        batch = random_batch(shape, batch=len(LENGTHS), length=max(LENGTHS))
        packed, alone = model(**packed_row(batch)), each_document(model, batch)
        assert relative_error(packed.loss, sum(s.loss for s in alone)) < 1e-6
        assert relative_error(packed.mtp_losses, sum(s.mtp_losses for s in alone)) < 1e-6
        assert torch.equal(packed.tokens_per_expert, sum(s.tokens_per_expert for s in alone))
        got = gradients(model, packed.loss + packed.mtp_losses.sum())
        want = gradients(model, sum(s.loss + s.mtp_losses.sum() for s in alone))
        whole = torch.stack([g.norm() for g in want.values()]).norm().item()
        # FP32 sums in another order; the floor as in the parity test.
        assert max(relative_error(got[name], want[name], 1e-4 * whole) for name in want) < 1e-5


def test_a_window_hides_what_lies_before_it(tiny_shape, random_model):
    shape = tiny_shape(sliding_window=3, num_hidden_layers=2, first_k_dense_replace=2)
    model = random_model(shape)
    tokens = torch.randint(0, 97, (1, 12))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 97
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    # Two layers of window 3 carry a token four places ahead and no further.
    assert (difference[:5] > 1e-4).all() and (difference[5:] == 0).all()


def test_padding_has_no_influence_and_is_not_counted(tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_nextn_predict_layers=1)
    model = random_model(shape)
    row = packed_row(random_batch(shape, batch=len(LENGTHS), length=max(LENGTHS)))
    options = RoutingOptions(balance_loss=True, z_loss=True)
    base = model(**row, options=options)
    other = {key: value.clone() for key, value in row.items()}
    other["input_ids"][:, -3:] = 96
    other["mtp_input_ids"][..., -3:] = 95
    changed = model(**other, options=options)
    for field in ("tokens_per_expert", "overflow"):
        assert torch.equal(getattr(base, field), getattr(changed, field)), field
    for field in ("loss", "mtp_losses", "aux_losses"):
        # Not to the bit: padding changes how many rows an expert multiplies, and with them the order of its sums.
        torch.testing.assert_close(getattr(base, field), getattr(changed, field), rtol=1e-6, atol=0)
    real_assignments = sum(LENGTHS) * shape.num_experts_per_tok
    assert base.tokens_per_expert.sum(-1).tolist() == [real_assignments] * 3
    grads = gradients(model, base.loss + base.mtp_losses.sum() + base.aux_losses.sum())
    unused = [t for t in range(97) if t not in row["input_ids"][0, :-3] and t not in row["mtp_input_ids"][0, 0, :-3]]
    assert 0 in unused or (row["input_ids"][0, :-3] == 0).any()
    assert (grads["embed_tokens.weight"][unused] == 0).all()


def test_positions_restart_with_the_document(tiny_shape, random_model):
    """Positions enter through rotation only, which sees differences: a shift changes nothing but rounding."""
    model = random_model(tiny_shape())
    tokens = torch.randint(0, 97, (1, 16))
    shifted = model(tokens, positions=torch.arange(16)[None] + 100)
    torch.testing.assert_close(model(tokens), shifted, rtol=0, atol=2e-4)
    stretched = model(tokens, positions=torch.arange(16)[None] * 2)
    assert F.mse_loss(model(tokens), stretched) > 1e-4
