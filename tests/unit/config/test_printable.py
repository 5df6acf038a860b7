"""Text of others does not reach a terminal with its control characters."""

import json
import struct
import sys

import pytest

from glm46.config.errors import UserError
from glm46.config.printable import printable
from glm46.storage.huggingface.folder_tensors import find_tensors

TITLE = "\x1b]0;OWNED\x07"
"""The sequence that changes the title of a terminal's window."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünï\tcode\n", "plain, ünï\tcode\n"),
        (TITLE, "\ufffd]0;OWNED\ufffd"),
        ("a\rb\bc\x9bd\u202ee", "a\ufffdb\ufffdc\ufffdd\ufffde"),
    ],
)
def test_control_characters_are_replaced_one_by_one(text, shown):
    assert printable(text) == shown


def test_the_message_of_an_error_names_a_tensor_without_its_control_characters(tmp_path):
    header = json.dumps({TITLE: {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    shard = tmp_path / "model-00001-of-00001.safetensors"
    shard.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard.name}}))
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe"}')
    with pytest.raises(UserError) as raised:
        find_tensors(tmp_path)
    assert "OWNED" in str(raised.value)
    assert TITLE not in str(raised.value)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_goes_to_a_pipe_as_it_is(is_terminal, monkeypatch):
    from glm46.engine.inference.display import _shown

    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert (TITLE in _shown(TITLE)) is not is_terminal
