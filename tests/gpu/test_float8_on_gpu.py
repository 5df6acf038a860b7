"""FP8 products by the kernels of a GPU, held to the model of their recipes in FP64, and the layers around them."""

import pytest
import torch

from glm46.compute.distributed.process import use_deterministic_kernels
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.parallelize.float8 import linear_product
from glm46.compute.parallelize.float8_experts import experts_kernels, experts_product
from glm46.config.float8 import Float8Config
from glm46.config.float8_layers import EXPERTS_MULTIPLES
from glm46.config.presets import PRESETS
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.ranks.sharded_layouts import build_job, make_batch, micro_batches, whole
from tests.ranks.test_float8_layouts import CASES, MATRICES, config_of
from tests.unit.compute.parallelize.test_float8 import OFFSETS, ROWS, distance, operands, recipe_in_fp64

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="no CUDA device with FP8 products on this machine"),
]
# Triton has code of its own for numbers that 16 divides. With as many groups as a real layer has, it is compiled once.
ENDS = torch.cat([OFFSETS, OFFSETS[-1:].expand(11)])
# BF16 rounds results to 2**-9. Fast accumulation keeps 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
BOUND = 2**-7


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_linear_product_follows_its_recipe(recipe):
    x, weight, grad = (t.bfloat16() for t in operands((256, 512), (384, 512), (256, 384)))
    inputs = [t.cuda().requires_grad_() for t in (x, weight)]
    y = linear_product(Float8Config(recipe_name=recipe))(*inputs, None)
    y.backward(grad.cuda())
    wanted = recipe_in_fp64(recipe, x.double(), weight.double(), grad.double())
    found = (y.detach(), inputs[0].grad, inputs[1].grad)
    for got, want in zip(found, wanted, strict=True):
        assert distance(got.cpu(), want) < BOUND


HAS_GROUPED_PRODUCTS = pytest.mark.skipif(
    CAPABILITY[0] not in (9, 10), reason="no CUDA device with grouped FP8 products on this machine"
)


@HAS_GROUPED_PRODUCTS
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_grouped_product_follows_its_recipe(recipe):
    if recipe == "mxfp8" and CAPABILITY[0] != 10:
        pytest.skip("no CUDA device with MXFP8 on this machine")
    x, weight, grad = (t.bfloat16() for t in operands((ROWS, 512), (len(ENDS), 256, 512), (ROWS, 256)))
    inputs, end = [t.cuda().requires_grad_() for t in (x, weight)], int(ENDS[-1])
    float8 = Float8Config(recipe_name="rowwise", experts_recipe_name=recipe)
    y = experts_product(float8)(*inputs, ENDS.cuda())
    y[:end].backward(grad[:end].cuda())
    for expert, (start, stop) in enumerate(zip([0, *ENDS[:-1].tolist()], ENDS.tolist(), strict=True)):
        if start == stop:
            assert not inputs[1].grad[expert].any()
            continue
        rows = slice(start, stop)
        wanted = recipe_in_fp64(recipe, x[rows].double(), weight[expert].double(), grad[rows].double())
        found = (y.detach()[rows], inputs[0].grad[rows], inputs[1].grad[expert])
        for got, want in zip(found, wanted, strict=True):
            assert distance(got.cpu(), want) < BOUND, expert
    if recipe == "rowwise":  # weights that were rounded before give the same bits
        again, kernels = [t.cuda().requires_grad_() for t in (x, weight)], experts_kernels(float8)
        forms = [form for for_backward in (False, True) for form in kernels.forms(again[1].detach(), for_backward)]
        kept = experts_product(float8)(*again, ENDS.cuda(), *forms)
        kept[:end].backward(grad[:end].cuda())
        pairs = (kept[:end], y[:end]), (again[0].grad[:end], inputs[0].grad[:end]), (again[1].grad, inputs[1].grad)
        assert all(torch.equal(*pair) for pair in pairs)


