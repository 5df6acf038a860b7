"""Adapters on other values of their base than those that they were trained on."""

import json

import pytest

from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.storage.huggingface.adapter_origin import AdapterOrigin, held_base_dtype, other_base_dtype
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, SCHEMES, config_of_scheme

SHAPE = PRESETS["debug"]


def base_folder(folder, scheme=None):
    folder.mkdir()
    config = config_of(SHAPE, None, eos_ids=[0], dtype="bfloat16")
    if scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(SCHEMES[scheme], HFNames(SHAPE, repeat_shared=False))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapter_folder(folder, base_dtype, *, is_ours=True):
    folder.mkdir()
    origin = AdapterOrigin({"config.json": "0" * 64} if is_ours else {}, base_dtype)
    for name, content in origin.contents().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("scheme", "trained", "used", "words"), [
    (None, None, None, None), (None, "nf4", "nf4", None), (None, "int4", "int4", None),
    (None, "nf4", None, "was trained on a base in nf4, which {base} is not"),
    (None, "int4", None, "was trained on a base in int4, which {base} is not"),
    (None, None, "nf4", "was trained on a base with the values of its folder, which are rounded to nf4"),
    (None, "nf4", "int4", "was trained on a base in nf4, which {base} is not, but rounded to int4"),
    # FP8 and INT4 weights of a folder keep their values.
    ("fp8-block", "float8", None, None), ("fp8-block", None, "float8", None),
    ("fp8-block", "float8", "nf4", "with the values of its folder, which are rounded to nf4"),
    ("int4", "int4", None, None), ("int4", None, "int4", None),
    ("int4", "nf4", "int4", "was trained on a base in nf4"),
])  # fmt: skip
def test_a_difference_is_told_in_both_directions(scheme, trained, used, words, tmp_path):
    base, adapter = base_folder(tmp_path / "base", scheme), adapter_folder(tmp_path / "adapter", trained)
    difference = other_base_dtype(adapter, base, used)
    if words is None:
        assert difference is None
    else:
        assert words.format(base=base) in difference


def test_folders_of_other_programs_do_not_say_how_their_base_was_held(tmp_path):
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "adapter", None, is_ours=False)
    assert other_base_dtype(adapter, base, "nf4") is None


def test_a_step_folder_has_no_quantised_values(tmp_path):
    assert held_base_dtype(tmp_path, "int4") == "int4"
    (tmp_path / "base_format.json").write_text('{"base_dtype": "int3"}')
    with pytest.raises(UserError, match="base_dtype = 'int3' is unknown"):
        other_base_dtype(tmp_path, tmp_path, None)
