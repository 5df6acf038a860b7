"""Folders in INT4, and the keys with which a folder describes its quantisation."""

import copy
import inspect
import json
from math import prod

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.transform import TransformConfig
from transformers import CompressedTensorsConfig, FineGrainedFP8Config

from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import ModelConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.files.tensor_file import TensorFile, lay_out
from glm46.storage.huggingface import quantization_keys
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, _lay_out_files, export_weights
from glm46.storage.huggingface.folder_tensors import SINGLE_FILE
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.import_weights import FolderReader
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, ERRORS_FILE, SCHEMES, config_of_scheme, scheme_of
from tests.builders import model_table
from tests.unit.storage.huggingface.test_hf_fp8 import stored_in

INT4 = Int4()
TABLE = ModelConfig(**model_table(
    flavor="debug", vocab_size=512, hidden_size=256, num_hidden_layers=2, intermediate_size=384,
    moe_intermediate_size=128, n_routed_experts=2, num_experts_per_tok=1, num_attention_heads=3, head_dim=32,
    num_key_value_heads=1,
))  # fmt: skip
SHAPE = resolve_shape(TABLE)
UNFIT = ("o_proj.weight",)  # 96 columns are no groups of 128


def export(folder, tensors, dtype=torch.bfloat16):
    config = config_of(SHAPE, None, eos_ids=[0], dtype="bfloat16")
    config[CONFIG_KEY] = config_of_scheme(INT4, HFNames(SHAPE, repeat_shared=False))
    export_weights(folder, SHAPE, config, tensors, options=ExportOptions(dtype=dtype, scheme=INT4))
    return folder


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.normal_(tensor, std=0.02)
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    return export(tmp_path_factory.mktemp("int4") / "folder", tensors)


def rewrite(folder, stored):
    header, records = lay_out((n, t.dtype, tuple(t.shape)) for n, t in stored.items())
    (folder / SINGLE_FILE).write_bytes(header)
    with TensorFile(folder / SINGLE_FILE, records, writable=True) as file:
        for name, tensor in stored.items():
            file.write(name, tuple((0, size) for size in tensor.shape), tensor)


def test_compressed_tensors_reads_our_values(folder):
    """Its own classes parse the config and unpack every weight to what we read, bit for bit."""
    raw = json.loads((folder / "config.json").read_text())
    assert scheme_of(raw, "") == INT4
    theirs = QuantizationConfig.model_validate(raw[CONFIG_KEY])
    assert theirs.format == "pack-quantized"
    (scheme,) = theirs.config_groups.values()
    stored, found = stored_in(folder), 0
    with FolderReader(folder, SHAPE) as reader:
        for name in (key.removesuffix("_packed") for key in stored if key.endswith("_packed")):
            parts = {f"weight{suffix}": stored[name + suffix] for suffix in INT4.suffixes}
            parts["weight_scale"] = parts["weight_scale"].float()  # its product with BF16 scales would round
            want = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
            ours = torch.empty(want.shape)
            reader.read(name, tuple((0, size) for size in want.shape), ours)
            assert torch.equal(ours, want)
            found += 1
    projections = [n for n in HFNames(SHAPE, repeat_shared=False).places if "_proj.weight" in n and "eh_proj" not in n]
    assert found == len([name for name in projections if not name.endswith(UNFIT)]) > 10
    assert any(entry.endswith("o_proj$") for entry in raw[CONFIG_KEY]["ignore"])


@pytest.mark.parametrize(("order", "is_read"), [("static", True), ("weight", True), ("group", False)])
def test_orders_of_rounding_are_read_and_orders_of_columns_refused(folder, order, is_read):
    raw = json.loads((folder / "config.json").read_text())
    (group,) = raw[CONFIG_KEY]["config_groups"].values()
    group["weights"]["actorder"] = order
    if is_read:
        assert QuantizationConfig.model_validate(raw[CONFIG_KEY])  # which no longer takes "group"
        assert scheme_of(raw, "") == INT4
    else:
        with pytest.raises(UserError, match="config.json: quantization_config"):
            scheme_of(raw, "config.json")


def test_a_box_equals_its_part_of_the_whole_weight(folder):
    name, rows, columns = "model.layers.0.mlp.down_proj.weight", 256, 384
    with FolderReader(folder, SHAPE) as reader:
        whole = torch.empty(rows, columns)
        reader.read(name, ((0, rows), (0, columns)), whole)
        for row, height, column, width in ((0, 256, 0, 384), (7, 3, 5, 130), (255, 1, 383, 1), (0, 2, 128, 128)):
            part = torch.empty(height, width)
            reader.read(name, ((row, height), (column, width)), part)
            assert torch.equal(part, whole[row : row + height, column : column + width])


