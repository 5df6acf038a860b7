"""The name table is a bijection, has the tensor counts of the published checkpoints, and reports every fault."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from glm46.compute.model.transformer import Transformer
from glm46.config.presets import PRESETS
from glm46.storage.huggingface.names import HFNames, has_repeats
from tests.unit.storage.huggingface.adapters import LATENT

TINY = dict(
    vocab_size=48, hidden_size=24, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=40,
    moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64,
)  # fmt: skip
SHAPES = {
    "4.6-like": PRESETS["GLM-4.6"].model_copy(update=TINY),
    "4.5-like, two MTP layers": PRESETS["GLM-4.5"].model_copy(update=TINY | dict(num_nextn_predict_layers=2)),
    "Air-like": PRESETS["GLM-4.5-Air"].model_copy(update=TINY),
    "without biases, MTP, shared expert": PRESETS["GLM-4.6"].model_copy(
        update=TINY | dict(attention_bias=False, num_nextn_predict_layers=0, n_shared_experts=0)
    ),
    "dense only": PRESETS["GLM-4.6"].model_copy(update=TINY | dict(first_k_dense_replace=9)),
    "4.7-Flash-like": PRESETS["GLM-4.7-Flash"].model_copy(update=TINY | LATENT),
}


def model_tensors(shape, device="cpu"):
    """Every parameter and buffer of our model, random, by name."""
    with torch.device(device):
        model = Transformer(shape)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().normal_() for name, tensor in tensors.items()}


def to_hf(names, tensors):
    return [
        (part.hf_name, tensor[part.index()]) for name, tensor in tensors.items() for part in names.entries[name].parts
    ]


@pytest.mark.parametrize("preset, repeat_shared, tensors, parameters", [
    ("GLM-4.5", True, 44_691, 358_337_791_296), ("GLM-4.7", True, 44_691, 358_337_791_296),
    ("GLM-4.6", False, 44_689, 356_785_898_816),
    ("GLM-4.7-Flash", True, 9_703, 31_221_488_576),
    ("GLM-4.5-Air", True, 18_329, 110_468_824_832), ("GLM-4.5-Air", False, 18_327, 109_227_310_848),
])  # fmt: skip
@pytest.mark.slow
def test_real_shapes_give_the_tensor_and_parameter_counts_of_the_releases(preset, repeat_shared, tensors, parameters):
    shape = PRESETS[preset]
    pairs = to_hf(HFNames(shape, repeat_shared=repeat_shared), model_tensors(shape, "meta"))
    assert len(pairs) == len({name for name, _ in pairs}) == tensors
    assert sum(tensor.numel() for _, tensor in pairs) == parameters
    layers = {int(name.split(".")[2]) for name, _ in pairs if name.startswith("model.layers.")}
    assert layers == set(range(shape.num_hidden_layers + 1))


@pytest.mark.parametrize("repeat_shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_there_and_back_gives_every_bit_again(shape, repeat_shared):
    tensors = model_tensors(shape)
    names = HFNames(shape, repeat_shared=repeat_shared)
    assert set(names.entries) == set(tensors)
    pairs = to_hf(names, tensors)
    assert {name for name, _ in pairs} == set(names.places)
    assert has_repeats(dict(pairs), shape) == (repeat_shared and shape.num_nextn_predict_layers > 0)
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for hf_name, tensor in pairs:
        entry, part = names.places[hf_name]
        again[entry.name][part.index()] = tensor
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_boxes_of_a_tensor_cover_each_place_once():
    shape = SHAPES["4.6-like"]
    for entry in HFNames(shape, repeat_shared=False).entries.values():
        covered = torch.zeros(entry.shape, dtype=torch.int64)
        for part in entry.parts:
            covered[part.index()] += 1
        assert (covered == 1).all(), entry.name


def test_expert_boxes_are_gate_then_up_then_down():
    names = HFNames(SHAPES["4.6-like"], repeat_shared=False)
    gate_up = torch.randn(6, 24, 24)
    pairs = dict(to_hf(names, {"layers.1.mlp.experts.gate_up": gate_up}))
    assert len(pairs) == 12
    assert torch.equal(pairs["model.layers.1.mlp.experts.4.gate_proj.weight"], gate_up[4, :12])
    assert torch.equal(pairs["model.layers.1.mlp.experts.4.up_proj.weight"], gate_up[4, 12:])
    down = torch.randn(6, 24, 12)
    pairs = dict(to_hf(names, {"mtp.0.block.mlp.experts.down": down}))
    assert torch.equal(pairs["model.layers.3.mlp.experts.5.down_proj.weight"], down[5])


def test_transformers_opens_what_the_table_writes(tmp_path):
    """The independent reference for the names: it loads the file and reports no missing and no unknown key."""
    shape = SHAPES["4.6-like"]
    tensors = model_tensors(shape)
    pairs = to_hf(HFNames(shape, repeat_shared=True), tensors)
    save_file({name: t.contiguous().clone() for name, t in pairs}, tmp_path / "model.safetensors", {"format": "pt"})
    keys = shape.model_dump(exclude={"rope_scaling", "sliding_window", "rope_theta", "partial_rotary_factor"})
    Glm4MoeConfig(
        **keys, rope_parameters=dict(rope_type="default", rope_theta=shape.rope_theta, partial_rotary_factor=0.5)
    ).save_pretrained(tmp_path)
    model, report = Glm4MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    # It skips layers 92 and 46, the real MTP layers, and so reports the one of our three-layer model as unexpected.
    assert all(name.startswith("model.layers.3.") for name in report["unexpected_keys"])
    experts = model.model.layers[2].mlp.experts
    assert torch.equal(experts.gate_up_proj, tensors["layers.2.mlp.experts.gate_up"])
    assert torch.equal(experts.down_proj, tensors["layers.2.mlp.experts.down"])
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    assert torch.equal(bias, tensors["layers.2.mlp.router.e_score_correction_bias"])


TWO_MTP = HFNames(SHAPES["4.5-like, two MTP layers"], repeat_shared=True)


def test_missing_and_unknown_names_are_listed():
    removed = {"model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.4.hnorm.weight"}
    repeats = {"model.layers.3.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    added = "model.layers.1.mlp.experts.6.up_proj.weight"
    missing, unknown = TWO_MTP.name_faults({*TWO_MTP.places, added} - removed - repeats)
    assert missing.startswith("2 tensors are missing") and all(name in missing for name in removed)
    assert unknown.startswith("1 tensors") and added in unknown


def test_long_lists_are_counted_not_printed():
    (missing,) = TWO_MTP.name_faults(name for name in TWO_MTP.places if ".experts." not in name)
    names, remedy = missing.split("; ")
    assert names.count(",") == 9 and names.endswith("and 62 more")  # 4 MoE layers * 6 experts * 3 matrices = 72
    assert "download the folder again" in remedy


@pytest.mark.parametrize("name, size, dtype, words", [
    ("lm_head.weight", (47, 24), torch.bfloat16, ["[47, 24]", "[48, 24]"]),
    ("model.norm.weight", (24,), torch.int32, ["int32", "bfloat16 or float32"]),
    ("model.layers.2.mlp.gate.e_score_correction_bias", (6,), torch.int8, ["int8", "float32", "convert"]),
])  # fmt: skip
def test_wrong_shape_and_type_are_named(name, size, dtype, words):
    fault = TWO_MTP.fault(name, size, dtype)
    assert all(word in fault for word in (name, *words))
    assert TWO_MTP.fault(name, TWO_MTP.places[name][1].hf_shape, torch.float32) is None
