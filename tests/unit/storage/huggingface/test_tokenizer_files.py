"""The files of a tokenizer that an export puts beside the weights."""

import json

import pytest

from glm46.config.errors import UserError
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.folder_check import check_tokenizer
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids


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
