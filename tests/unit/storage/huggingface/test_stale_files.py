"""Folders with files of two saves, and with files that the index does not name."""

import json

import pytest
import safetensors.torch
import torch
from transformers import Glm4MoeForCausalLM

from glm46.config.errors import UserError
from glm46.storage.huggingface.folder_check import check_folder, stored_shape
from glm46.storage.huggingface.folder_tensors import INDEX, MTP_FILE, SINGLE_FILE, find_tensors
from glm46.storage.huggingface.import_weights import import_weights
from tests.unit.storage.huggingface.test_hf_safetensors import MODELS, empty_model, make_folder, read_folder

MODEL, _ = MODELS["4.6-like"]
MTP_PREFIX = f"model.layers.{MODEL.num_hidden_layers}."


def loaded(folder, shape):
    _, tensors = empty_model(shape)
    import_weights(folder, shape, tensors)
    return tensors


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