def test_a_folder_in_fp32_is_written_again_byte_for_byte(tensors, tmp_path):
    first = export(tmp_path / "a", tensors, torch.float32)
    back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with FolderReader(first, SHAPE) as reader:
        for name, tensor in back.items():
            assert reader.fill(name, tensor, [torch.arange(size) for size in tensor.shape]) == []
    second = export(tmp_path / "b", back, torch.float32)
    assert (second / SINGLE_FILE).read_bytes() == (first / SINGLE_FILE).read_bytes()


def test_errors_are_below_those_of_the_largest_value_rule(folder, tensors):
    """Normal weights: 0.111 with the largest value at 7.5 steps, 0.101 with the best scale of each
    group; small matrices vary by a tenth."""
    errors = json.loads((folder / ERRORS_FILE).read_text())
    assert len(errors) > 10
    relative = sorted(error["relative"] for error in errors.values())
    assert relative[0] > 0.09 and relative[len(relative) // 2] < 0.103 and relative[-1] < 0.11
    weight = tensors["layers.0.mlp.down_proj.weight"]
    groups = weight.reshape(256, -1, 128)
    scales = groups.abs().amax(-1, keepdim=True) / 7.5
    plain = (groups / scales).round().clamp(-8, 7) * scales - groups
    assert errors["model.layers.0.mlp.down_proj.weight"]["relative"] < plain.norm() / weight.norm()


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
def test_extreme_groups_stay_finite(value):
    weight = torch.full((2, 128), value)
    weight[0, 0] = -value
    back = INT4.dequantise(INT4.quantise(weight), (2, 128), ((0, 2), (0, 128)))
    assert back.isfinite().all() and (back - weight).abs().max() <= 0.08 * value + 1e-40


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "layers"), [("GLM-4.6", 20), ("GLM-4.5-Air", 30)])
def test_size_of_a_folder(preset, layers):
    """The share of embedding and head, which stay BF16, is smaller still in the whole models."""
    names = HFNames(PRESETS[preset].model_copy(update={"num_hidden_layers": layers}), repeat_shared=False)

    def size(scheme):
        files = _lay_out_files(names, ExportOptions(scheme=scheme))
        return sum(record.nbytes for file in files for record in file.records.values())

    assert size(INT4) < 0.28 * size(None)  # the goal of issue 21
    quantised = [name for file in _lay_out_files(names, ExportOptions(scheme=INT4)) for name in file.records]
    assert sum(name.endswith("_packed") for name in quantised) > 0.99 * sum(
        "experts" in name and len(part.hf_shape) == 2 for name, (_, part) in names.places.items()
    )


def damage(kind, stored):
    name = next(key for key in stored if key.endswith("_packed"))
    if kind == "missing":
        del stored[name.replace("_packed", "_scale")]
    elif kind == "scales":
        stored[name.replace("_packed", "_scale")] = torch.ones(3, 1)
    elif kind == "columns":
        stored[name] = stored[name][:, :-1].contiguous()
    else:
        stored["lm_head.weight_packed"] = torch.zeros(512, 32, dtype=torch.int32)
        stored["lm_head.weight_scale"] = torch.ones(512, 2, dtype=torch.bfloat16)
        stored["lm_head.weight_shape"] = torch.tensor([512, 256])
        del stored["lm_head.weight"]
    return stored


@pytest.mark.parametrize(
    ("kind", "words"),
    [("missing", "_scale is missing"), ("scales", "it must be"), ("columns", "groups of 128"), ("head", "lm_head")],
)
def test_damaged_folders_are_refused(kind, words, tensors, tmp_path):
    folder = export(tmp_path / "a", tensors)
    rewrite(folder, damage(kind, stored_in(folder)))
    with pytest.raises(UserError, match=words):
        FolderReader(folder, SHAPE)


def test_a_model_without_groups_is_refused():
    shape = SHAPE.model_copy(update={"hidden_size": 96, "intermediate_size": 96, "moe_intermediate_size": 96})
    assert prod((shape.num_attention_heads, shape.head_dim)) == 96
    with pytest.raises(UserError, match="--dtype int4.*128"):
        config_of_scheme(INT4, HFNames(shape, repeat_shared=False))


FILE = "config.json"
PUBLISHED_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ROTATION = {
    "config_groups": {
        "R4": {
            "type": "hadamard",
            "apply": [
                {"targets": ["re:.*down_proj$"], "location": "input"},
                {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True},
            ],
        }
    }
}


def exported(name):
    return config_of_scheme(SCHEMES[name], HFNames(PRESETS["debug"], repeat_shared=False))


def faults_of(config):
    with pytest.raises(UserError) as refused:
        scheme_of({CONFIG_KEY: config}, FILE)
    return refused.value.faults


