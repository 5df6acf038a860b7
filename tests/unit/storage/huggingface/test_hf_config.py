"""config.json and the names of tensors, against the published files and against transformers."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeLiteConfig, GlmMoeDsaConfig

from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import GONE_KEYS, RopeScalingConfig
from glm46.config.presets import PRESETS
from glm46.storage.huggingface.config_json import config_of, read_config, shape_of
from glm46.storage.huggingface.names import HFNames, has_repeats
from tests.unit.storage.huggingface.adapters import LATENT

EOS = [151329, 151336, 151338]

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))
REFUSED = json.loads(Path(__file__).with_name("refused_configs.json").read_text(encoding="utf-8"))

# GLM-4.6's file as published (the form of transformers 4), as far as it is known.
GLM_46 = PUBLISHED["GLM-4.6"]

# As in the files of zai-org/GLM-4.5-FP8 and GLM-4.5-Air-FP8, whose keys these are, but for the quantisation; read in a
# public copy: github.com/hlky/dinoml_v2, agents/plans/transformers/glm4_moe/_sources.
GLM_45 = GLM_46 | {"max_position_embeddings": 131072}
GLM_45_AIR = GLM_45 | {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "num_hidden_layers": 46, "use_qk_norm": False,
}  # fmt: skip


def in_transformers_5_form(raw, **scaling):
    raw = {
        key: value for key, value in raw.items() if key not in ("rope_theta", "partial_rotary_factor", "rope_scaling")
    }
    rope = {"rope_theta": 1000000, "partial_rotary_factor": 0.5, "rope_type": "default"} | scaling
    return raw | {"rope_parameters": rope}


def test_the_published_files_are_the_presets():
    for raw, preset in ((GLM_46, "GLM-4.6"), (GLM_45, "GLM-4.5"), (GLM_45_AIR, "GLM-4.5-Air")):
        assert shape_of(raw) == PRESETS[preset]
    assert shape_of(in_transformers_5_form(GLM_46)) == PRESETS["GLM-4.6"]
    renamed = {key: value for key, value in GLM_46.items() if key != "num_nextn_predict_layers"} | {"num_mtp_layers": 1}
    assert shape_of(renamed) == PRESETS["GLM-4.6"]


@pytest.mark.parametrize("preset", ["GLM-4.6", "GLM-4.5", "GLM-4.5-Air", "debug"])
def test_transformers_reads_a_new_file_as_the_same_model(preset, tmp_path):
    """transformers reads the file and saves it in its own form, which gives the same shape."""
    shape = PRESETS[preset]
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, None, eos_ids=EOS, dtype="bfloat16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, Glm4MoeConfig)
    assert theirs.eos_token_id == EOS and theirs.pad_token_id == 151329
    theirs.save_pretrained(tmp_path / "again")
    raw = read_config(tmp_path / "again")
    assert "rope_parameters" in raw and "rope_theta" not in raw
    assert shape_of(raw) == shape


@pytest.mark.parametrize("raw", [GLM_46, in_transformers_5_form(GLM_46), GLM_46 | {"bar": {"a": [1]}, "foo": None}])
def test_writing_an_unchanged_model_changes_nothing(raw):
    assert config_of(PRESETS["GLM-4.6"], raw, eos_ids=EOS, dtype="bfloat16") == raw
    # Except quantization_config, which describes the imported weights.
    assert config_of(PRESETS["GLM-4.6"], raw | {"quantization_config": {}}, eos_ids=EOS, dtype="bfloat16") == raw


@pytest.mark.parametrize(("known", "eos_ids", "written"), [
    (EOS, [3, 5], [3, 5]), (2, [3, 5], [3, 5]), (151336, EOS, 151336), ([*EOS, 9], EOS, [*EOS, 9]), (None, EOS, None),
    (EOS, [], EOS),
])  # fmt: skip
def test_ids_that_end_a_text_are_those_of_the_tokenizer(known, eos_ids, written):
    """A file's ids are kept if they are of the same tokenizer."""
    config = config_of(PRESETS["GLM-4.6"], GLM_46 | {"eos_token_id": known}, eos_ids=eos_ids, dtype="bfloat16")
    assert config["eos_token_id"] == written
    assert config["pad_token_id"] == (eos_ids[0] if written == eos_ids else GLM_46["pad_token_id"])


