"""Files of the tokenizer in the folders that are written."""

import json

import pytest
from transformers import AutoTokenizer

from glm46.config.errors import UserError
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.folder_check import check_tokenizer
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from tests.unit.storage.huggingface.test_merge_adapter import adapter_folder, base_folder


@pytest.mark.parametrize("stated", [5, [5], None, "one", "all"])
def test_an_export_stops_at_all_ids_that_end_a_turn(tmp_path, stated):
    """The generation config of the tokenizer's folder has fewer, as many releases have."""
    tokenizer = load_tokenizer("builtin")
    wanted = stop_ids(tokenizer)
    for name, file in files_beside_weights(tokenizer, max_length=512).items():
        (tmp_path / name).write_bytes(file)
    given = {"all": wanted[::-1], "one": wanted[0]}.get(str(stated), stated)
    content = {"eos_token_id": given, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    files = files_beside_weights(load_tokenizer(str(tmp_path)), max_length=512)
    found = json.loads(files["generation_config.json"])
    assert found["temperature"] == 0.6
    assert (found == content) is (stated == "all")
    assert set(found["eos_token_id"]) == {*wanted, *([5] if stated in (5, [5]) else [])}
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(UserError, match="generation_config.json: damaged"):
        files_beside_weights(load_tokenizer(str(tmp_path)), max_length=512)


@pytest.mark.slow
def test_a_base_whose_tokenizer_has_other_ids_is_refused(tmp_path):
    """Training on them went well, and the model then wrote other words."""
    for name, file in files_beside_weights(load_tokenizer("builtin"), max_length=512).items():
        (tmp_path / name).write_bytes(file)
    check_tokenizer(tmp_path, "builtin")
    with pytest.raises(UserError, match="other ids for 36 tokens than model.tokenizer_path = .*; set model.token"):
        check_tokenizer(tmp_path, "train_configs/bytes.tiktoken")
    # A run may add tokens behind those of its base.
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    last = max(token["id"] for token in content["added_tokens"])
    more = tmp_path / "more"
    more.mkdir()
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": last + 1, "content": "<|new|>"})
    (more / "tokenizer.json").write_text(json.dumps(content))
    check_tokenizer(tmp_path, str(more))
    (tmp_path / "tokenizer.json").write_text("{}")  # of a kind that tiktoken cannot represent
    check_tokenizer(tmp_path, "builtin")


def test_a_step_folder_of_another_tokenizer_is_refused(tmp_path):
    for fingerprint in (load_tokenizer("builtin").fingerprint, None):
        (tmp_path / "meta.json").write_text(json.dumps({} if fingerprint is None else {"tokenizer": fingerprint}))
        check_tokenizer(tmp_path, "builtin")
    (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": "0" * 64}))
    with pytest.raises(UserError, match="was trained with another tokenizer than model.tokenizer_path = 'builtin'"):
        check_tokenizer(tmp_path, "builtin")


TEXT = "<|user|>\ndef read(path): return open(path).read()\n" * 40
BASE_LENGTH, LENGTH = 512, 8192

SAVED = {  # how a user of transformers left the folder of the base
    "truncation": lambda theirs: theirs(TEXT, truncation=True, max_length=64),
    "padding": lambda theirs: theirs([TEXT, "a"], padding="max_length", max_length=4096),
    "both": lambda theirs: theirs([TEXT], truncation=True, padding=True, max_length=64, pad_to_multiple_of=8),
}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def plain_base(folder):
    return write(folder, files_beside_weights(load_tokenizer("builtin"), max_length=BASE_LENGTH))


def change_description(folder, **keys):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def export(base, folder):
    return write(folder, files_beside_weights(load_tokenizer(str(base)), max_length=LENGTH))


def theirs_of(folder, text=TEXT):
    return AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


@pytest.mark.parametrize("kind", SAVED)
def test_arguments_of_a_call_that_transformers_saved_are_not_exported(kind, tmp_path):
    base = plain_base(tmp_path / "base")
    theirs = AutoTokenizer.from_pretrained(base)
    SAVED[kind](theirs)
    theirs.save_pretrained(base)
    saved = json.loads((base / "tokenizer.json").read_text())
    assert saved["truncation"] or saved["padding"]
    folder = export(base, tmp_path / "export")
    content = json.loads((folder / "tokenizer.json").read_text())
    assert content == saved | {"truncation": None, "padding": None}
    trained = load_tokenizer(str(base)).encode_with_special(TEXT).tolist()
    assert theirs_of(folder) == trained
    assert load_tokenizer(str(folder)).fingerprint == load_tokenizer(str(base)).fingerprint
    description = json.loads((folder / "tokenizer_config.json").read_text())
    assert not {"max_length", "stride", "truncation_strategy", "pad_to_multiple_of"} & set(description)


def test_markers_stay_whole_and_no_reader_adds_tokens(tmp_path):
    base = plain_base(tmp_path / "base")
    change_description(base, split_special_tokens=True, add_bos_token=True, bos_token="<sop>", add_prefix_space=True)
    trained = load_tokenizer(str(base)).encode_with_special(TEXT).tolist()
    assert theirs_of(base) != trained
    folder = export(base, tmp_path / "export")
    assert theirs_of(folder) == trained
    description = json.loads((folder / "tokenizer_config.json").read_text())
    assert [description[key] for key in ("split_special_tokens", "add_bos_token", "add_prefix_space")] == [False] * 3


@pytest.mark.parametrize(("stated", "exported"), [
    (BASE_LENGTH, LENGTH), (LENGTH, LENGTH), (10**30, 10**30), (None, None), (1e30, 1e30),
])  # fmt: skip
def test_the_longest_text_is_at_least_that_of_the_model(stated, exported, tmp_path):
    base = plain_base(tmp_path / "base")
    change_description(base, model_max_length=stated)
    folder = export(base, tmp_path / "export")
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == exported
    assert AutoTokenizer.from_pretrained(folder).model_max_length >= LENGTH


def test_files_that_need_no_change_keep_their_bytes(tmp_path):
    base = plain_base(tmp_path / "base")
    change_description(base, model_max_length=LENGTH, padding_side="right", truncation_side="left")
    exported = files_beside_weights(load_tokenizer(str(base)), max_length=LENGTH)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert exported[name] == (base / name).read_bytes()


def test_a_merged_folder_does_not_cut_texts_either(tmp_path):
    base, _ = base_folder(tmp_path / "base")
    plain_base(base)
    theirs = AutoTokenizer.from_pretrained(base)
    SAVED["truncation"](theirs)
    theirs.save_pretrained(base)
    change_description(base, model_max_length=16)
    adapter_folder(tmp_path / "adapter", base)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    assert theirs_of(tmp_path / "out") == load_tokenizer(str(base)).encode_with_special(TEXT).tolist()
    positions = json.loads((base / "config.json").read_text())["max_position_embeddings"]
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == positions > 16
