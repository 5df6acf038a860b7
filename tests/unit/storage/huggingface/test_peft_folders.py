"""PEFT folders: read, written, and held to the base that they were trained on."""

import copy
import json
import warnings

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from torch import nn
from transformers import Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM

from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.storage.huggingface.adapter_origin import AdapterOrigin, held_base_dtype, other_base_dtype
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter, is_adaptable
from glm46.storage.huggingface.peft_folder import AdapterFolder
from glm46.storage.huggingface.peft_import import import_adapter
from glm46.storage.huggingface.schemes import CONFIG_KEY, SCHEMES, config_of_scheme
from tests.unit.storage.huggingface.adapters import EOS, LATENT, SHAPE, TINY, adapters, merged

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
FP32 = ExportOptions(dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(SHAPE, tmp_path_factory)


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    base = make_base(PRESETS["GLM-4.7-Flash"].model_copy(update=TINY | LATENT), tmp_path_factory)
    for layer in base[3].model.layers:  # not that of the config
        layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
    return base


def make_base(shape, tmp_path_factory):
    """A folder of a small model without its prediction layer, our weights of it, and the model in `transformers`."""
    torch.manual_seed(0)
    shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
    with torch.device("cpu"):
        model = Transformer(shape)
    weights = {n: torch.randn_like(t) * 0.2 for n, t in [*model.named_parameters(), *model.named_buffers()]}
    folder = tmp_path_factory.mktemp("peft") / "base"
    export_weights(folder, shape, config_of(shape, None, eos_ids=EOS, dtype="float32"), weights, options=FP32)
    kind = Glm4MoeLiteForCausalLM if shape.is_latent else Glm4MoeForCausalLM
    theirs = kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    return folder, shape, weights, theirs


def open_in_peft(base, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(base[3]), folder).eval()


@torch.no_grad()
def our_logits(base, tensors, scale):
    with torch.device("cpu"):
        model = Transformer(base[1])
    model.load_state_dict(merged(base[2], tensors, scale))
    return model(IDS)


def export(base, folder, tensors, scale=2.0):
    export_adapter(folder, base[1], tensors, scale=scale, base=str(base[0]))
    return folder


def empty_like(tensors):
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}


@torch.no_grad()
def assert_peft_computes(base, folder, tensors, scale):
    """PEFT opens the folder without a warning of a missing tensor and computes the logits of our merged weights."""
    theirs, ours = open_in_peft(base, folder)(IDS).logits, our_logits(base, tensors, scale)
    plain = base[3](IDS).logits
    assert (theirs - ours).norm() < 1e-5 * ours.norm()
    assert (plain - ours).norm() > 1e-2 * ours.norm()


