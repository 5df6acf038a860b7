"""The model on a CUDA device: BF16 grouped matmul, bit-for-bit repeatability, one training step."""

import math

import pytest
import torch

from glm46.compute.distributed.process import use_deterministic_kernels
from glm46.compute.model import quantised_weights
from glm46.compute.model.attention import attend
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.cross_entropy import summed_loss, token_logprobs
from glm46.compute.model.dispatch import LocalDispatcher
from glm46.compute.model.experts import grouped_mm
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.quantised_weights import in_compute_type, let_conversions_compile
from glm46.compute.model.router import Routing, RoutingOptions, fp32_linear
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import activation_checkpoint
from glm46.compute.parallelize import compile as layer_compile
from glm46.config.presets import PRESETS
from glm46.operate.estimate.activations import attention_backward_bytes
from glm46.run.context_keys import kernel_runs
from glm46.run.sizes import loss_chunk_tokens
from glm46.storage.huggingface.import_weights import quantise_base
from tests.unit.compute.model.test_attention import around_a_ring, dense, random_packing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def debug_model(dtype):
    shape = PRESETS["debug"]
    model = Transformer(shape).cuda()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        indices = [torch.arange(n) for n in tensor.shape]
        fill_parameter(tensor.data, indices, tuple(tensor.shape), seed=1, name=name, std=shape.initializer_range)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def debug_batch(model, batch=4, length=512):
    generator = torch.Generator(device="cuda").manual_seed(0)

    def ids(*size):
        return torch.randint(0, model.shape.vocab_size, size, generator=generator, device="cuda")

    return dict(
        input_ids=ids(batch, length), labels=ids(batch, length),
        mtp_input_ids=ids(batch, 1, length), mtp_labels=ids(batch, 1, length),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_of_runs_equals_the_mask_of_all_pairs(window, dtype):
    """Flash in BF16, products in FP32, against FP64 on the CPU from the same values. BF16 rounds weights and results to
    2**-9 each; gradients pass two more products of rounded values."""
    generator = torch.Generator().manual_seed(0)
    documents = random_packing(2, 400, generator)
    q, k, v, grad = (torch.randn(2, 400, n, 64, generator=generator).to(dtype) for n in (12, 4, 4, 12))
    inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, attention_layout(documents, (2, 400), window).to(torch.device("cuda")))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(*exact, documents, window)
    found = (out, *torch.autograd.grad(out, inputs, grad.cuda()))
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    for got, want in zip(found, wanted, strict=True):
        error = ((got.cpu().double() - want).norm() / want.norm()).item()
        assert error < (2**-7 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_whole_rows_is_causal(dtype):
    """Rows without documents have a kernel of their own, which takes fewer key heads; bounds as above."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 400, n, 64, generator=generator).to(dtype) for n in (12, 4, 4, 12))
    inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, expected = attend(*inputs, None), dense(*exact, torch.zeros(2, 400, dtype=torch.int64), None)
    found = (out, *torch.autograd.grad(out, inputs, grad.cuda()))
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    for got, want in zip(found, wanted, strict=True):
        error = ((got.cpu().double() - want).norm() / want.norm()).item()
        assert error < (2**-7 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.usefixtures("nondeterministic_afterwards")
@pytest.mark.parametrize("documents", [1, 8])
def test_the_backward_of_attention_allocates_what_is_planned(documents):
    """By the flash kernel, in the heads of GLM-4.5-Air. The allocator rounds each tensor up to 512 bytes."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    shape, tokens = PRESETS["GLM-4.5-Air"], 4096
    heads = shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads
    inputs = [torch.randn(1, tokens, n, shape.head_dim, device="cuda").bfloat16().requires_grad_() for n in heads]
    ids = torch.arange(tokens).view(1, -1) // (tokens // documents)
    out = attend(*inputs, attention_layout(ids, (1, tokens), None).to(torch.device("cuda")))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    peak = torch.cuda.max_memory_allocated() - before
    planned = attention_backward_bytes(shape, 2, queries=tokens, keys=tokens, runs=kernel_runs(documents))
    assert peak == pytest.approx(planned, rel=0.01)


def test_the_router_product_of_bf16_is_fp32():
    """The GPU's own product of BF16 operands with an FP32 result, against FP64: within 1e-5, as any sum in FP32.
    Gradients are rounded to BF16, by 2**-8 at most, and their FP32 factor is split to 2**-16."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(size, generator=generator) for size in ((512, 4096), (128, 4096), (512, 128)))
    exact = [tensor.bfloat16().double().requires_grad_() for tensor in (x, weight)]
    inputs = [tensor.bfloat16().cuda().requires_grad_() for tensor in (x, weight)]
    expected, out = torch.nn.functional.linear(*exact), fp32_linear(*inputs)
    found = (out, *torch.autograd.grad(out, inputs, grad.cuda()))
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    for got, want, bound in zip(found, wanted, (1e-5, 2**-8 + 2**-16, 2**-8 + 2**-16), strict=True):
        assert ((got.cpu().double() - want).norm() / want.norm()).item() < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_the_keys_give_the_softmax_of_all(dtype):
    """The operators that a ring of context-parallel ranks uses; bounds as above, and BF16 rounds each part."""
    generator = torch.Generator().manual_seed(0)
    documents = random_packing(2, 400, generator)
    q, k, v, grad = (torch.randn(2, 400, n, 64, generator=generator).to(dtype) for n in (12, 4, 4, 12))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(*exact, documents, None)
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    found = around_a_ring(*(x.cuda() for x in (q, k, v, grad)), documents, ranks=4)
    for got, want in zip(found, wanted, strict=True):
        error = ((got.cpu().double() - want.flatten(0, 1)).norm() / want.norm()).item()
        assert error < (2**-6 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("sizes", [[300, 0, 212, 512], [0, 0, 0, 1024], [256] * 4, [0] * 4], ids=str)
def test_bf16_grouped_matmul_and_gradients_equal_a_loop(sizes):
    """Each result is a sum in FP32 rounded once to BF16: 2**-8 at most, half of it on average. No rows at all are what
    a rank of expert parallelism can get."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(sum(sizes), 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    stored = torch.randn(4, 384, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(sum(sizes), 384, device="cuda", generator=generator).bfloat16()
    offsets = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    out = grouped_mm(x, stored.transpose(1, 2), offsets)
    out.backward(grad)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        rows_x, weight, rows_grad = x.detach()[rows].double(), stored.detach()[e].double(), grad[rows].double()
        pairs = [(out[rows], rows_x @ weight.t()), (x.grad[rows], rows_grad @ weight)]
        for ours, want in [*pairs, (stored.grad[e], rows_grad.t() @ rows_x)]:
            if size == 0:
                assert (ours == 0).all()
            else:
                assert (ours.double() - want).norm() / want.norm() < 3e-3


def test_rows_behind_the_last_group_are_never_read():
    """Padded groups leave such rows; forward and both gradients are those without them. A gradient that was expanded
    has strides that kernels refuse."""
    x, stored = (torch.randn(*size, device="cuda").bfloat16() for size in ((512, 256), (4, 384, 256)))
    offsets = torch.tensor([100, 100, 300, 384], device="cuda", dtype=torch.int32)
    results = []
    for rows in (x[:384], torch.cat([x[:384], torch.full_like(x[384:], torch.nan)])):
        inputs = [tensor.clone().requires_grad_() for tensor in (rows, stored)]
        out = grouped_mm(inputs[0], inputs[1].transpose(1, 2), offsets)
        out[:384].sum().backward()
        results.append((out.detach()[:384], inputs[0].grad[:384], inputs[1].grad))
    assert all(torch.equal(with_more, alone) for alone, with_more in zip(*results, strict=True))
    assert all(tensor.isfinite().all() for tensor in results[1])


def test_gather_and_combine_repeat_every_bit():
    generator = torch.Generator(device="cuda").manual_seed(0)
    choice = torch.rand(4096, 32, device="cuda", generator=generator).argsort(-1)[:, :8]
    weights = torch.rand(4096, 8, device="cuda", generator=generator)
    x = torch.randn(4096, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(4096 * 8, 512, device="cuda", generator=generator).bfloat16()
    results = []
    for _ in range(5):
        x.grad = None
        dispatcher = LocalDispatcher()
        (rows, sorted_weights, offsets), way, _ = dispatcher.arrived(
            dispatcher.start(x, Routing(weights, choice, None), 32)
        )
        out = dispatcher.combine(rows * sorted_weights.unsqueeze(1).bfloat16(), way)
        rows.backward(grad)
        results.append((rows.detach().clone(), out.detach().clone(), x.grad.clone(), offsets.clone()))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))
    token = choice.flatten().argsort(stable=True) // 8
    want = torch.zeros(4096, 512, device="cuda", dtype=torch.float64).index_add(0, token, grad.double())
    assert (results[0][2].double() - want).norm() / want.norm() < 3e-3


