"""Folders of a stranger: files that are no regular files, or that hold something else. One message, at once."""

import json
import os
import resource
import signal
import socket
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.config.loader import read_table
from glm46.engine.inference.stored_model import stored_model
from glm46.files.array_file import map_arrays
from glm46.files.durable import hash_file
from glm46.files.file_content import known_fault, read_json_object
from glm46.files.regular_file import NotRegularFileError, open_regular, read_regular
from glm46.files.tensor_file import TensorFile, read_records
from glm46.run.function import config_of_meta
from glm46.storage.chats.chat_template import template_beside
from glm46.storage.checkpoint.integrity import META, read_manifest, read_meta
from glm46.storage.checkpoint.metadata import read_metadata
from glm46.storage.data.tokenizer_hf import read_tokenizer_json
from glm46.storage.huggingface.adapter_origin import read_base_files
from glm46.storage.huggingface.config_json import config_of, read_config, shape_of, stated_ids
from glm46.storage.huggingface.folder_tensors import INDEX, find_tensors
from glm46.storage.huggingface.peft_export import CONFIG as ADAPTER_CONFIG
from glm46.storage.huggingface.peft_export import WEIGHTS as ADAPTER_WEIGHTS
from glm46.storage.huggingface.peft_folder import AdapterFolder, PeftConfig
from glm46.storage.huggingface.schemes import scheme_of
from tests.unit.storage.huggingface.adapters import SHAPE
from tests.unit.storage.huggingface.test_hf_safetensors import MODELS, make_folder

SECONDS = 20
SINGLE_FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def no_waiting():
    """Fail a test that waits for the writer of a pipe."""

    def fail(*_):
        raise AssertionError("waited for a file without end")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS = {  # name of the file -> what reads it in a folder
    SINGLE_FILE: find_tensors,
    "model-00001-of-00001.safetensors": find_tensors,
    "config.json": read_config,
    ADAPTER_CONFIG: lambda folder: AdapterFolder(folder, SHAPE),
    META: read_meta,
    "tokenizer.json": lambda folder: read_json_object(folder / "tokenizer.json", ""),
    "x.arrays": lambda folder: map_arrays(folder / "x.arrays", "make it again"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_named_pipe_is_refused_at_once(name, tmp_path):
    os.mkfifo(tmp_path / name)
    if name.endswith(".safetensors"):
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        READERS[name](tmp_path)
    assert len(refused.value.faults) == 1


def test_a_named_pipe_of_an_index_or_an_adapter_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="a.safetensors: cannot be read: it is a named pipe"):
        find_tensors(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    os.mkfifo(adapter / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match="cannot be read: it is a named pipe, not a regular file; remove it"):
        AdapterFolder(adapter, SHAPE)


def test_a_named_pipe_in_a_step_folder_is_a_fault(tmp_path):
    for name in (".metadata", "manifest.json", META):
        os.mkfifo(tmp_path / name)
    assert "it is a named pipe" in read_metadata(tmp_path)[1][0]
    assert "it is a named pipe" in read_manifest(tmp_path, None)[1][0]
    with pytest.raises(UserError, match="it is a named pipe"):
        stored_model(tmp_path)
    for opener in (hash_file, lambda path: TensorFile(path, {}), known_fault_of):
        with pytest.raises(NotRegularFileError):
            opener(tmp_path / META)


def test_a_named_pipe_does_not_hang_the_message_about_another_kind(tmp_path):
    os.mkfifo(tmp_path / ADAPTER_CONFIG)
    with pytest.raises(UserError, match="this is a PEFT folder with adapters"):
        find_tensors(tmp_path)
    assert known_fault(tmp_path / ADAPTER_CONFIG).startswith("cannot be read: it is a named pipe")


def known_fault_of(path):
    raise NotRegularFileError(None, known_fault(path))


def test_sockets_devices_and_folders_are_no_regular_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path in ("socket", "/dev/zero", tmp_path):
            with pytest.raises(OSError):
                open_regular(Path(path))
    (tmp_path / "target").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("target")
    assert read_regular(tmp_path / "link") == b"abc"  # as in the cache of huggingface_hub


@pytest.mark.parametrize("count", [5_000_000, 10**200])
def test_a_count_in_a_file_name_takes_no_memory(count, tmp_path):
    (tmp_path / f"model-2-of-{count}.safetensors").write_bytes(b"")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=f"lacks model-1-of-{count}.* and {count - 11} more; copy or download"):
        find_tensors(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


NESTED_HEADER = b'{"a":' + b"[" * 100_000


def test_a_nested_header_is_one_message(tmp_path):
    (tmp_path / SINGLE_FILE).write_bytes(len(NESTED_HEADER).to_bytes(8, "little") + NESTED_HEADER)
    with pytest.raises(UserError, match="not a safetensors file, or its header is corrupt"):
        read_records(tmp_path / SINGLE_FILE)


@pytest.mark.parametrize("name", ["a\0.safetensors", "\ud800.safetensors", "../a.safetensors", ".."])
def test_an_index_names_files_of_its_folder(name, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="names files outside its folder"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("text", ["a=" + "[" * 100_000, "[" + ".".join("a" * 100_000) + "]"])
def test_nested_toml_is_one_message(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match="run.toml: not valid TOML"):
        read_table(tmp_path / "run.toml")
    with pytest.raises(UserError, match="its meta has no config of a run"):
        config_of_meta({"config": text}, tmp_path)
    (tmp_path / META).write_text(json.dumps({"config": text}))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="take another checkpoint"):
        stored_model(tmp_path)


JSON_READERS = {
    "config.json": read_config, "model.safetensors.index.json": find_tensors, "adapter_config.json": PeftConfig.read,
    "base_files.json": read_base_files, "tokenizer.json": lambda folder: read_tokenizer_json(folder / "tokenizer.json"),
    "tokenizer_config.json": lambda folder: template_beside(folder / "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("content", [
    b"4", b"null", b"[]", b'["model_type"]', b'"glm4_moe"', b"true", b"", b"{", b"\0" * 64, b"\xff\xfe\xfd",
    b"[" * 100_000, b'{"a": ' * 100_000, b"1e999", b"NaN", b"<!doctype html>",
    b"version https://git-lfs.github.com/spec/v1\n",
], ids=lambda content: repr(content[:12]))  # fmt: skip
@pytest.mark.parametrize("name", JSON_READERS)
def test_a_file_without_an_object_is_one_line_with_a_remedy(name, content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        JSON_READERS[name](tmp_path)
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
        JSON_READERS[name](tmp_path)
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
