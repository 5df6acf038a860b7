"""Attention against the mask of all pairs, in packed rows, on parts of a ring, and in the memory that it takes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.compute.distributed.sequence import SequenceShard
from glm46.compute.model import attention_runs
from glm46.compute.model.attention import attend
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.attention_runs import (
    block_attention,
    describe_core,
    part_attention,
    part_attention_backward,
    plain_attention,
    plain_attention_backward,
    use_attention_kernel,
)
from glm46.compute.model.router import RoutingOptions
from glm46.config.errors import UserError


def dense(q, k, v, documents, window):
    """Attention with a mask of all pairs, written out."""
    order = torch.arange(q.shape[1])
    distance = order.unsqueeze(1) - order
    seen = (distance >= 0) & (distance < (window or math.inf))
    if documents is not None:
        seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1))
    else:
        seen = seen.expand(q.shape[0], -1, -1)
    groups = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihc,bjhc->bhij", q, k.repeat_interleave(groups, 2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen.unsqueeze(1), -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhc->bihc", weights, v.repeat_interleave(groups, 2))


def random_packing(rows, length, generator):
    """Documents of one token, of a few, of many, and as long as the row; every second row ends with padding."""
    ids = torch.empty(rows, length, dtype=torch.int64)
    for b, row in enumerate(ids):
        start = number = 0
        while start < length:
            size = (1, 3, 17, 150, length)[int(torch.randint(5, (), generator=generator))]
            row[start : start + size] = number
            start, number = start + size, number + 1
        row[length - 5 * (b % 2) :] = -1
    return ids


def of_ranks(q, k, v, documents, window, ranks):
    """What context-parallel ranks compute, in one process: each its own queries with the keys that it gets."""
    (B, S), heads = q.shape[:2], k.shape[2]
    places = SequenceShard(None, ranks, 0).places(documents, (B, S), window)
    layouts = [attention_layout(documents, (B, S), window, places, rank) for rank in range(ranks)]

    def part(x, rank):
        return x.gather(1, places[:, rank, :, None, None].expand(-1, -1, *x.shape[2:]))

    def of_runs(x, rank):
        parts = [part(x, other).flatten(0, 1) for other in range(ranks)]
        if window is not None:
            exchanges = [layout.exchange for layout in layouts]
            parts = [
                own[exchange.tokens.split(exchange.send)[rank]] for own, exchange in zip(parts, exchanges, strict=True)
            ]
            assert [len(own) for own in parts] == exchanges[rank].receive
        return torch.cat(parts)[layouts[rank].exchange.keys].unsqueeze(0)

    out = torch.zeros_like(q)
    for rank in range(ranks):
        keys, values = of_runs(k, rank), of_runs(v, rank)
        assert keys.shape[2] == heads
        index = places[:, rank, :, None, None].expand(-1, -1, *q.shape[2:])
        out = out.scatter(1, index, attend(part(q, rank), keys, values, layouts[rank]._replace(exchange=None)))
    return out


@pytest.mark.parametrize("packed", [True, False], ids=["documents", "rows"])
def test_a_window_limits_what_ranks_send_each_other(packed):
    """A rank gets each key that its queries see once, and no other: with 8 ranks and a window of 1/64 of the row, at
    most two chunks and a flat part with a window before each."""
    ranks, length, window = 8, 4096, 64
    documents = torch.arange(2).repeat_interleave(length // 2)[None] if packed else None
    places = SequenceShard(None, ranks, 0).places(documents, (1, length), window)
    for rank in range(ranks):
        layout = attention_layout(documents, (1, length), window, places, rank)
        seen = torch.zeros(length, dtype=torch.bool)
        for token in places[0, rank].tolist():
            first = max(token - window + 1, token // (length // 2) * (length // 2) if packed else 0)
            seen[first : token + 1] = True
        assert sum(layout.exchange.receive) == int(seen.sum()) == len(layout.exchange.keys.unique())
        assert sum(layout.exchange.receive) <= length // ranks + 3 * window * (1 + packed)


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("packed", [True, False], ids=["documents", "rows"])
def test_runs_equal_the_mask_of_all_pairs(packed, window, ranks):
    """Outputs and all gradients, with one key head for twelve query heads and with one for three."""
    generator = torch.Generator().manual_seed(0)
    for rows, length, heads, dtype in ((2, 400, 1, torch.float64), (3, 216, 4, torch.float32)):
        documents = random_packing(rows, length, generator) if packed else None
        q, k, v, grad = (
            torch.randn(rows, length, n, 8, dtype=dtype, generator=generator, requires_grad=n != 0)
            for n in (12, heads, heads, 12)
        )
        if ranks == 1:
            out = attend(q, k, v, attention_layout(documents, (rows, length), window))
        else:
            out = of_ranks(q, k, v, documents, window, ranks)
        expected = dense(q, k, v, documents, window)
        bound = 1e-13 if dtype == torch.float64 else 1e-5
        assert error(out, expected) < bound
        got, want = (torch.autograd.grad(x, (q, k, v), grad) for x in (out, expected))
        for name, a, b in zip("qkv", got, want, strict=True):
            assert error(a, b) < bound, name


def test_a_window_of_one_sees_the_own_key_only():
    q, k, v = torch.randn(1, 200, 4, 8), torch.randn(1, 200, 2, 8), torch.randn(1, 200, 2, 8)
    out = attend(q, k, v, attention_layout(None, (1, 200), 1))
    torch.testing.assert_close(out, v.repeat_interleave(2, 2), rtol=0, atol=1e-6)


def test_the_bf16_error_is_that_of_the_dense_form():
    """Against FP64 from the same BF16 values; both round scores' inputs and results alike."""
    generator = torch.Generator().manual_seed(0)
    documents = random_packing(2, 300, generator)
    q, k, v, grad = (torch.randn(2, 300, n, 32, generator=generator).bfloat16() for n in (8, 2, 2, 8))

    def results(core, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = core(*inputs)
        return out, *torch.autograd.grad(out, inputs, grad.to(dtype))

    layout = attention_layout(documents, (2, 300), None)
    exact = results(lambda *x: dense(*x, documents, None), torch.float64)
    masked = results(lambda *x: dense(*x, documents, None), torch.bfloat16)
    ours = results(lambda *x: attend(*x, layout), torch.bfloat16)
    for a, b, truth in zip(ours, masked, exact, strict=True):
        assert error(a.double(), truth) < 1.5 * error(b.double(), truth) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernel_equals_products(dtype):
    """`plain_attention` is what a GPU runs in FP32. BF16: weights are rounded once in one, and not in the other."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(n, h, 16, generator=generator).to(dtype) for n, h in ((40, 6), (90, 2), (90, 2), (40, 6))
    )
    lengths = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([0, 90], dtype=torch.int32)
    bound = 1e-6 if dtype == torch.float32 else 2 * 2**-8
    causal = (torch.arange(90) <= torch.arange(50, 90).unsqueeze(1)).unsqueeze(0)
    one = [x.transpose(0, 1).unsqueeze(0) for x in (grad, q, k, v)]
    out, log_sum = plain_attention(*one[1:], causal)
    got, got_sum = block_attention(q, k, v, *lengths, None, True)
    assert error(got, out[0].transpose(0, 1)) < bound and error(got_sum, log_sum[0]) < bound
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    of_kernel = torch.autograd.grad(block_attention(*inputs, *lengths, None, True)[0], inputs, grad)
    for a, b in zip(of_kernel, plain_attention_backward(*one, out, log_sum, causal), strict=True):
        assert error(a, b[0].transpose(0, 1)) < bound


def test_the_operator_keeps_its_promises_to_the_compiler():
    layout = attention_layout(torch.tensor([[0] * 5 + [1] * 7]), (1, 12), None)
    inputs = [torch.randn(12, n, 8, requires_grad=True) for n in (4, 2, 2)]
    torch.library.opcheck(block_attention, (*inputs, layout.cu_seq_q, layout.cu_seq_k, 3, True))


class _Sizes(TorchDispatchMode):
    """Notes the largest tensor that any operator makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **keywords or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self.largest = max(self.largest, tensor.numel()) if isinstance(tensor, torch.Tensor) else self.largest
        return result


def _largest_of_graphs(function, *arguments):
    """The largest tensor in the graphs that `torch.compile` makes of forward and backward."""
    sizes = []

    def look(graph, inputs):
        values = [node.meta.get("val") for node in graph.graph.nodes]
        sizes.append(max(int(value.numel()) for value in values if isinstance(value, torch.Tensor)))
        return make_boxed_func(graph.forward)

    torch.compile(function, backend=aot_autograd(fw_compiler=look), fullgraph=True)(*arguments).sum().backward()
    assert len(sizes) == 2
    return max(sizes)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("window", [None, 4096])
def test_flash_gets_runs_and_no_tensor_of_pairs_exists(ranks, window, compiled):
    """On the meta device, in the heads of GLM-4.6 and a row of 196,608 tokens of 16 documents."""
    length = 196_608
    documents = torch.arange(16).repeat_interleave(length // 16).unsqueeze(0)
    places = None if ranks == 1 else SequenceShard(None, ranks, 0).places(documents, (1, length), window)
    layout = attention_layout(documents, (1, length), window, places, 0).to(torch.device("meta"))
    keys = length if ranks == 1 else len(layout.exchange.keys)
    layout = layout._replace(exchange=None)  # its keys are here already
    q = torch.empty(1, length // ranks, 96, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k, v = (torch.empty(1, keys, 8, 128, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    if compiled:
        largest = _largest_of_graphs(attend, q, k, v, layout)
    else:
        with _Sizes() as sizes:
            attend(q, k, v, layout).sum().backward()
        largest = sizes.largest
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
    assert largest <= max(q.numel(), k.numel()) and keys <= 1.25 * length
    # What the kernel is told: every run within its document, and one tensor where queries and keys are the same.
    assert (layout.cu_seq_q is layout.cu_seq_k) == (ranks == 1)
    longest = 16_384  # the power of two after length // 16
    assert layout.max_k <= longest and layout.max_q <= longest and layout.window == window


def test_runs_and_the_longest_of_them_take_few_values():
    """Plans of cuDNN and code of compiled layers are kept for each of them."""
    bounds = set()
    for longest in [*range(1, 2100), 196_607, 196_608]:
        documents = torch.tensor([[0] * longest + [1]])
        layout = attention_layout(documents, documents.shape, None)
        assert layout.max_k == layout.max_q and longest <= layout.max_q <= max(256, 2 * longest)
        bounds.add(layout.max_q)
    assert bounds == {256, 512, 1024, 2048, 4096, 2**18}
    for runs in range(1, 40):
        layout = attention_layout(torch.arange(runs).unsqueeze(0), (1, runs), None)
        given = len(layout.cu_seq_q) - 1
        assert given in (8, 16, 32, 64) and runs <= given <= max(8, 2 * runs)
        assert layout.cu_seq_q.tolist() == [*range(runs), *[runs] * (given - runs + 1)]


@pytest.mark.parametrize(("rows", "S", "mean"), [(1, 2048, 1000), (1, 4096, 1000), (2, 8192, 2000), (1, 32768, 2000)])
def test_packed_micro_batches_meet_few_plans(rows, S, mean):
    """2,000 micro-batches of documents of exponential lengths: the kernel's keys are the number of runs and max_q."""
    rng, plans = np.random.default_rng(0), set()
    for _ in range(2000):
        ends = rng.exponential(mean, (rows, 4 * S // mean + 50)).astype(int).cumsum(1)
        documents = np.stack([np.searchsorted(of_row, np.arange(S), side="right") for of_row in ends])
        layout = attention_layout(torch.from_numpy(documents), (rows, S), None)
        plans.add((len(layout.cu_seq_q), layout.max_q))
    assert 2 <= len(plans) <= 12


def test_without_documents_or_window_a_row_is_plainly_causal():
    assert attention_layout(None, (2, 5), None) is None


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
        batch = random_batch(shape, rows=len(LENGTHS), length=max(LENGTHS))
        packed, alone = model(**packed_row(batch)), each_document(model, batch)
        assert relative_error(packed.loss, sum(s.loss for s in alone)) < 1e-6
        assert relative_error(packed.mtp_losses, sum(s.mtp_losses for s in alone)) < 1e-6
        assert torch.equal(packed.tokens_per_expert, sum(s.tokens_per_expert for s in alone))
        got = gradients(model, packed.loss + packed.mtp_losses.sum())
        want = gradients(model, sum(s.loss + s.mtp_losses.sum() for s in alone))
        whole = torch.stack([g.norm() for g in want.values()]).norm().item()
        # FP32 sums in another order; the floor as in the parity test.
        assert max(relative_error(got[name], want[name], 1e-4 * whole) for name in want) < 1e-5


def test_documents_that_share_a_prefix_equal_each_with_its_own(tiny_shape, random_model, random_batch, relative_error):
    """Loss and every gradient, in two rows; one document has no prefix, and padding is behind them."""
    shape, shared, lengths = tiny_shape(num_nextn_predict_layers=0), 4, (3, 1, 5)
    model, batch = random_model(shape), random_batch(shape, rows=2, length=shared + sum(lengths) + 2 + 3)
    sizes = [shared, *lengths, 2, 3]
    document = torch.repeat_interleave(torch.tensor([0, 1, 2, 3, 4, -1]), torch.tensor(sizes))
    ids, labels = batch["input_ids"], batch["labels"].masked_fill(document < 1, -100)
    starts = [0, shared, shared, shared, 0, 0]
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, sizes, strict=True)])
    prefix = torch.where((document > 0) & (document < 4), 0, -1)
    both = [x.expand_as(ids) for x in (document, positions, prefix)]
    layout = attention_layout(both[0], tuple(ids.shape), None, prefix_ids=both[2])
    assert len(layout.exchange.keys) == 2 * (sum(sizes) + 3 * shared)

    def alone(number):
        places = torch.cat([torch.arange(shared * (number < 4)), (document == number).nonzero()[:, 0]])
        return model(input_ids=ids[:, places], labels=labels[:, places]).loss

    together = model(input_ids=ids, labels=labels, positions=both[1], layout=layout, is_real=both[0] >= 0)
    apart = sum(alone(number) for number in range(1, 5))
    assert relative_error(together.loss, apart) < 1e-6
    assert int(together.tokens_per_expert[0].sum()) == 2 * (sum(sizes) - 3) * shape.num_experts_per_tok
    got, want = gradients(model, together.loss), gradients(model, apart)
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


def test_positions_restart_with_the_document(tiny_shape, random_model):
    """Positions enter through rotation only, which sees differences: a shift changes nothing but rounding."""
    model = random_model(tiny_shape())
    tokens = torch.randint(0, 97, (1, 16))
    shifted = model(tokens, positions=torch.arange(16)[None] + 100)
    torch.testing.assert_close(model(tokens), shifted, rtol=0, atol=2e-4)
    stretched = model(tokens, positions=torch.arange(16)[None] * 2)
    assert F.mse_loss(model(tokens), stretched) > 1e-4


@pytest.mark.parametrize("packed", [True, False], ids=["documents", "rows"])
def test_parts_of_a_ring_on_flash_hold_no_more_than_a_part_of_the_keys(packed):
    """On the meta device, at a million tokens: shapes of the flash kernel's operators, forward and backward."""
    length, ranks = 1_048_576, 4
    documents = torch.arange(8).repeat_interleave(length // 8)[None] if packed else None
    places = SequenceShard(None, ranks, 0).places(documents, (1, length), None)
    ring = attention_layout(documents, (1, length), None, places, 1, ring=True).exchange
    own = length // ranks
    q, grad = (torch.empty(own, 12, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k, v = (torch.empty(own, 1, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    for distance, part in enumerate(ring.apply(lambda tensor: tensor.to("meta")).parts):
        assert len(part.queries) <= own and len(part.keys) <= 2 * own
        keys = [x.index_select(0, part.keys) for x in (k, v)]
        queries, of_out = (x.index_select(0, part.queries) for x in (q, grad))
        out, log_sum = part_attention(queries, *keys, part.layout, causal=distance == 0)
        assert out.shape == queries.shape and log_sum.shape == (12, len(part.queries))
        grads = part_attention_backward(of_out, queries, *keys, out, log_sum, part.layout, causal=distance == 0)
        assert [x.shape for x in grads] == [queries.shape, keys[0].shape, keys[1].shape]


def around_a_ring(q, k, v, grad, documents, ranks):
    """Result and gradients of attention computed part by part, as the ranks of a ring do, in one process."""
    (B, S), wide = q.shape[:2], torch.promote_types(q.dtype, torch.float32)
    places = SequenceShard(None, ranks, 0).places(documents, (B, S), None)
    tokens = [(places[:, rank] + torch.arange(B).unsqueeze(1) * S).flatten().to(q.device) for rank in range(ranks)]
    flat = q, k, v, grad = [x.flatten(0, 1) for x in (q, k, v, grad)]
    results = [torch.zeros_like(x, dtype=wide) for x in flat]
    for rank, own in enumerate(tokens):
        ring = attention_layout(documents, (B, S), None, places, rank, ring=True).exchange
        parts = [(part, own[part.queries], tokens[rank - i][part.keys], i == 0)
                 for i, part in enumerate(ring.apply(lambda x: x.to(q.device)).parts) if len(part.queries)]  # fmt: skip
        found = [part_attention(q[at], k[keys], v[keys], part.layout, causal=c) for part, at, keys, c in parts]
        log_sum = torch.full((q.shape[1], B * S), -math.inf, dtype=wide, device=q.device)
        for (_, at, *_), (_, of_part) in zip(parts, found, strict=True):
            log_sum[:, at] = torch.logaddexp(log_sum[:, at], of_part.to(wide))
        for (_, at, *_), (out, of_part) in zip(parts, found, strict=True):
            results[3][at] += (of_part - log_sum[:, at]).exp().t().unsqueeze(2) * out
        for part, at, keys, causal in parts:
            whole = results[3][at].to(q.dtype), log_sum[:, at].contiguous()
            grads = part_attention_backward(grad[at], q[at], k[keys], v[keys], *whole, part.layout, causal=causal)
            for result, index, of_part in zip(results, (at, keys, keys), grads, strict=False):
                result.index_add_(0, index, of_part.to(wide))
    return [results[3], *results[:3]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False], ids=["documents", "rows"])
def test_parts_of_the_keys_give_the_softmax_of_all(packed, ranks):
    generator = torch.Generator().manual_seed(0)
    documents = random_packing(2, 400, generator) if packed else None
    q, k, v, grad = (torch.randn(2, 400, n, 8, dtype=torch.float64, generator=generator) for n in (12, 1, 1, 12))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = dense(*inputs, documents, None)
    wanted = [expected, *torch.autograd.grad(expected, inputs, grad)]
    with torch.no_grad():
        found = around_a_ring(q, k, v, grad, documents, ranks)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want.flatten(0, 1)) < 1e-13


class FakeKernels:
    """What a package of flash attention registers with torch."""

    def __init__(self):
        self.is_active = True

    def remove(self) -> None:
        self.is_active = False


@pytest.fixture
def registered(monkeypatch):
    """Kernels of FA3 as their package would register them; FA4 as one that is not installed."""

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'flash_attn'")

    registry, kernels = torch.nn.attention._registry, FakeKernels()
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", {"FA3": lambda: kernels, "FA4": missing})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_runs, "_attend_once", lambda *_: None)
    yield kernels
    torch.nn.attention.restore_flash_attention_impl()


def test_the_attention_kernel_that_a_run_names_is_active_and_named(registered):
    gpu = torch.device("cuda")
    use_attention_kernel("default", 128, None)
    assert describe_core(gpu, torch.bfloat16) == "variable-length flash attention"
    use_attention_kernel("FA3", 128, None)
    assert registered.is_active and describe_core(gpu, torch.bfloat16) == "variable-length flash attention, FA3"
    torch.nn.attention.restore_flash_attention_impl()
    assert not registered.is_active


def test_a_package_that_does_not_fit_torch_is_refused_before_the_first_step(registered, monkeypatch):
    def unpack(*_) -> None:
        raise ValueError("too many values to unpack (expected 2)")

    monkeypatch.setattr(attention_runs, "_attend_once", unpack)
    with pytest.raises(UserError, match='"FA3": torch .* this version of the package .*too many values.*another one'):
        use_attention_kernel("FA3", 128, None)
    assert not registered.is_active and describe_core(torch.device("cuda"), torch.bfloat16).endswith("flash attention")


def test_an_attention_kernel_that_cannot_run_is_refused(registered, monkeypatch):
    with pytest.raises(UserError, match='model.attention_kernel = "FA4": .*flash_attn.*install the package'):
        use_attention_kernel("FA4", 128, None)
    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_IMPLS", {})
    with pytest.raises(UserError, match='"FA3": torch .* knows none; update torch, or set "default"'):
        use_attention_kernel("FA3", 128, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match='"FA3": these kernels run on a GPU'):
        use_attention_kernel("FA3", 128, None)


def test_sixteen_documents_cost_a_tenth_of_one(monkeypatch):
    """Pairs of queries and keys that are computed, seen or not, forward and backward: what time grows with. Seconds
    followed them where nothing else ran, and did not on a machine that was busy otherwise."""
    original, pairs = attention_runs._blocks, {1: [], 16: []}
    length, (q, k, v) = 8192, (torch.randn(1, 8192, n, 16, requires_grad=True) for n in (2, 1, 1))
    for documents, counted in pairs.items():

        def counting(*arguments, counted=counted):
            for block in original(*arguments):
                counted.append(block.mask.numel())
                yield block

        monkeypatch.setattr(attention_runs, "_blocks", counting)
        ids = torch.arange(length).div(length // documents, rounding_mode="floor").unsqueeze(0)
        attend(q, k, v, attention_layout(ids, (1, length), None)).sum().backward()
    assert length**2 <= sum(pairs[1]) <= 1.05 * length**2  # twice half of all
    assert sum(pairs[16]) <= sum(pairs[1]) / 10


def test_short_runs_are_computed_together_with_little_padding():
    """The samples of a rollout: 32 prompts of 15 tokens, and 8 completions of each, which see theirs."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randint(5, 11, (32, 8), generator=generator)
    queries = torch.cat([torch.full((32, 1), 15), own], 1).flatten()
    keys = torch.cat([torch.full((32, 1), 15), own + 15], 1).flatten()
    ends = [F.pad(sizes.cumsum(0), (1, 0)).int() for sizes in (queries, keys)]
    blocks = list(attention_runs._blocks(*ends, None, True, 4, 2))
    assert len(blocks) <= 6
    # With the heads of GLM-4.5 a block has fewer runs, so that its scores need no more memory.
    of_many = list(attention_runs._blocks(*ends, None, True, 96, 8))
    assert max(block.mask.numel() for block in of_many) * 96 <= 2**18
    assert sum(block.mask.numel() for block in blocks) <= 1.25 * int((queries * keys).sum())
    for index, total in ((0, 4 * int(queries.sum())), (1, 2 * int(keys.sum()))):
        rows = torch.cat([block[index].indices for block in blocks])
        assert torch.equal(rows[rows < total].sort().values, torch.arange(total))