@HAS_GROUPED_PRODUCTS
@pytest.mark.parametrize("rows", [2048, 37, 0])
def test_a_moe_layer_with_padded_groups_is_that_of_the_emulation(rows):
    """Both round the operands of products alike. The kernels sum with 14 bits, and a difference of 2**-8 of results
    of the first product moves one element in 32 to the next number of FP8, 2**-3 away: 2**-5.5 in all, and more in
    backward. One expert has all tokens, so that groups are far from equal and many have few rows or none."""
    shape = PRESETS["debug"].model_copy(update={"hidden_size": 512, "moe_intermediate_size": 256})
    x, grad = (t.bfloat16() for t in operands((1, rows, 512), (1, rows, 512)))
    results = []
    for emulate in (False, True):
        layer = MoE(shape)
        torch.manual_seed(0)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        layer.to("cuda", torch.bfloat16)
        layer.router.e_score_correction_bias.zero_()[0] = 10.0  # every token takes the first expert
        recipe = Float8Config(recipe_name="rowwise", experts_recipe_name="rowwise", emulate=emulate)
        layer.experts.product = experts_product(recipe)
        layer.dispatcher.multiple = EXPERTS_MULTIPLES["rowwise"]
        inputs = x.cuda().requires_grad_()
        y, statistics = layer(inputs, None, RoutingOptions())
        y.backward(grad.cuda())
        results.append([y.detach(), inputs.grad, *(parameter.grad for parameter in layer.parameters())])
    assert statistics.tokens_per_expert[0] == rows
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all() and (not rows or distance(got.cpu(), want.cpu().double()) < 2**-4)


@pytest.mark.usefixtures("nondeterministic_afterwards")
def test_emulated_experts_repeat_every_bit_under_debug_deterministic():
    """No operator of the emulation raises there."""
    use_deterministic_kernels()
    x, weight, grad = (t.bfloat16().cuda() for t in operands((ROWS, 512), (len(ENDS), 256, 512), (ROWS, 256)))
    product = experts_product(Float8Config(recipe_name="rowwise", experts_recipe_name="rowwise", emulate=True))
    results = []
    for _ in range(2):
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        y = product(*inputs, ENDS.cuda())
        y.backward(grad)
        results.append((y.detach()[: int(ENDS[-1])], inputs[0].grad[: int(ENDS[-1])], inputs[1].grad))
    assert all(torch.equal(first, again) for first, again in zip(*results, strict=True))


def test_weights_gathered_in_fp8_give_the_step_of_weights_that_are_rounded_after_it(process):
    """One rank, through FSDP2. Scales are those of the whole matrix both times, but one rounds FP32, the other BF16.
    The bounds are twice the distances of the emulation on a CPU; a wrong scale is 1 away, or more."""
    results = {}
    for name in ("fsdp gathered", "fsdp tensorwise", None):
        config = config_of(CASES[name or "fsdp gathered"])
        recipe = config.float8.model_copy(update={"emulate": False}) if name else Float8Config()
        training = config.training.model_copy(update={"mixed_precision_param": "bfloat16"})
        job = build_job(config.model_copy(update={"float8": recipe, "training": training}), process)
        totals = count_step(job, [make_batch(0)])
        outcome = train_step(job, micro_batches(job, 0, 2), totals, 0, 1.0).main
        parameters = job.network.parameters
        results[name] = (
            outcome.objective["loss"].item(),
            [whole(parameters[of].grad).double().cpu() for of in MATRICES[:2]],
        )
    (loss, gradients), (of_rounded, rounded), (of_plain, plain) = results.values()
    assert loss == pytest.approx(of_rounded, rel=1e-3) and loss == pytest.approx(of_plain, rel=1e-2)
    for got, other, want in zip(gradients, rounded, plain, strict=True):
        assert 5e-3 < distance(got, want) < 0.35 and distance(got, other) < 0.35
