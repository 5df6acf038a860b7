"""LoRA and DoRA equal PEFT: logits and every gradient; what is frozen has none."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from glm46.compute.model import row_norms
from glm46.compute.model.adapters import add_adapters
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.row_norms import base_squares, row_squares
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.config.adapter import AdapterConfig
from glm46.run.flops import training_flops
from glm46.run.parameters import adapter_rows
from tests.unit.compute.model.test_parity_transformers import reference_of, summed_loss

TARGETS = ("attention", "dense", "shared_experts", "experts")
RANK = 4
SWIGLU = ("gate_proj", "up_proj", "down_proj")


def of_peft(adapter: AdapterConfig, reference):
    """PEFT's model with these adapters: it takes feed-forward matrices of glm4_moe as parameters only."""
    parameters = {
        "dense": [f"layers.0.mlp.{name}.weight" for name in SWIGLU],
        "shared_experts": [f"mlp.shared_experts.{name}.weight" for name in SWIGLU],
        "experts": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        use_dora=adapter.name == "dora",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"] if "attention" in adapter.targets else [],
        target_parameters=[name for target in adapter.targets for name in parameters.get(target, [])],
    )
    return get_peft_model(reference, config)


def to_ours(tensors: dict, experts: int) -> dict:
    """PEFT's adapter tensors under our names and in our layout."""
    found = {}
    for name, tensor in tensors.items():
        if "lora" not in name:
            continue
        name = name.removeprefix("base_model.model.model.").replace(".default", "").removesuffix(".weight")
        name = name.replace("lora_magnitude_vector", "magnitude")
        if ".experts." in name:
            name = name.replace("experts.base_layer.", "experts.gate_up_").replace("experts.lora", "experts.down_lora")
            if name.endswith("A"):  # rows (expert, rank)
                tensor = tensor.unflatten(0, (experts, -1))
            else:  # columns (rank, expert)
                tensor = tensor.unflatten(1, (-1, experts)).permute(2, 0, 1)
        found[name] = tensor
    return found