@pytest.mark.parametrize("name", SCHEMES)
def test_an_online_rotation_is_refused_by_name(name):
    rotation = TransformConfig.model_validate(ROTATION).model_dump(mode="json")
    (fault,) = faults_of(exported(name) | {"transform_config": rotation})
    assert fault.startswith(f"{FILE}: {CONFIG_KEY}.transform_config = ") and "use the BF16 model" in fault


@pytest.mark.parametrize("name", SCHEMES)
def test_a_config_that_compressed_tensors_writes_itself_is_read(name):
    """With all its default values, and as transformers writes it with empty tables for what is not used."""
    theirs = QuantizationConfig.model_validate(exported(name)).model_dump(mode="json")
    empty = {"transform_config": {}, "sparsity_config": {}, "version": "0.20.1"}
    assert scheme_of({CONFIG_KEY: theirs | empty}, FILE) == SCHEMES[name]
    dense = {"format": "dense", "targets": [], "ignore": ["lm_head"], "global_sparsity": 0.1}
    assert scheme_of({CONFIG_KEY: theirs | {"sparsity_config": dense}}, FILE) == SCHEMES[name]
    assert scheme_of({CONFIG_KEY: theirs | {"transform_config": {"config_groups": {}}}}, FILE) == SCHEMES[name]


@pytest.mark.parametrize(("key", "value"), [
    ("moe_sparsity_config", {"layers": {"1": {"num_experts": 4}}}),
    ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
    ("sparsity_config", "2:4"),
    ("a_key_of_tomorrow", 1),
])  # fmt: skip
def test_other_keys_of_compressed_tensors_are_refused_by_name(key, value):
    for name in SCHEMES:
        faults = faults_of(exported(name) | {key: value})
        assert all(fault.startswith(f"{FILE}: {CONFIG_KEY}.{key}") for fault in faults)


@pytest.mark.parametrize(("key", "value"), [("dynamic", True), ("dynamic", "local"), ("global_scale", 2.0)])
def test_keys_of_the_weights_are_refused_by_name(key, value):
    config = copy.deepcopy(exported("fp8-channel"))
    config["config_groups"]["group_0"]["weights"][key] = value
    (fault,) = faults_of(config)
    assert f"{CONFIG_KEY}.config_groups.group_0.weights.{key} = " in fault


def test_a_group_in_another_format_is_refused_by_name():
    config = copy.deepcopy(exported("int4"))
    config["config_groups"]["group_0"]["format"] = "marlin-24"
    (fault,) = faults_of(config)
    assert f'{CONFIG_KEY}.config_groups.group_0.format = "marlin-24"' in fault


@pytest.mark.parametrize(("name", "other"), [("fp8-channel", "int"), ("int4", "float")])
def test_values_of_another_type_are_another_scheme(name, other):
    config = copy.deepcopy(exported(name))
    config["config_groups"]["group_0"]["weights"]["type"] = other
    (fault,) = faults_of(config)
    assert "is not supported" in fault


def test_the_fp8_config_of_transformers_is_read():
    theirs = FineGrainedFP8Config().to_dict() | {"quant_method": "fp8"}
    for config in (
        theirs,
        PUBLISHED_FP8,
        PUBLISHED_FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]},
    ):
        assert scheme_of({CONFIG_KEY: config}, FILE) == Fp8((128, 128), "_scale_inv")


@pytest.mark.parametrize(("key", "value"), [("expert_dtype", "fp4"), ("fmt", "e5m2"), ("transform_config", ROTATION)])
def test_other_keys_of_fp8_are_refused_by_name(key, value):
    (fault,) = faults_of(PUBLISHED_FP8 | {key: value})
    assert fault.startswith(f"{FILE}: {CONFIG_KEY}.{key} = ")


def test_the_old_name_of_the_key_is_refused():
    with pytest.raises(UserError, match="compression_config is the old name of quantization_config"):
        scheme_of({"compression_config": exported("int4")}, FILE)


def test_each_field_of_the_libraries_is_known_or_refused():
    """A new field of a newer library is refused; this list says which ones are today."""
    top = {*QuantizationConfig.model_fields, *inspect.signature(CompressedTensorsConfig).parameters} - {"kwargs"}
    assert top - set(quantization_keys._COMPRESSED) == {"moe_sparsity_config"}
    assert set(QuantizationScheme.model_fields) == set(quantization_keys._GROUP)
    assert set(QuantizationArgs.model_fields) - set(quantization_keys._WEIGHTS) == {"dynamic"}
    of_fp8 = set(inspect.signature(FineGrainedFP8Config).parameters) - {"kwargs"}
    assert of_fp8 <= set(quantization_keys._FP8)
