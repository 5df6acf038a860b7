"""The files of a tokenizer that an export puts beside the weights."""

import json

import pytest

from glm46.config.errors import UserError
from glm46.storage.data.tokenizer import load_tokenizer
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
