"""Muon in one process: against torch.optim.Muon, against the plain reference, and against singular values."""

import copy

import pytest
import torch

from glm46.compute.optim import muon_step
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.muon_update import update_scale
from glm46.compute.optim.newton_schulz import orthogonalize
from tests.unit.compute.optim.muon_reference import reference_update

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


def test_scales_of_the_update():
    # Rows over columns are 4: two, and one for a matrix that is wider than tall.
    assert (update_scale("original", 64, 16), update_scale("original", 16, 64)) == (2.0, 1.0)
    assert update_scale("match_rms_adamw", 16, 64) == update_scale("match_rms_adamw", 64, 16) == 0.2 * 8


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
