"""Muon against torch.optim.Muon, a plain reference and singular values; its iterations, and its plan for 512 ranks."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm46.compat import StridedShard
from glm46.compute.optim import muon_step
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.muon_layout import tensor_layout
from glm46.compute.optim.muon_plan import PlannedParameter, make_plan
from glm46.compute.optim.newton_schulz import COEFFICIENTS, iterate_batched, iterate_into, orthogonalize
from glm46.config.presets import PRESETS
from glm46.operate.estimate.muon_cost import exchanged
from glm46.run.flops import newton_schulz_flops
from tests.unit.compute.optim.muon_reference import entries_per_rank, entries_received, reference_update

# FP32 products in another order; five iterations multiply the rounding by a few tens.
FP32 = 1e-6


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def parameters_with_gradients(shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    # Weights no larger than the update: otherwise their own rounding is what would be compared.
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(5)]
    return parameters, gradients


def run_steps(optimizer, parameters, gradients):
    for step_gradients in gradients:
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def plain_newton_schulz(gradient, coefficients, steps, eps):
    """torch's function without its rounding to bfloat16."""
    x = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    x = x / x.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if gradient.shape[0] <= gradient.shape[1] else x.T


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_equals_torch_in_fp32(monkeypatch, adjust_lr):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", plain_newton_schulz)
    shapes = [(48, 96), (96, 48), (64, 64), (1, 40), (128, 256)]
    mine, gradients = parameters_with_gradients(shapes)
    theirs, start = copy.deepcopy(mine), copy.deepcopy(mine)
    options = dict(lr=0.01, momentum=0.95, weight_decay=0.1)
    run_steps(Muon(mine, adjust_lr=adjust_lr, ns_dtype=torch.float32, **options), mine, gradients)
    run_steps(torch.optim.Muon(theirs, adjust_lr_fn=adjust_lr, **options), theirs, gradients)
    for a, b, s in zip(mine, theirs, start, strict=True):
        assert relative_error(a.detach() - s.detach(), b.detach() - s.detach()) <= FP32


def test_equals_torch_in_bfloat16_within_its_rounding():
    shapes = [(48, 96), (96, 48), (64, 64)]
    mine, gradients = parameters_with_gradients(shapes)
    theirs, start = copy.deepcopy(mine), copy.deepcopy(mine)
    run_steps(Muon(mine, lr=0.01, weight_decay=0.0), mine, gradients)
    torch_muon = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    run_steps(torch_muon, theirs, gradients)
    for a, b, s in zip(mine, theirs, start, strict=True):
        # torch rounds the norm to bfloat16, this does not.
        assert relative_error(a.detach() - s.detach(), b.detach() - s.detach()) <= 5e-2


@pytest.mark.parametrize("workspace_bytes", [1, 100_000, 1 << 30])
def test_batches_and_row_blocks_equal_the_reference(monkeypatch, workspace_bytes):
    monkeypatch.setattr(muon_step, "WORKSPACE_BYTES", workspace_bytes)
    shapes = [(6, 32, 48), (6, 48, 16), (2, 3, 20, 30), (40, 24), (200, 100)]
    blocks = [(16, 16), None, (5, 15), None, (100, 100)]
    mine, gradients = parameters_with_gradients(shapes)
    groups = [{"params": [p], "row_blocks": b} for p, b in zip(mine, blocks, strict=True)]
    expected = [p.detach().clone() for p in mine]
    momenta = [torch.zeros_like(p) for p in expected]
    settings = dict(ns_steps=5, ns_dtype=torch.float32)
    optimizer = Muon(groups, lr=0.02, **settings)
    run_steps(optimizer, mine, gradients)
    for step_gradients in gradients:
        for p, g, m, group in zip(expected, step_gradients, momenta, optimizer.param_groups, strict=True):
            reference_update(p, g, m, group | settings, group["row_blocks"])
    for p, e in zip(mine, expected, strict=True):
        assert relative_error(p.detach(), e) <= FP32
    for p, m in zip(mine, momenta, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], m)


def matrix_with_singular_values(values, columns=96, seed=1):
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    left = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, n, generator=generator, dtype=torch.float64))[0]
    values = values / values.norm()
    return (left * values) @ right.T, left @ right.T


@pytest.mark.parametrize(("dtype", "wider"), [(torch.float32, 0.0), (torch.float16, 0.02), (torch.bfloat16, 0.02)])
def test_singular_values_and_vectors(dtype, wider):
    # A power law whose smallest value is 3e-3 of the Frobenius norm, where the iteration still reaches its plateau.
    values = torch.arange(1, 65, dtype=torch.float64) ** -1.2
    assert (values.min() / values.norm()).item() >= 3e-3
    x, factor = matrix_with_singular_values(values)
    out = orthogonalize(x[None], 5, dtype)[0].double()
    singular = torch.linalg.svdvals(out)
    assert 0.65 - wider <= singular.min() and singular.max() <= 1.25 + wider
    if dtype == torch.float32:
        assert relative_error(out, factor) <= 0.20