def test_writing_a_changed_model_changes_that_and_keeps_the_rest():
    raw = GLM_46 | {"my_field": {"x": 1}}
    shape = PRESETS["GLM-4.6"].model_copy(update=dict(num_hidden_layers=10, rope_theta=5e5, num_nextn_predict_layers=0))
    got = config_of(shape, raw, eos_ids=EOS, dtype="float32")
    assert got == raw | dict(num_hidden_layers=10, rope_theta=5e5, num_nextn_predict_layers=0, torch_dtype="float32")
    got = config_of(shape, in_transformers_5_form(raw), eos_ids=EOS, dtype="float32")
    assert got["rope_parameters"] == {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "default"}
    assert "rope_theta" not in got and got["my_field"] == {"x": 1}


YARN = RopeScalingConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, beta_fast=16.0)


LINEAR = RopeScalingConfig(rope_type="linear", factor=2.0)


@pytest.mark.parametrize("raw", [None, GLM_46, in_transformers_5_form(GLM_46)], ids=["new", "4", "5"])
@pytest.mark.parametrize(("scaling", "written", "absent"), [
    (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, set()),
    (LINEAR, {"rope_type": "linear", "factor": 2.0}, {"beta_fast", "beta_slow", "original_max_position_embeddings"}),
], ids=["stretched", "interpolated"])  # fmt: skip
def test_scaled_positions_are_written_and_read_in_each_form(scaling, written, absent, raw, tmp_path, caplog):
    shape = PRESETS["GLM-4.6"].model_copy(update=dict(rope_scaling=scaling))
    config = config_of(shape, raw, eos_ids=EOS, dtype="bfloat16")
    assert shape_of(config) == shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs.items() >= (written | {"rope_theta": 1e6, "partial_rotary_factor": 0.5}).items()
    assert not absent & set(theirs) and (scaling is YARN or not caplog.records)
    assert shape_of(config_of(PRESETS["GLM-4.6"], config, eos_ids=EOS, dtype="bfloat16")).rope_scaling is None


def test_the_old_spelling_and_the_default_length_of_scaling_are_read():
    raw = GLM_46 | {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    assert shape_of(raw).rope_scaling == RopeScalingConfig(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=202752
    )
    raw = GLM_46 | {"rope_scaling": {"type": "linear", "factor": 2.0}}  # which has no use for a length
    assert shape_of(raw).rope_scaling == RopeScalingConfig(rope_type="linear", factor=2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    REFUSED["other_models"]
    + [
        ({"layer_types": ["full_attention", "sliding_attention"] * 46}, ["layer_types"]),
        ({"mlp_layer_types": ["sparse"] * 92}, ["mlp_layer_types"]),
    ],
    ids=str,
)
def test_configs_of_other_models_are_refused(change, words):
    with pytest.raises(UserError) as error:
        shape_of(GLM_46 | change, "m/config.json")
    assert all(fault.startswith("m/config.json: ") for fault in error.value.faults)
    assert all(word in str(error.value) for word in words), error.value.faults


@pytest.mark.parametrize("key", GONE_KEYS)
def test_keys_of_one_value_are_there(key):
    """Exports have what the file had: a reader with other defaults would compute another function."""
    with pytest.raises(UserError, match=f"^config.json: {key} is missing; add it$"):
        shape_of({name: value for name, value in GLM_46.items() if name != key})


INERT = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "sliding_window": None,
    "use_sliding_window": False, "mlp_bias": False, "logit_scale": 1.0, "layer_types": ["full_attention"] * 92,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 89,
}  # fmt: skip


def test_keys_of_related_models_that_change_nothing_are_taken():
    assert shape_of(GLM_46 | INERT) == PRESETS["GLM-4.6"]
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
    more = scaling | {"mscale": None, "truncate": True}
    assert shape_of(GLM_46 | {"rope_scaling": more}) == shape_of(GLM_46 | {"rope_scaling": scaling})


