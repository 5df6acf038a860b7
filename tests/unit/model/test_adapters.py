"""LoRA and DoRA equal PEFT: logits and every gradient; what is frozen has none."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from glm46.config.adapter import Adapter
from glm46.model.adapters import add_adapters
from tests.unit.model.test_parity_transformers import reference_of, summed_loss

TARGETS = ("attention", "dense", "shared_experts", "experts")
RANK = 4
SWIGLU = ("gate_proj", "up_proj", "down_proj")


def of_peft(adapter: Adapter, reference):
    """PEFT's model with these adapters: it takes feed-forward matrices of glm4_moe as parameters only."""
    parameters = {
        "dense": [f"layers.0.mlp.{name}.weight" for name in SWIGLU],
        "shared_experts": [f"mlp.shared_experts.{name}.weight" for name in SWIGLU],
        "experts": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        use_rslora=adapter.rank_stabilized,
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


@pytest.mark.parametrize("targets", [*((target,) for target in TARGETS), TARGETS], ids=lambda targets: "-".join(targets))
def test_lora_equals_peft(targets, tiny, random_batch, relative_error):
    adapter = Adapter(rank=RANK, alpha=6.0, targets=targets, rank_stabilized=len(targets) > 1)
    model, batch, experts = tiny, random_batch(tiny.shape), tiny.shape.n_routed_experts
    reference = of_peft(adapter, reference_of(model)[0])
    add_adapters(model, adapter)
    randomise_adapters(model)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in to_ours(dict(reference.named_parameters()), experts).items():
            tensor.copy_(ours[name])  # a view of PEFT's
    logits = reference(batch["input_ids"]).logits
    assert relative_error(model(batch["input_ids"]), logits) < 1e-5
    summed_loss(logits, batch["labels"]).backward()
    model(**batch).loss.backward()
    theirs = to_ours({name: p.grad for name, p in reference.named_parameters()}, experts)
    assert set(theirs) == {name for name, parameter in ours.items() if parameter.grad is not None}
    assert max(relative_error(ours[name].grad, gradient) for name, gradient in theirs.items()) < 1e-5


def test_an_adapter_that_begins_changes_no_bit(tiny, random_batch):
    batch = random_batch(tiny.shape)
    with torch.no_grad():
        expected = tiny(**batch).loss, tiny(batch["input_ids"])
        add_adapters(tiny, Adapter(rank=RANK))
        randomise_adapters(tiny)
        for name, parameter in tiny.named_parameters():
            if name.endswith("lora_B"):
                parameter.zero_()
        assert torch.equal(tiny(**batch).loss, expected[0]) and torch.equal(tiny(batch["input_ids"]), expected[1])
