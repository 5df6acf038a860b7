"""Grouped experts, and bringing tokens to them and back, against plain loops and plain indexing."""

import pytest
import torch
import torch.nn.functional as F

from glm46 import compat
from glm46.compute.model.dispatch import LocalDispatcher, pad_groups, sort_assignments
from glm46.compute.model.experts import Experts, grouped_mm, grouped_outer
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import Routing, RoutingOptions

# Rows per expert: uneven, with empty experts at both ends and in the middle; all rows at one; no row at all.
GROUPS = {
    "uneven": [0, 5, 1, 0, 0, 9, 2, 0], "even": [3] * 8, "all to the first": [17] + [0] * 7,
    "all to the last": [0] * 7 + [17], "one row": [0, 0, 0, 1, 0, 0, 0, 0],
}  # fmt: skip


def offsets_of(sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_grouped_matmul_and_both_gradients_equal_a_loop(sizes, dtype, tolerance, relative_error):
    """BF16: each result is rounded once, by at most 2**-8."""
    rows = sum(sizes)
    x = torch.randn(rows, 16).to(dtype).requires_grad_()
    stored = torch.randn(8, 24, 16).to(dtype).requires_grad_()
    out = grouped_mm(x, stored.transpose(1, 2), offsets_of(sizes))
    weight_of_row = torch.repeat_interleave(torch.arange(8), torch.tensor(sizes))
    slow_x, slow_w = x.detach().double().requires_grad_(), stored.detach().double().requires_grad_()
    slow = torch.stack([slow_w[e] @ slow_x[n] for n, e in enumerate(weight_of_row)])
    assert out.dtype == dtype and relative_error(out, slow) < tolerance
    grad = torch.randn(rows, 24).to(dtype)
    out.backward(grad)
    slow.backward(grad.double())
    assert relative_error(x.grad, slow_x.grad) < tolerance
    assert relative_error(stored.grad, slow_w.grad) < tolerance
    assert stored.grad.is_contiguous()
    empty = [e for e, size in enumerate(sizes) if size == 0]
    assert (stored.grad[empty] == 0).all()


@pytest.mark.parametrize("experts, dtype", [(9, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int64)])
def test_keys_of_two_bytes_sort_as_those_of_eight(experts, dtype, monkeypatch):
    """Few different experts, the first and the last among them: an unstable order would show."""
    expert_N = torch.tensor([0, experts - 1, experts // 2])[torch.randint(3, (500,))]
    seen, sort = [], torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda keys, **named: seen.append(keys.dtype) or sort(keys, **named))
    order_N, place_N, sizes_E = sort_assignments(expert_N, experts)
    assert seen == [dtype]
    assert torch.equal(order_N, sort(expert_N, stable=True)) and torch.equal(place_N[order_N], torch.arange(500))
    assert torch.equal(sizes_E, expert_N.bincount(minlength=experts))


def test_expanded_gradient_is_accepted():
    x, weight = torch.randn(9, 8, requires_grad=True), torch.randn(2, 8, 4, requires_grad=True)
    grouped_mm(x, weight, offsets_of([4, 5])).sum().backward()
    torch.testing.assert_close(weight.grad[0], x[:4].sum(0).unsqueeze(1).expand(8, 4))


def refuse_as_on_a_gpu(matrix):
    """The rule of torch's grouped CUDA kernels for an operand: one of the last two dimensions is contiguous, the step
    of the other is as long as it at least, and a multiple of 16 bytes."""
    *_, rows, columns = matrix.shape
    *_, to_row, to_column = matrix.stride()
    for step, one, length in ((to_column, to_row, rows), (to_row, to_column, columns)):
        if one == 1 and step >= max(1, length):
            if step * matrix.itemsize % 16:
                raise RuntimeError(f"strides should be multiple of 16 bytes, got {matrix.stride()}")
            return
    raise RuntimeError(f"Invalid strides/sizes, got {matrix.stride()} for strides and {matrix.shape} for sizes")


def test_the_rule_of_a_gpu_refuses_the_transposed_columns_of_no_rows():
    """As an H100 did: an FP8 operand with sizes [512, 0] and strides [0, 1]."""
    with pytest.raises(RuntimeError, match="Invalid strides/sizes"):
        refuse_as_on_a_gpu(torch.empty_strided((512, 0), (0, 1)))
    refuse_as_on_a_gpu(torch.empty(3, 16, 8).transpose(1, 2))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_no_rows_reach_no_grouped_kernel_and_give_weights_zero_gradients(is_compiled, monkeypatch):
    """Other rows do, with the layouts that a GPU takes."""
    seen = []

    def kernel(x, weight, offsets, of_torch=compat._grouped_mm):
        for operand in (x, weight):
            refuse_as_on_a_gpu(operand)
        assert x.numel() and weight.numel()
        seen.append(tuple(x.shape))
        return of_torch(x, weight, offsets)

    monkeypatch.setattr(compat, "_grouped_mm", kernel)
    product = torch.compile(grouped_mm, backend="aot_eager", dynamic=True) if is_compiled else grouped_mm
    for sizes in ([16, 0, 7], [0, 0, 0], [0, 9, 0]):
        x = torch.randn(sum(sizes), 16, requires_grad=True)
        stored = torch.randn(3, 8, 16, requires_grad=True)
        seen.clear()
        y = product(x, stored.transpose(1, 2), offsets_of(sizes))
        y.backward(torch.randn(sum(sizes), 8))
        assert y.shape == (sum(sizes), 8) and x.grad.shape == x.shape and stored.grad.shape == stored.shape
        assert len(seen) == (3 if sum(sizes) else 0)
        for group, size in enumerate(sizes):
            assert stored.grad[group].any() == bool(size)


def test_gradients_of_empty_experts_are_masked_where_the_self_test_of_a_blackwell_gpu_finds_them(monkeypatch):
    """A stand-in leaves the memory of an empty group as it was."""

    def kernel(x, weight, offsets, of_torch=compat._grouped_mm):
        product = of_torch(x, weight, offsets)
        return product.masked_fill(compat.empty_groups(offsets), torch.nan) if weight.ndim == 2 else product

    monkeypatch.setattr(compat, "_grouped_mm", kernel)
    x, y, offsets = torch.randn(3, 8), torch.randn(3, 8), offsets_of([0, 3, 0])
    assert grouped_outer(x, y, offsets)[[0, 2]].isnan().all()
    undefined = compat._leaves_empty_groups.__wrapped__
    assert not undefined(torch.device("cpu"))

    class OnACPU(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **{name: v for name, v in (kwargs or {}).items() if name != "device"})

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with OnACPU():
        assert undefined(torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert not undefined(torch.device("cuda"))
    monkeypatch.setattr(compat, "gradients_of_empty_groups_are_undefined", lambda device: True)
    masked = grouped_outer(x, y, offsets)
    assert not masked[[0, 2]].any() and masked[1].any()


def test_a_compiled_layer_asks_the_self_test_without_a_break_of_its_graph(monkeypatch):
    """The self-test reads a result; traced, it would end the graph."""
    monkeypatch.setattr(compat, "_leaves_empty_groups", lambda device: bool(torch.ones(3, device=device).any()))

    @torch.compile(fullgraph=True, backend="eager")
    def layer(x):
        return x + 1 if compat.gradients_of_empty_groups_are_undefined(x.device) else x

    assert layer(torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["glm46::grouped_mm", "glm46::grouped_outer"])
def test_the_custom_operators_keep_torchs_rules(name):
    """Schema, fake kernel and autograd registration agree with what the kernel does."""
    operator = getattr(torch.ops.glm46, name.removeprefix("glm46::")).default
    x, offsets = torch.randn(7, 8, requires_grad=True), offsets_of([3, 0, 4])
    second = torch.randn(3, 8, 4) if name.endswith("mm") else torch.randn(7, 4)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (x, second, offsets), test_utils=utils)


def slow_experts(experts, x, weights, choice):
    """Every token through each of its experts, one at a time."""
    width = experts.down.shape[2]
    rows = []
    for t in range(x.shape[0]):
        parts = []
        for a, e in enumerate(choice[t].tolist()):
            gate, up = experts.gate_up[e, :width] @ x[t], experts.gate_up[e, width:] @ x[t]
            parts.append(weights[t, a] * (experts.down[e] @ (F.silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("multiple", [1, 16, 32])
@pytest.mark.parametrize("case", ["random", "all tokens to one expert", "some experts empty"])
def test_dispatch_experts_combine_equal_a_loop_with_all_gradients(case, multiple, tiny_shape, relative_error):
    torch.manual_seed(2)
    shape = tiny_shape(num_experts_per_tok=1 if case == "all tokens to one expert" else 3)
    experts = Experts(shape)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    if case == "random":
        choice = torch.rand(13, 8).argsort(-1)[:, :3]
    elif case == "some experts empty":
        choice = torch.rand(13, 4).argsort(-1)[:, :3] + 2
    else:
        choice = torch.full((13, 1), 6)
    x, weights = torch.randn(13, 48, requires_grad=True), torch.rand(choice.shape, requires_grad=True)
    dispatcher = LocalDispatcher()
    dispatcher.multiple = multiple
    (x_ND, weights_N, offsets), way, _ = dispatcher.arrived(dispatcher.start(x, Routing(weights, choice, None), 8))
    assert not (offsets % multiple).any() and offsets[-1] <= len(x_ND)
    y_ND = experts(x_ND, weights_N, offsets)
    behind = torch.full_like(y_ND[offsets[-1] :], torch.nan)  # undefined, so nothing may read it
    out = dispatcher.combine(torch.cat([y_ND[: offsets[-1]], behind]), way)
    slow = slow_experts(experts, x, weights, choice)
    grad = torch.randn_like(slow)
    inputs = (x, weights, experts.gate_up, experts.down)
    got, want = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(slow, inputs, grad)
    assert relative_error(out, slow) < 1e-6  # FP32
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("sizes", [[0, 0, 0], [16], [1] * 40, [17, 0, 15, 33]], ids=str)
def test_each_row_has_one_place_in_its_group(sizes):
    offsets = offsets_of(sizes)
    row_P, place_N, padded = pad_groups(sum(sizes), offsets, 16)
    starts = [0, *padded[:-1].tolist()]
    assert padded.diff(prepend=padded.new_zeros(1)).tolist() == [-(-size // 16) * 16 for size in sizes]
    assert padded[-1] <= len(row_P)
    wanted = [start + place for start, size in zip(starts, sizes, strict=True) for place in range(size)]
    assert place_N.tolist() == wanted
    assert torch.equal(row_P[place_N], torch.arange(sum(sizes)))
    group = torch.searchsorted(offsets, row_P, right=True)
    for number, (start, stop) in enumerate(zip(starts, padded.tolist(), strict=True)):
        assert (group[start:stop] == number).all()


def test_dispatch_sorts_stably_and_counts_exactly():
    choice = torch.tensor([[2, 0], [0, 1], [2, 3], [1, 0]])
    weights = torch.arange(8.0).view(4, 2)
    x = torch.arange(4.0).unsqueeze(1).expand(4, 5).contiguous()
    dispatcher = LocalDispatcher()
    (rows, sorted_weights, offsets), _, _ = dispatcher.arrived(dispatcher.start(x, Routing(weights, choice, None), 5))
    assert rows[:, 0].tolist() == [0, 1, 3, 1, 3, 0, 2, 2]  # tokens of expert 0, then 1, 2, 3; in token order inside
    assert sorted_weights.tolist() == [1, 2, 7, 3, 6, 0, 4, 5]
    assert offsets.tolist() == [3, 5, 7, 8, 8] and offsets.dtype == torch.int32


def test_dropped_assignments_add_nothing(tiny_shape, random_model):
    """A token whose every assignment is over capacity gets the shared expert's result alone."""
    moe = MoE(tiny_shape())
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.1)
    moe.router.e_score_correction_bias.copy_(torch.tensor([9.0, 8, 0, 0, 0, 0, 0, 0]))  # everyone: experts 0 and 1
    x = torch.randn(1, 16, 48)
    y, statistics = moe(x, None, RoutingOptions(capacity_factor=0.5))
    capacity = 2  # 16 tokens * 2 experts * 0.5 / 8
    assert statistics.tokens_per_expert.tolist() == [capacity, capacity, 0, 0, 0, 0, 0, 0]
    assert statistics.overflow == 2 * (16 - capacity)
    torch.testing.assert_close(y[:, capacity:], moe.shared_experts(x)[:, capacity:], rtol=0, atol=1e-7)
    assert (y[:, :capacity] - moe.shared_experts(x)[:, :capacity]).abs().amax(-1).min() > 1e-4