# Not of small matrices: the polynomial maps their few large singular values to 0.7.
@pytest.mark.parametrize("shape", [(256, 640), (640, 256), (2, 256, 640)])
def test_update_has_the_promised_root_mean_square(shape):
    parameters, gradients = parameters_with_gradients([shape])
    start = parameters[0].detach().clone()
    run_steps(Muon(parameters, lr=1.0, weight_decay=0.0, ns_dtype=torch.float32), parameters, gradients[:1])
    # The mean square of the singular values is within a few percent of one.
    assert (parameters[0].detach() - start).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.07)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_does_not_depend_on_the_scale_of_the_gradient(dtype):
    updates = []
    for scale in (1e-10, 1.0, 1e6):
        parameters, gradients = parameters_with_gradients([(32, 48)])
        start = parameters[0].detach().clone()
        optimizer = Muon(parameters, lr=0.1, weight_decay=0.0, ns_dtype=dtype)
        run_steps(optimizer, parameters, [[scale * gradients[0][0]]])
        updates.append(parameters[0].detach() - start)
    # Other scales round other bits before the iteration and half precision carries that on.
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert max(relative_error(update, updates[1]) for update in updates) <= tolerance


def test_zero_gradient_gives_zero_update():
    parameters = [torch.nn.Parameter(torch.ones(3, 8, 4))]
    run_steps(Muon(parameters, weight_decay=0.0), parameters, [[torch.zeros(3, 8, 4)]])
    assert torch.equal(parameters[0].detach(), torch.ones(3, 8, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_iteration_changes_neither_gradient_nor_momentum(dtype):
    parameters, gradients = parameters_with_gradients([(16, 24), (3, 24, 16)], dtype=dtype)
    optimizer = Muon(parameters, ns_dtype=dtype)
    # BF16 is rounded stochastically, by less than one unit in the last place.
    rounding = 0.0 if dtype == torch.float32 else 2**-7
    expected = [torch.zeros_like(p) for p in gradients[0]]
    for step_gradients in gradients:
        run_steps(optimizer, parameters, [step_gradients])
        for p, g, m in zip(parameters, step_gradients, expected, strict=True):
            exact = m.float().lerp(g.float(), 1 - 0.95)
            assert torch.equal(p.grad, g)
            momentum = optimizer.state[p]["momentum_buffer"]
            torch.testing.assert_close(momentum.float(), exact, rtol=rounding, atol=0.0)
            m.copy_(momentum)


@pytest.mark.parametrize("state_offload", ["none", "cpu"])
def test_parameter_without_gradient_is_left_alone(state_offload):
    parameters, gradients = parameters_with_gradients([(8, 12), (8, 12)])
    before = parameters[1].detach().clone()
    optimizer = Muon(parameters, ns_dtype=torch.float32, state_offload=state_offload)
    parameters[0].grad = gradients[0][0]
    optimizer.step()
    assert torch.equal(parameters[1].detach(), before)
    assert not torch.equal(parameters[0].detach(), gradients[0][0])
    assert optimizer.state[parameters[1]]["momentum_buffer"].count_nonzero() == 0


def test_what_would_leave_the_plan_or_the_live_states_is_refused():
    optimizer = Muon([torch.nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(NotImplementedError, match="construction"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4, 4))]})
    with pytest.raises(NotImplementedError, match="optimizer.state"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_no_parameters_is_legal():
    # A pipeline stage may have none.
    optimizer = Muon([])
    optimizer.step()
    assert optimizer.plan().local == optimizer.plan().buckets == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(ns_steps=0), "ns_steps"), (dict(adjust_lr="rms"), "adjust_lr"), (dict(momentum=1.0), "momentum")],
)
def test_wrong_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([torch.nn.Parameter(torch.zeros(4, 4))], **options)


def test_vectors_and_wrong_row_blocks_are_refused():
    with pytest.raises(ValueError, match="shape"):
        Muon([torch.nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="row_blocks"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(4, 4))], "row_blocks": (3, 2)}])


class Allocations(TorchDispatchMode):
    """Number of storages that operators make."""

    def __init__(self):
        super().__init__()
        self.kept = []  # so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        found = function(*args, **kwargs)
        made = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.kept += [x for x in made if x.untyped_storage().data_ptr() not in known]
        return found


