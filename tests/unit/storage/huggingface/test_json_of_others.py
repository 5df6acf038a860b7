"""JSON files of other programs that hold something else: one line with the file and a remedy, from each reader."""

import json

import pytest

from glm46.config.errors import UserError
from glm46.storage.chats.chat_template import template_beside
from glm46.storage.data.tokenizer_hf import read_tokenizer_json
from glm46.storage.huggingface.adapter_origin import read_base_files
from glm46.storage.huggingface.config_json import config_of, read_config, shape_of, stated_ids
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.peft_folder import PeftConfig
from glm46.storage.huggingface.schemes import scheme_of
from tests.unit.storage.huggingface.test_hf_safetensors import MODELS, make_folder

READERS = {
    "config.json": read_config, "model.safetensors.index.json": find_tensors, "adapter_config.json": PeftConfig.read,
    "base_files.json": read_base_files, "tokenizer.json": lambda folder: read_tokenizer_json(folder / "tokenizer.json"),
    "tokenizer_config.json": lambda folder: template_beside(folder / "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("content", [
    b"4", b"null", b"[]", b'["model_type"]', b'"glm4_moe"', b"true", b"", b"{", b"\0" * 64, b"\xff\xfe\xfd",
    b"[" * 100_000, b'{"a": ' * 100_000, b"1e999", b"NaN", b"<!doctype html>",
    b"version https://git-lfs.github.com/spec/v1\n",
], ids=lambda content: repr(content[:12]))  # fmt: skip
@pytest.mark.parametrize("name", READERS)
def test_a_file_without_an_object_is_one_line_with_a_remedy(name, content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        READERS[name](tmp_path)
    (fault,) = refused.value.faults
    assert fault.startswith(f"{tmp_path / name}: ") and len(fault) < 400
    assert any(word in fault for word in ("again", "anew", "download", "remove it", "git lfs")), fault


@pytest.mark.parametrize(("name", "value"), [
    *(("model.safetensors.index.json", {"weight_map": value}) for value in (4, None, [], "x", {"a": 4}, {"a": "../x"})),
    ("model.safetensors.index.json", {}), ("adapter_config.json", {}),
    ("adapter_config.json", {"r": [], "lora_alpha": 1}),
    ("adapter_config.json", {"r": 1e999, "lora_alpha": 1}), ("adapter_config.json", {"r": 4, "lora_alpha": {}}),
    ("adapter_config.json", {"r": 4, "lora_alpha": 4, "rank_pattern": 4}),
    ("adapter_config.json", {"r": 4, "lora_alpha": 4, "rank_pattern": {"[": 4}}),
    ("adapter_config.json", {"r": 4, "lora_alpha": 4, "rank_pattern": {"a": "x"}}),
    ("adapter_config.json", {"r": 4, "lora_alpha": 4, "alpha_pattern": {"a": None}}),
    *(("tokenizer_config.json", {"chat_template": one}) for one in (4, {}, [3], [{"name": "default", "template": 4}])),
    *(("tokenizer.json", value) for value in ({}, {"model": 4}, {"model": {"vocab": [], "merges": 4}})),
])  # fmt: skip
def test_an_object_with_other_values_is_one_line(name, value, tmp_path):
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(UserError) as refused:
        READERS[name](tmp_path)
    (fault,) = refused.value.faults
    assert fault.startswith(f"{tmp_path / name}: ") and len(fault) < 400


@pytest.mark.parametrize("value", [4, [], "x", True, {"a": None}, [[4]], 1e999, -1, {}])
def test_any_value_of_a_key_of_the_config_is_taken_or_refused(value, tmp_path):
    """Whatever a key holds, no reader fails with an error of its own."""
    make_folder(tmp_path / "model", MODELS["4.6-like"][0], False)
    raw = read_config(tmp_path / "model")
    for key in (
        *raw,
        "quantization_config",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "vision_config",
        "eos_token_id",
    ):
        try:
            config = raw | {key: value}
            scheme_of(config, "config.json")
            config_of(shape_of(config), config, eos_ids=[1], dtype="bfloat16")
        except UserError as refused:
            assert all(fault.startswith("config.json: ") for fault in refused.faults), refused


@pytest.mark.parametrize("value", ["x", [[1]], 1.5, True, {}, [None]])
def test_ids_that_end_a_text_are_whole_numbers(value):
    with pytest.raises(UserError, match="generation_config.json: eos_token_id = .*: must be an id or a list"):
        stated_ids({"eos_token_id": value}, "generation_config.json")
    assert [stated_ids({"eos_token_id": one}, "") for one in (None, 3, [3, 4])] == [[], [3], [3, 4]]