OTHER_MODELS = {  # the keys of each that GLM-4.6's file has too are at other places or have other values
    "glm4v_moe": {"text_config": GLM_46, "vision_config": {"depth": 24}, "image_token_id": 151363},
    "glm5_next": {"hidden_size": 3072, "index_kpool": 16, "hc_mult": 4},
    "glm4": {"hidden_size": 4096},
    "qwen3_moe": {"hidden_size": 2048, "num_experts": 128},
    "deepseek_v3": {"hidden_size": 7168, "rope_scaling": {"type": "yarn", "mscale": 1.0}},
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_the_config_of_another_model_has_one_line(kind):
    with pytest.raises(UserError) as error:
        shape_of({"model_type": kind, "architectures": ["Other"], **OTHER_MODELS[kind]}, "m/config.json")
    (fault,) = error.value.faults
    assert f"m/config.json: model_type = '{kind}': another model" in fault and "take one of them" in fault
    assert ("of images and text" in fault) == (kind == "glm4v_moe")
    known = {"glm4v_moe": "GLM-4.5V or 4.6V", "glm5_next": "GLM-5.3-Flash"}
    assert (f", {known.get(kind)}" in fault and "missing here" in fault) == (kind in known)


EOS_OF_FLASH = [154820, 154827, 154829]
# The values of the file of zai-org/GLM-4.7-Flash (revision 7dd20894a642), in its order, and the hash of the file.
GLM_47_FLASH = PUBLISHED["GLM-4.7-Flash"]
SHA256_OF_FLASH = "dc9b97c7c9bed726a2e6939da4234d5c43abb3edec8812068c9a1af1dbc13acb"


def test_the_published_file_of_flash_is_its_preset_and_written_back_byte_for_byte():
    shape = shape_of(GLM_47_FLASH)
    assert shape == PRESETS["GLM-4.7-Flash"]
    config = config_of(shape, GLM_47_FLASH, eos_ids=EOS_OF_FLASH, dtype="bfloat16")
    text = json.dumps(config, indent=2) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256_OF_FLASH
    new = config_of(shape, None, eos_ids=EOS_OF_FLASH, dtype="bfloat16")
    of_library = {"torch_dtype", "use_cache", "initializer_range"}  # a new file is for all versions, and says more
    assert {key: new[key] for key in new.keys() - of_library} == {
        key: value for key, value in GLM_47_FLASH.items() if key not in ("dtype", "transformers_version")
    }


# The file of zai-org/GLM-5.2 (revision b4734de4), in its order, and the hash of the file.
GLM_52 = PUBLISHED["GLM-5.2"]
SHA256_OF_52 = "185f93ee6d12548e16a847e279dc0c3c90b1524c970b0866b42fb545747d859a"


def test_the_published_file_of_glm_52_is_its_preset_and_written_back_byte_for_byte():
    shape = shape_of(GLM_52)
    assert shape == PRESETS["GLM-5.2"]
    config = config_of(shape, GLM_52, eos_ids=EOS_OF_FLASH, dtype="bfloat16")
    text = json.dumps(config, indent=2) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256_OF_52


def test_layers_with_an_indexer_are_read_from_any_of_their_keys():
    """transformers reads each file as the same layers."""
    plain = {key: value for key, value in GLM_52.items() if key not in ("indexer_types", "index_topk_freq")}
    pattern = "".join(kind[0].upper() for kind in GLM_52["indexer_types"])
    for raw in (plain | {"index_topk_freq": 4}, plain | {"index_topk_pattern": pattern}):
        assert shape_of(raw) == PRESETS["GLM-5.2"]
        assert GlmMoeDsaConfig(**raw).indexer_types == GLM_52["indexer_types"]
    first = plain | {"max_position_embeddings": 202752, "head_dim": 64}
    first["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default"}
    assert shape_of(first) == PRESETS["GLM-5"] == PRESETS["GLM-5.1"]
    fewer = PRESETS["GLM-5.2"].model_copy(update=dict(num_hidden_layers=3, indexer_types=("full", "shared", "full")))
    config = config_of(fewer, GLM_52, eos_ids=EOS_OF_FLASH, dtype="bfloat16")
    assert config["indexer_types"] == ["full", "shared", "full"]
    assert "index_topk_freq" not in config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index_topk_pattern": "FXS", "indexer_types": None}, "must consist of F and S"),
        ({"index_topk_freq": 0, "indexer_types": None}, "index_topk_freq = 0"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
        ({"head_dim": 256}, "head_dim = 256"),
        ({"index_topk": None}, "index_topk"),
    ],
    ids=str,
)
def test_a_file_of_glm_5_that_asks_for_another_computation_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        shape_of(GLM_52 | change)