def randomise_adapters(model, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                parameter.copy_(1 + 0.1 * noise if name.endswith("magnitude") else 0.2 * noise)


@pytest.fixture
def tiny(tiny_shape, random_model):
    shape = tiny_shape(num_nextn_predict_layers=0)
    return random_model(shape)


def copy_to_peft(reference, model) -> None:
    """Give PEFT's adapters the values of ours."""
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in to_ours(dict(reference.named_parameters()), model.shape.n_routed_experts).items():
            tensor.copy_(ours[name])  # a view of PEFT's


@pytest.mark.parametrize(
    ("name", "targets"),
    [*(("lora", (target,)) for target in TARGETS), ("lora", TARGETS), ("dora", ("attention",))],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_adapters_equal_pefts(name, targets, tiny, random_batch, relative_error):
    """Those that PEFT can have: DoRA of attention alone."""
    adapter = AdapterConfig(name=name, rank=RANK, alpha=6.0, targets=targets)
    model, batch = tiny, random_batch(tiny.shape)
    reference = of_peft(adapter, reference_of(model)[0])
    add_adapters(model, adapter)
    randomise_adapters(model)
    copy_to_peft(reference, model)
    Magnitudes(model, adapter, None).start(new_adapters=False)
    logits = reference(batch["input_ids"]).logits
    assert relative_error(model(batch["input_ids"]), logits) < 1e-5
    summed_loss(logits, batch["labels"]).backward()
    model(**batch).loss.backward()
    ours = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    theirs = {key: parameter.grad for key, parameter in reference.named_parameters()}
    theirs = to_ours(theirs, tiny.shape.n_routed_experts)
    assert set(theirs) == set(ours) == set(adapter_rows(model.shape, adapter))
    assert max(relative_error(ours[key], gradient) for key, gradient in theirs.items()) < 1e-5


def dora_by_peft(linears: nn.Module, sets: dict[str, tuple], scale: float) -> dict[str, tuple]:
    """Put PEFT's DoRA around the linear layers of a module; returns its A, B and magnitude of each, with the values of
    ``sets``."""
    config = LoraConfig(r=RANK, lora_alpha=scale * RANK, use_dora=True, target_modules=list(sets))
    inject_adapter_in_model(config, linears)
    found = {}
    for name, values in sets.items():
        layer = linears.get_submodule(name)
        parts = layer.lora_A.default.weight, layer.lora_B.default.weight, layer.lora_magnitude_vector.default.weight
        for part, value in zip(parts, values, strict=True):
            part.data.copy_(value)
        found[name] = parts
    return found


class Plain(nn.Module):
    """The three matrices of a feed-forward network or of an expert, in plain linear layers."""

    def __init__(self, *weights):
        super().__init__()
        for name, weight in zip(SWIGLU, weights, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight.data.copy_(weight)
            self.register_module(name, layer)

    def forward(self, x, row_weights=1.0):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * row_weights)


@pytest.mark.parametrize("layer", ["0", "1"], ids=["dense", "shared experts"])
def test_dora_of_a_feed_forward_network_equals_pefts(layer, tiny, relative_error):
    adapter = AdapterConfig(name="dora", rank=RANK, alpha=6.0)
    add_adapters(tiny, adapter)
    randomise_adapters(tiny)
    Magnitudes(tiny, adapter, None).start(new_adapters=False)
    ours = tiny.layers[layer].mlp if layer == "0" else tiny.layers[layer].mlp.shared_experts
    keys = ("lora_A", "lora_B", "magnitude")
    sets = {name: tuple(getattr(ours.get_submodule(name), key) for key in keys) for name in SWIGLU}
    plain = Plain(*(ours.get_submodule(name).weight for name in SWIGLU))
    theirs = dora_by_peft(plain, sets, adapter.scale)
    x, grad = torch.randn(2, 13, 48), torch.randn(2, 13, 48)
    y, expected = ours(x), plain(x)
    assert relative_error(y, expected) < 1e-6
    y.backward(grad)
    expected.backward(grad)
    for name, parts in sets.items():
        for part, their in zip(parts, theirs[name], strict=True):
            assert relative_error(part.grad, their.grad) < 1e-5


def test_dora_of_experts_equals_pefts_of_one_linear_layer_each(tiny, relative_error):
    """Nobody else has DoRA of experts. One expert here has no rows."""
    adapter = AdapterConfig(name="dora", rank=RANK, alpha=6.0)
    add_adapters(tiny, adapter)
    randomise_adapters(tiny)
    Magnitudes(tiny, adapter, None).start(new_adapters=False)
    ours, width = tiny.layers["1"].mlp.experts, tiny.shape.moe_intermediate_size
    ends = [3, 9, 9, 10, 17, 20, 22, 30]
    x, row_weights, grad = torch.randn(30, 48), torch.rand(30), torch.randn(30, 48)
    y = ours(x, row_weights, torch.tensor(ends, dtype=torch.int32))
    y.backward(grad)
    keys = ("lora_A", "lora_B", "magnitude")
    of_gate_up, of_down = ([getattr(ours, f"{name}_{key}") for key in keys] for name in ("gate_up", "down"))
    for expert, (first, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        plain = Plain(*ours.gate_up[expert].split(width), ours.down[expert])
        a, b, m = (part[expert].detach() for part in of_gate_up)
        halves = {"gate_proj": (a, b[:width], m[:width]), "up_proj": (a, b[width:], m[width:])}
        theirs = dora_by_peft(plain, halves | {"down_proj": tuple(p[expert].detach() for p in of_down)}, adapter.scale)
        expected = plain(x[first:stop], row_weights[first:stop, None])
        assert relative_error(y[first:stop], expected, 1e-30) < 1e-6
        expected.backward(grad[first:stop])
        gate, up, down = theirs.values()
        wanted = [gate[0].grad + up[0].grad]
        wanted += [torch.cat([one.grad, two.grad]) for one, two in zip(gate[1:], up[1:], strict=True)]
        wanted += [part.grad for part in down]
        for part, gradient in zip(of_gate_up + of_down, wanted, strict=True):
            assert relative_error(part.grad[expert], gradient, 1e-6) < 1e-5


def test_the_norm_is_not_in_the_graph(tiny, relative_error):
    """Of one layer, by plain autograd of the formula: with the norm in the graph the gradient of B is another one."""
    adapter = AdapterConfig(name="dora", rank=RANK, alpha=6.0, targets=("attention",))
    add_adapters(tiny, adapter)
    randomise_adapters(tiny)
    Magnitudes(tiny, adapter, None).start(new_adapters=False)
    layer, x = tiny.layers["0"].self_attn.q_proj, torch.randn(13, 48)
    grad = torch.randn(13, layer.out_features)
    layer(x).backward(grad)
    gradients = []
    for is_constant in (True, False):
        a, b, m = (part.detach().clone().requires_grad_() for part in (layer.lora_A, layer.lora_B, layer.magnitude))
        v = layer.weight + adapter.scale * b @ a
        norm = v.norm(dim=1, keepdim=True)
        y = F.linear(x, m[:, None] * v / (norm.detach() if is_constant else norm), layer.bias)
        y.backward(grad)
        gradients.append(b.grad)
    assert relative_error(layer.lora_B.grad, gradients[0]) < 1e-5
    assert relative_error(layer.lora_B.grad, gradients[1]) > 0.01


def start(model, adapter) -> Magnitudes:
    """What follows the loading of a base: initial adapters, and DoRA's magnitudes."""
    add_adapters(model, adapter)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            indices = [torch.arange(size) for size in parameter.shape]
            fill_parameter(parameter.detach(), indices, tuple(parameter.shape), seed=1, name=name, std=0.02)
    magnitudes = Magnitudes(model, adapter, None)
    magnitudes.start()
    return magnitudes


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_an_adapter_that_begins_changes_no_bit(name, tiny, random_batch):
    batch = random_batch(tiny.shape)
    with torch.no_grad():
        expected = tiny(**batch).loss, tiny(batch["input_ids"])
        magnitudes = start(tiny, AdapterConfig(name=name, rank=RANK))
        assert torch.equal(tiny(**batch).loss, expected[0]) and torch.equal(tiny(batch["input_ids"]), expected[1])
        randomise_adapters(tiny)
        magnitudes.refresh()
        assert not torch.equal(tiny(**batch).loss, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_squares_need_no_matrix_of_the_sum(dtype, monkeypatch, relative_error):
    monkeypatch.setattr(row_norms, "_CHUNK_ELEMENTS", 100)
    w, a, b = torch.randn(2, 21, 30).to(dtype), torch.randn(2, 4, 30), 0.1 * torch.randn(2, 21, 4)
    expected = (w.double() + 0.7 * b.double() @ a.double()).square().sum(-1)
    assert relative_error(row_squares(base_squares(w), w, a, b, 0.7), expected) < 1e-6
    # Of the columns of two ranks, whose sums are added.
    halves = [
        row_squares(base_squares(w[..., part]), w[..., part], a[..., part], b, 0.7)
        for part in (slice(0, 14), slice(14, 30))
    ]
    assert relative_error(sum(halves), expected) < 1e-6


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_a_rank_without_rows_has_no_row_squares(shape):
    """An uneven division of rows over many ranks leaves some ranks without rows."""
    w = torch.ones(shape)
    a = torch.ones(*shape[:-2], 2, 8)
    b = torch.ones(*shape[:-1], 2)
    assert row_squares(base_squares(w), w, a, b, 0.7).shape == shape[:-1]


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_a_step_has_the_planned_products(name, tiny, random_batch):
    """Multiply-adds of the products with weights and adapters: none is of a gradient that nobody needs."""
    adapter, batch = AdapterConfig(name=name, rank=RANK, expert_rank=8), random_batch(tiny.shape)
    shape, tokens = tiny.shape, batch["input_ids"].numel()
    start(tiny, adapter)

    def of_groups(x, y, offsets, out_shape, **_):  # [N, I] x [E, I, O], or the outer products of [N, I] and [N, O]
        return 2 * x[0] * x[1] * y[-1]

    def added(y, x, weight, out_shape, **_):
        return 2 * x[0] * x[1] * weight[1]

    def adapted(x, weight, scales, a, b, offsets, scale, out_shape, **_):
        return 2 * x[0] * (weight[1] * weight[2] + a[1] * a[2] + b[1] * b[2])

    def frozen(grad, weight, scales, offsets, out_shape, **_):
        return 2 * grad[0] * weight[1] * weight[2]

    operators = torch.ops.glm46
    formulas = {
        operators.grouped_mm: of_groups, operators.grouped_outer: of_groups, operators.adapted_grouped_mm: adapted,
        operators.frozen_grouped_mm: frozen, torch.ops.aten.addmm_: added,
    }  # fmt: skip
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        tiny(**batch).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    counted = sum(flops for operator, flops in counted.items() if "attention" not in str(operator))
    planned = training_flops(shape, 0, adapter=adapter).total * tokens
    # The embedding needs no gradient, so neither does the input of the first q, k and v.
    first = [getattr(tiny.layers["0"].self_attn, f"{key}_proj") for key in "qkv"]
    planned -= 2 * tokens * sum(layer.weight.numel() + layer.lora_A.numel() for layer in first)
    if name == "dora":  # sums over the rows of each expert, by a grouped product with 8 rows of ones
        rows = tokens * shape.num_experts_per_tok * (shape.num_hidden_layers - shape.first_k_dense_replace)
        planned += 2 * 8 * rows * (2 * shape.moe_intermediate_size + shape.hidden_size)
    assert counted == planned