def plain(x, steps):
    """One expression for each iteration, with a result of its own for each product."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_iterations_have_the_bits_of_the_plain_ones_and_reuse_their_buffers(steps, matrices, is_transposed):
    x = torch.randn(matrices, 24, 16, generator=torch.Generator().manual_seed(0)).bfloat16() / 20
    x = x.mT if is_transposed else x.mT.contiguous()
    expected = plain(x, steps)
    with Allocations() as made:
        found = iterate_batched(x.clone(), steps)
    assert torch.equal(found, expected)
    # The copy that is given; products, polynomial, the other matrix, and one in place of a transposed first one.
    assert len(made.kept) == 4 + is_transposed
    if matrices == 1:
        own, out = x.clone()[0], torch.empty(16, 24, dtype=x.dtype)
        with Allocations() as made:
            iterate_into(out, own, steps)
        torch.testing.assert_close(out, expected[0], rtol=0.05, atol=0.02)  # mm and bmm may round BF16 otherwise
        assert len(made.kept) == 2 + is_transposed


WORLD, TP, EP, LAYERS = 512, 8, 32, 6
GLM = PRESETS["GLM-4.6"]


def meta(shape, mesh, placements):
    """A sharded tensor without memory; only its shape and placements matter."""
    local = list(shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        assert local[placement.dim] % size == 0
        local[placement.dim] //= size
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.empty(local, device="meta"), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def stage_requests():
    """The matrices of some sparse layers: attention under FSDP and TP, experts under EP with their rows cut."""
    dense = init_device_mesh("cpu", (WORLD // TP, TP))
    sparse = init_device_mesh("cpu", (WORLD // EP, EP))
    column, row, inside = (StridedShard(0, split_factor=TP), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))
    width, heads = GLM.hidden_size, GLM.num_attention_heads * GLM.head_dim
    keys, experts, narrow = GLM.num_key_value_heads * GLM.head_dim, GLM.n_routed_experts, GLM.moe_intermediate_size
    tensors = {
        "q": meta((heads, width), dense, column),
        "k": meta((keys, width), dense, column),
        "v": meta((keys, width), dense, column),
        "o": meta((width, heads), dense, row),
        "gate_up": meta((experts, 2 * narrow, width), sparse, inside),
        "down": meta((experts, width, narrow), sparse, inside),
    }
    layouts = {name: tensor_layout(tensor) for name, tensor in tensors.items()}  # the same in all layers
    blocks = {name: (tensor.shape[-2],) for name, tensor in tensors.items()} | {"gate_up": (narrow, narrow)}
    return [
        PlannedParameter(f"{layer}.{name}", layouts[name], blocks[name]) for layer in range(LAYERS) for name in tensors
    ]


def plan_of(rank):
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        return make_plan(stage_requests(), steps=5, width=2)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def plans():
    # Ranks 0 and 3 share all dense groups and differ in their experts; 0 and 32 share experts.
    return {rank: plan_of(rank) for rank in (0, 3, 32)}


def units(plan, kind):
    return [
        (b.ranks, u) for b in plan.buckets for u in b.units if (u.name.split(".")[1] in ("q", "k", "v", "o")) == kind
    ]


def test_each_matrix_has_one_owner_that_holds_a_part(plans):
    for plan in plans.values():
        count = Counter((unit.name, unit.matrix, unit.rows) for bucket in plan.buckets for unit in bucket.units)
        assert set(count.values()) == {1}
        assert len(count) == LAYERS * (4 + 3 * GLM.n_routed_experts // EP)
        assert not plan.local
        assert all(unit.parts[unit.owner] is not None for bucket in plan.buckets for unit in bucket.units)


def test_all_ranks_of_a_group_have_the_same_plan(plans):
    assert units(plans[0], True) == units(plans[3], True) == units(plans[32], True)
    assert units(plans[0], False) == units(plans[32], False)
    assert {ranks for ranks, _ in units(plans[0], False)} == {tuple(range(0, WORLD, EP))}
    assert {ranks for ranks, _ in units(plans[3], False)} == {tuple(range(3, WORLD, EP))}


def test_gate_and_up_of_one_expert_are_two_matrices_and_every_rank_receives(plans):
    narrow = GLM.moe_intermediate_size
    fused = [unit for _, unit in units(plans[0], False) if unit.name == "0.gate_up" and unit.matrix == 0]
    assert {unit.rows for unit in fused} == {(0, narrow), (narrow, 2 * narrow)}
    assert all(unit.shape == (narrow, GLM.hidden_size) for unit in fused)
    received = entries_per_rank(plans[0])
    assert len(received) == WORLD and min(received.values()) > 0


def test_total_bytes_are_the_lower_bound(plans):
    for bucket_ranks, dense in ((WORLD, True), (WORLD // EP, False)):
        chosen = [(ranks, unit) for ranks, unit in units(plans[0], dense)]
        assert {len(ranks) for ranks, _ in chosen} == {bucket_ranks}
        buckets = [bucket for bucket in plans[0].buckets if len(bucket.ranks) == bucket_ranks]
        total = sum(entries_received(bucket, member) for bucket in buckets for member in range(bucket_ranks))
        counted = [way for bucket in buckets for member in range(bucket_ranks) for way in exchanged(bucket, member)]
        assert sum(sent for sent, _ in counted) == sum(received for _, received in counted) == total
        held = sum(unit.size(unit.owner) for _, unit in chosen)
        whole = sum(unit.shape[0] * unit.shape[1] for _, unit in chosen)
        assert total == 2 * (whole - held)


def test_load_is_balanced_as_well_as_whole_matrices_allow(plans):
    loads = Counter()
    for ranks, unit in units(plans[0], False):
        loads[ranks[unit.owner]] += newton_schulz_flops(*unit.shape, 5)
    # Ninety expert matrices of one cost over sixteen ranks: six on the fullest.
    assert max(loads.values()) == 6 * newton_schulz_flops(GLM.moe_intermediate_size, GLM.hidden_size, 5)
