"""Files are complete or absent, also with several writers at once."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm46.files.durable import create_durably, hash_file, replace_durably


def test_a_record_is_length_and_hash_of_the_bytes(tmp_path):
    blocks = [b"a" * 3, os.urandom(3 << 20), b""]
    record = replace_durably(tmp_path / "x", blocks)
    assert (record.bytes, record.sha256) == (3 + (3 << 20), hashlib.sha256(b"".join(blocks)).hexdigest())
    assert hash_file(tmp_path / "x") == record


def test_a_new_file_does_not_replace_another(tmp_path):
    create_durably(tmp_path / "x", [b"first"])
    with pytest.raises(FileExistsError):
        create_durably(tmp_path / "x", [b"second"])
    assert (tmp_path / "x").read_bytes() == b"first"


def test_a_failed_replacement_leaves_the_old_content_and_nothing_else(tmp_path):
    (tmp_path / "x").write_bytes(b"old")

    def blocks():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_durably(tmp_path / "x", blocks())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("x", b"old")]


def test_a_temporary_file_of_a_killed_process_is_replaced(tmp_path):
    (tmp_path / f"x.{os.uname().nodename}.{os.getpid()}.tmp").write_bytes(b"cut")
    replace_durably(tmp_path / "x", [b"new"])
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_hashes_of_many_files_do_not_mix(tmp_path):
    contents = {f"{number}": os.urandom(number * 700_000) for number in range(5)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with ThreadPoolExecutor(5) as threads:
        records = threads.map(lambda name: hash_file(tmp_path / name), contents)
    assert [r.sha256 for r in records] == [hashlib.sha256(c).hexdigest() for c in contents.values()]
