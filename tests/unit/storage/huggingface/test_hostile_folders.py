"""Folders of a stranger: files that are no regular files, names and nesting without bounds. One message, at once."""

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
from glm46.storage.checkpoint.integrity import META, read_manifest, read_meta
from glm46.storage.checkpoint.metadata import read_metadata
from glm46.storage.huggingface.config_json import read_config
from glm46.storage.huggingface.folder_tensors import INDEX, find_tensors
from glm46.storage.huggingface.peft_export import CONFIG as ADAPTER_CONFIG
from glm46.storage.huggingface.peft_export import WEIGHTS as ADAPTER_WEIGHTS
from glm46.storage.huggingface.peft_folder import AdapterFolder
from tests.unit.storage.huggingface.adapters import SHAPE

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


def test_the_message_says_what_the_file_is(tmp_path):
    os.mkfifo(tmp_path / SINGLE_FILE)
    with pytest.raises(UserError, match="cannot be read: it is a named pipe, not a regular file; remove it"):
        read_records(tmp_path / SINGLE_FILE)


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
    with pytest.raises(UserError, match="it is a named pipe"):
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