@pytest.mark.usefixtures("nondeterministic_afterwards")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_steps_lower_the_loss_and_repeat_every_bit(dtype):
    """The loss starts at log(vocabulary), falls when one batch is learnt, and two runs are the same to the bit. The
    backward of flash attention sums in a fixed order only if torch is told so."""
    use_deterministic_kernels()
    losses = []
    for _ in range(2):
        model = debug_model(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        batch, run = debug_batch(model), []
        for _ in range(5):
            sums = model(**batch, options=RoutingOptions(balance_loss=True, z_loss=True))
            tokens = batch["labels"].numel()
            ((sums.loss + 0.3 * sums.mtp_losses.sum() + 1e-4 * sums.aux_losses.sum()) / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append((sums.loss / tokens).item())
        assert run[0] == pytest.approx(math.log(model.shape.vocab_size), abs=0.2)
        assert run[-1] < run[0] - 0.3
        losses.append(run)
    assert losses[0] == losses[1]


def layout_of(lengths):
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    return attention_layout(documents, tuple(documents.shape), None).to(torch.device("cuda"))


def test_compiled_layers_are_not_compiled_again_for_other_documents():
    """By inductor, against eager layers; each of both rounds BF16 in other places, which may change an expert."""
    torch.compiler.reset()
    model, compiled = debug_model(torch.bfloat16), debug_model(torch.bfloat16)
    layer_compile.apply(compiled, whole_graphs=True)
    batch = debug_batch(model, batch=2)
    for call, lengths in enumerate(([128] * 4, [129, 383], [100, 156, 256], [512], [1] * 512, [320, 192])):
        layout = layout_of(lengths)
        with torch.compiler.set_stance("default" if call == 0 else "fail_on_recompile"):
            found = compiled(**batch, layout=layout)
            (found.loss + found.mtp_losses.sum()).backward()
        wanted = model(**batch, layout=layout)
        (wanted.loss + wanted.mtp_losses.sum()).backward()
        assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-3), lengths
    norms = [torch.nn.utils.get_total_norm([p.grad.float() for p in each.parameters()]) for each in (model, compiled)]
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=0.05)


