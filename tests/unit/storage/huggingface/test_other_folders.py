"""Folders of other people's tools and of earlier exports: read with a line where something is skipped, or refused.

Files of the tokenizer in the folders that are written.
"""

import json
import logging

import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer, Glm4MoeForCausalLM

from glm46.config.errors import UserError
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.folder_check import check_folder, check_tokenizer, stored_shape
from glm46.storage.huggingface.folder_tensors import INDEX, MTP_FILE, SINGLE_FILE, find_tensors
from glm46.storage.huggingface.hub import repository_of
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.peft_export import export_adapter
from glm46.storage.huggingface.peft_folder import PeftConfig
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from tests.unit.storage.huggingface.adapters import SHAPE, adapters
from tests.unit.storage.huggingface.test_hf_safetensors import MODELS, empty_model, make_folder, read_folder
from tests.unit.storage.huggingface.test_merge_adapter import adapter_folder, base_folder

MODEL, _ = MODELS["4.6-like"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def change(folder, edit):
    """Edit the tensors of a folder, which then has one file."""
    tensors = read_folder(folder)
    edit(tensors)
    for file in folder.glob("model*"):
        file.unlink()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def to(dtype, end=""):
    return lambda t: t.update({name: value.to(dtype) for name, value in t.items() if name.endswith(end)})


def add(**tensors):
    return lambda t: t.update({name.replace("__", "."): torch.ones(2) for name in tensors})


LAYER = "model__layers__1__self_attn__"
READ = {  # edit of the tensors, words of the one warning
    "bias in BF16": (to(torch.bfloat16, "e_score_correction_bias"), "stored rounded, in bfloat16"),
    "bias in FP16": (to(torch.float16, "e_score_correction_bias"), "stored rounded, in float16"),
    "all in FP16": (to(torch.float16), "stored rounded, in float16"),
    "all in FP32": (to(torch.float32), None),
    "all in FP64": (to(torch.float64), None),
    "rotary": (add(**{LAYER + "rotary_emb__inv_freq": 0}), "rotary_emb.inv_freq"),
    "rotary of the model": (add(model__rotary_emb__inv_freq=0), "model.rotary_emb.inv_freq"),
    "scales of the cache": (add(**{LAYER + "k_scale": 0, LAYER + "v_scale": 0}), "not read: 2 tensors"),
    "scales of a projection": (add(**{LAYER + "k_proj__k_scale": 0, LAYER + "attn__q_scale": 0}), "not read: 2 "),
    "scales of activations": (add(**{LAYER + "q_proj__input_scale": 0}), "q_proj.input_scale"),
    "extra states": (
        lambda t: t.update({"model.layers.1.self_attn.q_proj._extra_state": torch.ones(2)}),
        "_extra_state",
    ),
}


def loaded(folder, shape):
    _, tensors = empty_model(shape)
    import_weights(folder, shape, tensors)
    return tensors


@pytest.mark.parametrize("name", READ)
def test_a_folder_of_another_tool_is_read_exactly_and_says_what_is_left_out(name, tmp_path, caplog):
    make_folder(tmp_path / "in", MODEL, False)
    edit, words = READ[name]
    change(tmp_path / "in", edit)
    ours, stored = loaded(tmp_path / "in", MODEL), read_folder(tmp_path / "in")
    assert torch.equal(bias_of(ours), stored[BIAS].float())
    assert torch.equal(ours["norm.weight"], stored["model.norm.weight"].float())
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == (words is not None) and all(words in line and str(tmp_path) in line for line in lines)


def bias_of(tensors):
    return next(tensor for name, tensor in tensors.items() if name.startswith("layers.1.") and name.endswith("_bias"))


def test_prediction_layers_that_the_config_does_not_count_are_skipped_with_a_line(tmp_path, caplog):
    make_folder(tmp_path / "in", MODEL, False)
    config = tmp_path / "in/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    shape = stored_shape(tmp_path / "in")
    assert shape.num_nextn_predict_layers == 0
    loaded(tmp_path / "in", shape)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "holds 1 prediction layer beyond those of its config.json" in line


def test_layers_that_the_config_does_not_count_are_not_taken_for_prediction_layers(tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    config = tmp_path / "in/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(UserError, match="not part of this model|are missing"):
        check_folder(tmp_path / "in", stored_shape(tmp_path / "in"))


def test_a_folder_without_an_index_is_read(tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    before = loaded(tmp_path / "in", MODEL)
    (tmp_path / "in" / INDEX).unlink()
    after = loaded(tmp_path / "in", MODEL)
    assert all(torch.equal(before[name], after[name]) for name in before)
    (tmp_path / "in/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model-00002-of-00003.safetensors; copy or download"):
        find_tensors(tmp_path / "in")


def test_experts_in_one_tensor_are_read_as_transformers_saves_them(tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = set(read_folder(tmp_path / "stacked"))
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    shape = stored_shape(tmp_path / "stacked")
    before, after = loaded(tmp_path / "in", MODEL), loaded(tmp_path / "stacked", shape)
    assert after.keys() < before.keys() and all(torch.equal(before[name], after[name]) for name in after)


def replaced(content):
    return lambda file: file.write_bytes(content)


CONTENT = {  # what stands in place of a file -> words
    "pointer": (replaced(b"version https://git-lfs.invalid/spec/v1\noid sha256:00\nsize 5\n"), "git lfs pull"),
    "page": (replaced(b"<!DOCTYPE html><html>Sign in</html>"), "answer of a web server"),
    "answer": (replaced(b'{"error":"Repository not found"}'), "answer of a web server"),
    "GGUF": (replaced(b"GGUF\x03\x00\x00\x00"), "GGUF"),
    "torch": (replaced(b"PK\x03\x04" + b"0" * 40), "zip archive, as torch.save writes; convert it"),
    "missing": (lambda file: file.unlink(), "missing; copy or download it again"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-9]), ": truncated: "),
    "cut in its header": (lambda file: file.write_bytes(file.read_bytes()[:40]), ": truncated: its header takes"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"x"), ": damaged: "),
    "empty": (replaced(b""), ": truncated: 0 bytes; copy or download it again"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("kind", CONTENT)
def test_what_stands_in_place_of_weights_is_named(kind, tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    edit, words = CONTENT[kind]
    edit(tmp_path / "in/model-00002-of-00003.safetensors")
    with pytest.raises(UserError) as error:
        find_tensors(tmp_path / "in")
    (fault,) = error.value.faults
    assert words in fault and "model-00002-of-00003.safetensors: " in fault
    assert ("damaged" in fault) == (kind == "longer")


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize("kind", ["pointer", "page"])
def test_what_stands_in_place_of_a_json_file_is_named(kind, file, tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    edit, words = CONTENT[kind]
    edit(tmp_path / "in" / file)
    with pytest.raises(UserError, match=words):
        check_folder(tmp_path / "in", MODEL)


@pytest.mark.parametrize("folder, name, commit", [
    ("/cache/hub/models--zai-org--GLM-4.6/snapshots/" + "c" * 40, "zai-org/GLM-4.6", "c" * 40),
    ("/h/models--a--b-c/snapshots/d1/", "a/b-c", "d1"), ("outputs/base", "outputs/base", None),
])  # fmt: skip
def test_an_adapter_names_the_repository_of_its_base(folder, name, commit, tmp_path):
    assert repository_of(folder) == (name, commit)
    tensors = adapters(targets=["attention"])
    export_adapter(tmp_path / "peft", SHAPE, tensors, scale=2.0, base=folder)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (name, commit)
    assert PeftConfig.read(tmp_path / "peft").rank
    peft = pytest.importorskip("peft")
    theirs = peft.PeftConfig.from_pretrained(tmp_path / "peft")
    assert (theirs.base_model_name_or_path, theirs.revision) == (name, commit)


MTP_PREFIX = f"model.layers.{MODEL.num_hidden_layers}."


def test_a_save_of_transformers_over_an_older_one_in_several_files_is_read(tmp_path):
    """transformers removes the old files, and leaves their index."""
    make_folder(tmp_path / "in", MODEL, False)
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    with torch.no_grad():
        theirs.model.norm.weight.fill_(3.0)
    theirs.save_pretrained(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("model*")} == {SINGLE_FILE, INDEX}
    ours = loaded(tmp_path / "out", stored_shape(tmp_path / "out"))
    assert torch.equal(ours["norm.weight"], torch.full_like(ours["norm.weight"], 3.0))


def test_a_single_file_next_to_the_files_of_an_index_is_refused_with_both_names(tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    safetensors.torch.save_file(read_folder(tmp_path / "in"), tmp_path / "in" / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(UserError) as refused:
        find_tensors(tmp_path / "in")
    (fault,) = refused.value.faults
    assert all(name in fault for name in (SINGLE_FILE, INDEX, "model-00001-of-00003.safetensors", "; remove"))
    (tmp_path / "in" / INDEX).unlink()
    assert {path.name for path, _ in find_tensors(tmp_path / "in").values()} == {SINGLE_FILE}


def test_an_index_may_name_the_single_file(tmp_path):
    make_folder(tmp_path / "in", MODEL, False, files=1)
    file = tmp_path / "in/model-00001-of-00001.safetensors"
    file.rename(tmp_path / "in" / SINGLE_FILE)
    index = tmp_path / "in" / INDEX
    index.write_text(index.read_text().replace(file.name, SINGLE_FILE))
    assert check_folder(tmp_path / "in", MODEL)


def move_prediction_layers(folder, *, keep_listed=False, single=False):
    """Put the prediction layers into a file that the index does not name."""
    tensors = read_folder(folder)
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith(MTP_PREFIX)}
    others = {name: tensor for name, tensor in tensors.items() if keep_listed or name not in layers}
    for file in folder.glob("model*"):
        file.unlink()
    names = {"format": "pt"}
    safetensors.torch.save_file(layers, folder / MTP_FILE, names)
    first = SINGLE_FILE if single else "model-00001-of-00001.safetensors"
    safetensors.torch.save_file(others, folder / first, names)
    if not single:
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(others, first)}))


@pytest.mark.parametrize("single", [False, True], ids=["index", "single file"])
def test_prediction_layers_that_no_index_names_are_read(single, tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    before = loaded(tmp_path / "in", MODEL)
    move_prediction_layers(tmp_path / "in", single=single)
    assert stored_shape(tmp_path / "in") == MODEL
    after = loaded(tmp_path / "in", MODEL)
    assert all(torch.equal(before[name], after[name]) for name in before)
    without = MODEL.model_copy(update={"num_nextn_predict_layers": 0})
    assert loaded(tmp_path / "in", without)


def test_layers_that_the_index_names_are_not_read_twice(tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    move_prediction_layers(tmp_path / "in", keep_listed=True)
    assert MTP_FILE not in {path.name for path, _ in find_tensors(tmp_path / "in").values()}


def test_a_folder_without_them_says_so(tmp_path):
    make_folder(tmp_path / "in", MODEL, False)
    move_prediction_layers(tmp_path / "in")
    (tmp_path / "in" / MTP_FILE).unlink()
    with pytest.raises(UserError, match="lacks the multi-token prediction layers"):
        check_folder(tmp_path / "in", MODEL)


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