@pytest.mark.parametrize("types", [None, ("full", "shared", "full")], ids=str)
def test_transformers_reads_a_new_file_of_glm_5_as_the_same_model(types, tmp_path):
    shape = PRESETS["debug-glm5"].model_copy(update={"num_hidden_layers": 3, "indexer_types": types})
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, None, eos_ids=EOS, dtype="bfloat16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, GlmMoeDsaConfig) and theirs.qk_rope_head_dim == shape.qk_rope_head_dim
    assert theirs.indexer_types == list(types or ["full"] * 3)
    assert theirs.mlp_layer_types.count("dense") == shape.first_k_dense_replace
    theirs.save_pretrained(tmp_path / "again")
    assert shape_of(read_config(tmp_path / "again")) == shape


FLASH = PRESETS["debug-flash"]


@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 0}, {"first_k_dense_replace": 2}], ids=str)
def test_transformers_reads_a_new_file_of_flash_as_the_same_model(changes, tmp_path):
    shape = FLASH.model_copy(update={"num_hidden_layers": 3, "rope_scaling": YARN} | changes)
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, None, eos_ids=EOS, dtype="bfloat16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, Glm4MoeLiteConfig) and theirs.qk_rope_head_dim == shape.qk_rope_head_dim
    assert theirs.mlp_layer_types.count("dense") == shape.first_k_dense_replace and theirs.rope_interleave
    theirs.save_pretrained(tmp_path / "again")
    assert shape_of(read_config(tmp_path / "again")) == shape


def test_a_file_of_transformers_own_is_read():
    raw = Glm4MoeLiteConfig(mlp_layer_types=["dense"] * 2 + ["sparse"] * 45).to_dict()
    raw |= {"architectures": ["Glm4MoeLiteForCausalLM"], "num_nextn_predict_layers": 0}
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    changes = {"first_k_dense_replace": 2, "num_nextn_predict_layers": 0}
    assert shape_of(raw) == PRESETS["GLM-4.7-Flash"].model_copy(update=changes)


@pytest.mark.parametrize(
    ("change", "words"),
    REFUSED["flash"],
    ids=str,
)
def test_a_file_of_flash_that_asks_for_another_computation_is_refused(change, words):
    raw = config_of(FLASH, None, eos_ids=EOS, dtype="bfloat16")
    with pytest.raises(UserError, match=words):
        shape_of(raw | change)


@pytest.mark.parametrize("key", ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_latent_attention_without_a_low_rank_part_is_refused_by_its_key(key):
    """transformers builds a whole q_proj where q_lora_rank is null."""
    raw = config_of(FLASH, None, eos_ids=EOS, dtype="bfloat16") | {key: None}
    if key == "q_lora_rank":
        assert Glm4MoeLiteConfig(**raw).q_lora_rank is None
    with pytest.raises(UserError, match=f"config.json: {key} = None: glm46 computes latent attention"):
        shape_of(raw)


def test_absent_keys_of_flash_are_no_guess():
    raw = config_of(FLASH, None, eos_ids=EOS, dtype="bfloat16")
    for key in ("q_lora_rank", "qk_nope_head_dim", "v_head_dim", "rope_theta"):
        with pytest.raises(UserError, match=f"{key} is missing"):
            shape_of({name: value for name, value in raw.items() if name != key})


@pytest.mark.parametrize("key", sorted(PRESETS["GLM-4.6"].model_dump(exclude_none=True)))
def test_no_number_is_guessed(key):
    with pytest.raises(UserError) as error:
        shape_of({name: value for name, value in GLM_46.items() if name != key})
    assert len(error.value.faults) == 1 and f"{key} is missing" in error.value.faults[0]


def test_a_window_cannot_be_exported():
    with pytest.raises(UserError, match="sliding_window = 512"):
        config_of(PRESETS["debug"].model_copy(update=dict(sliding_window=512)), None, eos_ids=EOS, dtype="float32")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        read_config(tmp_path)


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