COUNTED = "aten::_flash_attention_forward", "aten::_grouped_mm"
"""Called by the operators that are saved, once each time that one is computed."""


@pytest.mark.usefixtures("nondeterministic_afterwards")
def test_selective_checkpointing_repeats_neither_attention_nor_experts():
    """And changes no bit of a gradient."""
    use_deterministic_kernels()
    results = {}
    for mode in ("none", "selective", "full"):
        model = debug_model(torch.bfloat16)
        if mode != "none":
            activation_checkpoint.apply(model, mode)
        batch = debug_batch(model, batch=2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            sums = model(**batch, layout=layout_of([100, 156, 256]))
            (sums.loss + sums.mtp_losses.sum()).backward()
            torch.cuda.synchronize()
        calls = {event.key: event.count for event in profile.key_averages()}
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results[mode] = [calls[name] for name in COUNTED], gradients
    (calls, gradients), (of_selective, found), (of_full, _) = results.values()
    assert of_selective == calls and all(repeated > once for repeated, once in zip(of_full, calls, strict=True))
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("by_token", [False, True])
def test_loss_memory_does_not_hold_all_logits(by_token):
    """At GLM's vocabulary: all logits of 16,384 tokens in FP32 would be 9.9 GB."""
    tokens, vocabulary, width = 16384, 151552, 512
    hidden = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if by_token:
        loss = -token_logprobs(hidden, weight, labels).logprobs.sum()
    else:
        loss = summed_loss(hidden, weight, labels).loss
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert loss.item() / tokens == pytest.approx(math.log(vocabulary), abs=0.3)
    # A chunk of logits in BF16 and in FP32; the weight's gradient in FP32, in BF16, and times that of the loss; and
    # those of the hidden states, of labels and of a kernel's workspace, 2 % of it.
    chunk = loss_chunk_tokens(is_trained=True, device="cuda")
    assert peak < 1.02 * (chunk * vocabulary * (2 + 4) + vocabulary * width * (4 + 2 + 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base_dtype", ["int4", "nf4"])
def test_weights_of_4_bits_have_the_bits_of_a_cpu(base_dtype, dtype, monkeypatch):
    """By operators and by one kernel."""
    monkeypatch.setattr(quantised_weights, "_one_kernel", None)
    torch.manual_seed(0)
    weight, scales = quantise_base(torch.randn(4, 96, 256) * 0.05, base_dtype)
    expected = in_compute_type(weight, scales, dtype)
    assert torch.equal(in_compute_type(weight.cuda(), scales.cuda(), dtype).cpu(), expected)
    let_conversions_compile()
    assert torch.equal(in_compute_type(weight.cuda(), scales.cuda(), dtype).cpu(), expected)
