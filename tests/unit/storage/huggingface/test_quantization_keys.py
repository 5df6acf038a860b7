"""Keys of a `quantization_config`: read, without effect, or refused by name. The judges are the config classes of
compressed-tensors and transformers, whose fields are all known here."""

import copy
import inspect

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.transform import TransformConfig
from transformers import CompressedTensorsConfig, FineGrainedFP8Config

from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.storage.huggingface import quantization_keys
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, SCHEMES, config_of_scheme, scheme_of

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
