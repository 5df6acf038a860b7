"""The header format is the library's: each reads files of the other."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from glm46.config.errors import UserError
from glm46.files.array_file import _DTYPES, map_arrays, write_arrays

ARRAYS = {
    "wide": np.arange(6, dtype=np.uint64).reshape(2, 3),
    "ids": np.arange(5, dtype=np.uint32),
    "experts": np.arange(300, 303, dtype=np.uint16),
    "none": np.empty((0, 4), np.int64),
    "bytes": np.arange(7, dtype=np.uint8),
}


def test_the_library_reads_our_files(tmp_path):
    write_arrays(tmp_path / "x", ARRAYS, {"made": "here"})
    loaded = load_file(tmp_path / "x")
    assert {name: (a.dtype, a.tolist()) for name, a in loaded.items()} == {
        name: (a.dtype, a.tolist()) for name, a in ARRAYS.items()
    }
    with safe_open(tmp_path / "x", "np") as file:
        assert file.metadata() == {"made": "here"}


def test_we_read_files_of_the_library(tmp_path):
    save_file(ARRAYS, tmp_path / "x", {"made": "there"})
    arrays, metadata, places = map_arrays(tmp_path / "x", "make it again")
    assert metadata == {"made": "there"}
    content = (tmp_path / "x").read_bytes()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)
        assert content[places[name] : places[name] + array.nbytes] == array.tobytes()


def test_every_dtype_that_is_read_can_be_written(tmp_path):
    arrays = {str(dtype): np.ones(3, dtype) for dtype in _DTYPES.values()}
    write_arrays(tmp_path / "x", arrays, {})
    assert {name: array.dtype for name, array in load_file(tmp_path / "x").items()} == {
        name: array.dtype for name, array in arrays.items()
    }


@pytest.mark.parametrize("damage, reason", [
    (lambda c: c[:-1], "truncated"),
    (lambda c: c + b"more", "damaged: .* its header describes"),
    (lambda c: b"", "truncated: 0 bytes"),
    (lambda c: c.replace(b"[0,48]", b"[0,40]"), "header is corrupt"),
    (lambda c: c.replace(b"[48,48]", b"[56,56]"), "corrupt .*none"),
    (lambda c: c.replace(b"[2,3]", b"[2,x]"), "header is corrupt"),
])  # fmt: skip
def test_a_header_that_does_not_match_the_file_is_refused_with_file_and_remedy(tmp_path, damage, reason):
    write_arrays(tmp_path / "x", {name: ARRAYS[name] for name in ("wide", "none", "ids", "bytes")}, {})
    content = (tmp_path / "x").read_bytes()
    assert damage(content) != content
    (tmp_path / "x").write_bytes(damage(content))
    with pytest.raises(UserError, match=rf"x: .*{reason}.*; make it again"):
        map_arrays(tmp_path / "x", "make it again")