KINDS = {
    "all": {}, "attention": dict(targets=["attention"]), "experts": dict(targets=["experts"]),
    "dense": dict(targets=["dense"]), "shared experts": dict(targets=["shared_experts"]),
    "attention, dense and shared experts": dict(targets=["attention", "dense", "shared_experts"]),
    "expert rank 1 of 8": dict(rank=8, expert_rank=1), "expert rank above": dict(rank=2, expert_rank=6),
    "attention of two layers": dict(targets=["attention"], layers=[1, 2]), "all of two layers": dict(layers=[0, 2]),
    "DoRA on attention": dict(targets=["attention"], dora=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_peft_computes_our_logits_and_we_read_the_folder_back(base, kind, tmp_path):
    tensors = adapters(**kind, shape=base[1])
    folder = export(base, tmp_path / "adapter", tensors, scale=0.3)  # alpha is no whole number
    assert_peft_computes(base, folder, tensors, 0.3)
    again = empty_like(tensors)
    import_adapter(folder, base[1], again, scale=0.3)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["all", "attention of two layers", "DoRA on attention"])
def test_peft_computes_our_logits_of_flash_and_we_read_the_folder_back(flash, kind, tmp_path):
    """PEFT names no modules of this model by itself, and the usual names adapt o_proj alone."""
    test_peft_computes_our_logits_and_we_read_the_folder_back(flash, KINDS[kind], tmp_path)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    five = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    assert config["target_modules"][:5] == five


@pytest.mark.parametrize("kind", ["all", "expert rank 1 of 8", "DoRA on attention"])
def test_what_peft_saves_again_reads_back_equal(base, kind, tmp_path):
    tensors = adapters(**KINDS[kind], shape=base[1])
    open_in_peft(base, export(base, tmp_path / "ours", tensors)).save_pretrained(tmp_path / "theirs")
    saved = safetensors.torch.load_file(tmp_path / "theirs/adapter_model.safetensors")
    assert any(".experts.base_layer." in key for key in saved) == (kind != "DoRA on attention")  # the fused form
    again = empty_like(tensors)
    import_adapter(tmp_path / "theirs", base[1], again, scale=2.0)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_without_experts_peft_adapts_nothing_else(base, tmp_path):
    tensors = adapters(["attention", "dense", "shared_experts"], shape=base[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        opened = PeftModel.from_pretrained(copy.deepcopy(base[3]), export(base, tmp_path / "adapter", tensors))
    adapted = [name for name, _ in opened.named_parameters() if "lora_A" in name]
    assert len(adapted) == sum(name.endswith("lora_A") for name in tensors)


@pytest.mark.parametrize(("targets", "options"), [
    (("attention", "dense", "shared_experts", "experts"), {}), (("shared_experts",), {}),
    (("attention", "experts"), {"layers": (1, 3)}), (("dense", "experts"), {"dora": True}),
], ids=str)  # fmt: skip
def test_peft_finds_the_same_modules_where_experts_are_modules(base, targets, options, tmp_path):
    tensors = adapters(targets, rank=4, expert_rank=2, shape=base[1], **options)
    export_adapter(tmp_path / "a", base[1], tensors, scale=2.0, base=str(base[0]), for_transformers_4=True)
    stored = safetensors.torch.load_file(tmp_path / "a" / "adapter_model.safetensors")
    model = nn.Module()
    for name, entry in HFNames(base[1], repeat_shared=False).entries.items():
        for part in entry.parts if is_adaptable(entry) or name == "lm_head.weight" else ():
            *path, last = part.hf_name.removesuffix(".weight").split(".")
            owner = model
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.add_module(last, nn.Linear(*part.hf_shape[::-1], bias=False))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    inject_adapter_in_model(LoraConfig(**config), model)
    state = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    assert state == {name.removeprefix("base_model.model."): tensor.shape for name, tensor in stored.items()}


def test_separately_trained_gate_and_up_need_twice_the_rank(base, tmp_path):
    """PEFT trains gate and up of its fused form as one product of twice the rank."""
    shape, tensors = base[1], adapters(["experts"], shape=base[1])
    opened = open_in_peft(base, export(base, tmp_path / "ours", tensors))
    with torch.no_grad():
        for name, parameter in opened.named_parameters():
            if "lora_" in name:
                parameter += torch.randn_like(parameter) * 0.1
    opened.save_pretrained(tmp_path / "trained")
    with pytest.raises(UserError, match=r"gate_up.*adapter\.expert_rank = 4.*8"):
        import_adapter(tmp_path / "trained", shape, empty_like(tensors), scale=2.0)
    with AdapterFolder(tmp_path / "trained", shape) as adapter:
        assert adapter.product("layers.1.mlp.experts.gate_up", 3).lora_A.shape == (8, 24)
        weights = {name: tensor.clone() for name, tensor in base[2].items()}
        adapter.merge_into(weights)
    with torch.no_grad():
        theirs, ours = opened(IDS).logits, our_logits((*base[:2], weights), {}, 1.0)
    assert (theirs - ours).norm() < 1e-5 * ours.norm()


def test_an_adapter_with_patterns_that_peft_made_gives_the_same_weights(base, tmp_path):
    """The fused form of rank r with one A for gate and up, rsLoRA, and other ranks and alphas for some modules."""
    config = LoraConfig(
        r=4, lora_alpha=3.0, use_rslora=True, target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_experts.up_proj.weight"],
        rank_pattern={"o_proj": 6, r"layers\.2\.mlp\.experts\.down_proj": 2}, alpha_pattern={"q_proj": 5.0},
    )  # fmt: skip
    made = get_peft_model(copy.deepcopy(base[3]), config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(tmp_path / "theirs")
    theirs = dict(made.merge_and_unload().named_parameters())
    weights = {name: tensor.clone() for name, tensor in base[2].items()}
    with AdapterFolder(tmp_path / "theirs", base[1]) as adapter:
        adapter.merge_into(weights)
        assert len(adapter.weights) == 4 * 2 + 3 * 3
    for name in adapter.weights:
        of_peft = theirs[f"model.{name}_proj" if ".experts." in name else f"model.{name}"]
        assert not torch.equal(weights[name], base[2][name])
        assert (weights[name] - of_peft).norm() < 1e-6 * of_peft.norm(), name


def test_a_folder_with_another_scale_keeps_its_product(base, tmp_path):
    tensors = adapters(["attention"], shape=base[1])
    again = empty_like(tensors)
    import_adapter(export(base, tmp_path / "adapter", tensors, scale=3.0), base[1], again, scale=1.5)
    for name, tensor in tensors.items():
        torch.testing.assert_close(again[name], tensor * (2 if name.endswith("lora_B") else 1))


def damaged(folder, change):
    """Change keys of the config, or tensors, which have a dot in their names here: None removes one."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {k: v for k, v in change.items() if "." not in k}))
    file = folder / "adapter_model.safetensors"
    kept = safetensors.torch.load_file(file) | {f"{LAYER}.{k}.weight": v for k, v in change.items() if "." in k}
    safetensors.torch.save_file({name: t for name, t in kept.items() if t is not None}, file, {"format": "pt"})
    return folder


LAYER = "base_model.model.model.layers"
EXPERTS = [f"mlp.experts.{expert}" for expert in range(4)]
BAD = {  # the test's case -> changed tensors of the file, or keys of the config; words of the message
    "missing": ({"2.mlp.experts.3.up_proj.lora_A": None}, ["1 ", "2.mlp.experts.3.up_proj"]),
    "an expert missing": (
        {f"2.mlp.experts.3.up_proj.lora_{x}": None for x in "AB"}, ["missing", "2.mlp.experts.3.up_proj"]
    ),
    "a module missing": (
        {f"2.self_attn.k_proj.lora_{x}": None for x in "AB"}, ["2.self_attn.k_proj", "adapter.targets"]
    ),
    "one more": ({"1.mlp.gate.lora_A": torch.zeros(4, 24)}, ["1.mlp.gate", "projections"]),
    "MTP": ({"4.self_attn.q_proj.lora_A": torch.zeros(4, 24)}, ["layers.4", "MTP"]),
    "shape": ({"0.self_attn.k_proj.lora_B": torch.zeros(17, 4)}, ["k_proj.lora_B", "[17, 4]", "[16, 4]"]),
    "not finite": ({"0.self_attn.k_proj.lora_B": torch.full((16, 4), torch.nan)}, ["k_proj.lora_B", "NaN"]),
    "rank": ({"r": 8}, [" is [4, ", " have [8, ", "more tensors have other shapes", "adapter_config.json"]),
    "magnitudes absent": ({"use_dora": True}, ["lora_magnitude_vector", "missing"]),
    "PiSSA": ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
    "saved modules": ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
    "another method": ({"peft_type": "VERA"}, ["peft_type", "LORA"]),
    "bias": ({"bias": "all"}, ["bias", "none"]),
    "damaged": ({"r": None}, ["adapter_config.json", "again"]),
    "pattern": ({"alpha_pattern": {"(": 1}}, ["adapter_config.json", "again"]),
}  # fmt: skip


@pytest.mark.parametrize("change, words", BAD.values(), ids=BAD)
def test_a_folder_that_does_not_fit_is_refused_by_name_and_changes_nothing(base, change, words, tmp_path):
    tensors = adapters(shape=base[1])
    folder = damaged(export(base, tmp_path / "adapter", tensors), change)
    with pytest.raises(UserError) as caught:
        import_adapter(folder, base[1], empty_like(tensors), scale=2.0)
    assert str(folder) in caught.value.faults[0]
    assert all(word in str(caught.value) for word in words), caught.value


def test_fused_tensors_of_peft_0_17_are_refused(base, tmp_path):
    """These versions took [E, O, I] for [E, in, out]: A and B of their files are exchanged."""
    tensors = adapters(["attention"], shape=base[1])
    experts = {}
    for layer in (1, 2, 3):
        experts |= {
            f"{layer}.mlp.experts.base_layer.lora_A": torch.zeros(16, 24),
            f"{layer}.mlp.experts.base_layer.lora_B": torch.zeros(24, 16),
            f"{layer}.mlp.experts.lora_A": torch.zeros(16, 24),
            f"{layer}.mlp.experts.lora_B": torch.zeros(12, 16),
        }
    folder = damaged(export(base, tmp_path / "adapter", tensors), experts)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts: .*0\.17"):
        AdapterFolder(folder, base[1])


def fused_folder(base, folder, shape, *, exchanged, **config):
    """An adapter on all experts of layer 1 in PEFT's fused form, or in that with A and B exchanged."""
    tensors = {}
    for module, name in (("experts.base_layer", "gate_up"), ("experts", "down")):
        experts, rows, columns = HFNames(shape, repeat_shared=False).entries[f"layers.1.mlp.experts.{name}"].shape
        inputs, outputs = (rows, columns) if exchanged else (columns, rows)
        tensors[f"1.mlp.{module}.lora_A"] = torch.zeros(experts * 4, inputs)
        tensors[f"1.mlp.{module}.lora_B"] = torch.zeros(outputs, 4 * experts)
    return damaged(export(base, folder, adapters(["attention"], shape=base[1])), tensors | config)


def test_layouts_of_the_same_shapes_are_told_apart_by_the_version_of_peft(base, tmp_path):
    """Gate and up of this model are as long as they are wide, so only down tells exchanged tensors by its shape."""
    assert base[1].hidden_size == 2 * base[1].moe_intermediate_size

    def weights(name, *, exchanged=False, **config):
        folder = fused_folder(base, tmp_path / name, base[1], exchanged=exchanged, **config)
        return AdapterFolder(folder, base[1]).weights

    for version in ("0.19.0", "0.21.2", "0.19.1.dev0@UNKNOWN", "1.0"):
        assert "layers.1.mlp.experts.gate_up" in weights(version, peft_version=version)
    for version in ("0.18.1", "0.17"):
        with pytest.raises(UserError, match=r"experts\.base_layer: .* are exchanged, as PEFT 0\.17 and 0\.18"):
            weights(f"{version}-old", exchanged=True, peft_version=version)
    for version in (None, "", 4):
        with pytest.raises(UserError, match=r"experts\.base_layer: .* since 24 is both sizes.*peft_version"):
            weights(f"{version}-unknown", peft_version=version)


def test_another_kind_or_rank_than_that_of_the_run_is_refused(base, tmp_path):
    tensors = adapters(["attention"], shape=base[1], dora=True)
    folder = export(base, tmp_path / "adapter", tensors)
    plain = empty_like({name: t for name, t in tensors.items() if "magnitude" not in name})
    with pytest.raises(UserError, match='adapter.name = "lora".*use_dora.*"dora"'):
        import_adapter(folder, base[1], plain, scale=2.0)
    more = empty_like(adapters(["attention", "dense"], shape=base[1], dora=True))
    with pytest.raises(UserError, match=r"lacks.*layers\.0\.mlp\.gate_proj.*adapter\.targets"):
        import_adapter(folder, base[1], more, scale=2.0)
    higher = empty_like(adapters(["attention"], rank=8, shape=base[1], dora=True))
    with pytest.raises(UserError, match=r"adapter\.rank = 8.*4"):
        import_adapter(folder, base[1], higher, scale=2.0)


@pytest.mark.parametrize("preset", ["GLM-4.6", "GLM-4.5-Air"])
def test_servers_find_every_tensor_in_their_model(preset, tmp_path):
    """vLLM packs q, k, v and gate, up, asserts that a layer has all experts with all three projections of one rank
    (`pack_moe`), takes A [r, I] and B [O, r], and refuses other modules and keys of the config. SGLang finds experts by
    `experts\\.(\\d+)\\.`, needs each last name in `target_modules`, and scales by alpha / r alone."""
    shape = PRESETS[preset].model_copy(update=TINY)
    tensors = adapters(rank=8, expert_rank=4, shape=shape)
    export_adapter(tmp_path / "adapter", shape, tensors, scale=2.0, base="base")
    saved = safetensors.torch.load_file(tmp_path / "adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    widths = dict(D=24, H=32, K=16, I=40, F=12)
    attention = {"self_attn.q_proj": "HD", "self_attn.k_proj": "KD", "self_attn.v_proj": "KD", "self_attn.o_proj": "DH"}
    expected = {}
    for layer in range(4):
        stems = {"mlp": "I"} if layer == 0 else dict.fromkeys(["mlp.shared_experts", *EXPERTS], "F")
        inner = {f"{stem}.{name}_proj": width + "D" for stem, width in stems.items() for name in ("gate", "up")}
        inner |= {f"{stem}.down_proj": "D" + width for stem, width in stems.items()}
        for module, (rows, columns) in (attention | inner).items():
            expected[f"{LAYER}.{layer}.{module}.lora_A.weight"] = (8, widths[columns])
            expected[f"{LAYER}.{layer}.{module}.lora_B.weight"] = (widths[rows], 8)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == expected
    assert {name.split(".")[-3] for name in saved} <= set(config["target_modules"])
    assert (config["r"], config["lora_alpha"], config["bias"]) == (8, 16.0, "none")
    refused = ["use_rslora", "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"]
    assert not any(config.get(key) for key in refused)


DEBUG = PRESETS["debug"]


def base_folder(folder, scheme=None):
    folder.mkdir()
    config = config_of(DEBUG, None, eos_ids=[0], dtype="bfloat16")
    if scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(SCHEMES[scheme], HFNames(DEBUG, repeat_shared=False))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapter_folder(folder, base_dtype, *, is_ours=True):
    folder.mkdir()
    origin = AdapterOrigin({"config.json": "0" * 64} if is_ours else {}, base_dtype)
    for name, content in origin.contents().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("scheme", "trained", "used", "words"), [
    (None, None, None, None), (None, "nf4", "nf4", None), (None, "int4", "int4", None),
    (None, "nf4", None, "was trained on a base in nf4, which {base} is not"),
    (None, "int4", None, "was trained on a base in int4, which {base} is not"),
    (None, None, "nf4", "was trained on a base with the values of its folder, which are rounded to nf4"),
    (None, "nf4", "int4", "was trained on a base in nf4, which {base} is not, but rounded to int4"),
    # FP8 and INT4 weights of a folder keep their values.
    ("fp8-block", "float8", None, None), ("fp8-block", None, "float8", None),
    ("fp8-block", "float8", "nf4", "with the values of its folder, which are rounded to nf4"),
    ("int4", "int4", None, None), ("int4", None, "int4", None),
    ("int4", "nf4", "int4", "was trained on a base in nf4"),
])  # fmt: skip
def test_a_difference_is_told_in_both_directions(scheme, trained, used, words, tmp_path):
    base, adapter = base_folder(tmp_path / "base", scheme), adapter_folder(tmp_path / "adapter", trained)
    difference = other_base_dtype(adapter, base, used)
    if words is None:
        assert difference is None
    else:
        assert words.format(base=base) in difference


def test_folders_of_other_programs_do_not_say_how_their_base_was_held(tmp_path):
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "adapter", None, is_ours=False)
    assert other_base_dtype(adapter, base, "nf4") is None


def test_a_step_folder_has_no_quantised_values(tmp_path):
    assert held_base_dtype(tmp_path, "int4") == "int4"
    (tmp_path / "base_format.json").write_text('{"base_dtype": "int3"}')
    with pytest.raises(UserError, match="base_dtype = 'int3' is unknown"):
        other_base_dtype(tmp_path, tmp_path, None)


def test_adapters_of_indexers_are_refused_with_the_modules_to_leave_out(tmp_path):
    """As PEFT saves them with target_modules = "all-linear"."""
    shape = PRESETS["debug-glm5"].model_copy(update={"num_hidden_layers": 2, "indexer_types": ("full", "shared")})
    modules = ["self_attn.q_a_proj", *(f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "weights_proj"))]
    tensors = {}
    for module in modules:
        (part,) = HFNames(shape, repeat_shared=False).entries[f"layers.0.{module}.weight"].parts
        rows, columns = part.hf_shape
        prefix = f"base_model.model.model.layers.0.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.ones(4, columns)
        tensors[f"{prefix}.lora_B.weight"] = torch.zeros(rows, 4)
    safetensors.torch.save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [m.rpartition(".")[2] for m in modules]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        AdapterFolder(tmp_path, shape)
    (fault,) = error.value.faults
    assert "3 modules of indexers" in fault and "layers.0.self_attn.indexer.wk" in fault
    assert "frozen" in fault and "without wq_b, wk and weights_proj" in fault
    assert "q_a_proj" not in fault
