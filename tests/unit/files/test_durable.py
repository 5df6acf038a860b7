"""Files, locks and folders: complete or absent, held by one process, removed whatever is in them."""

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from glm46.config.errors import UserError
from glm46.files import progress, scratch
from glm46.files.array_file import _DTYPES, map_arrays, write_arrays
from glm46.files.durable import create_durably, hash_file, replace_durably
from glm46.files.lock import FileLock
from glm46.files.scratch import async_scratch_folder, remove_folder, scratch_folder


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


_HOLD = """
import sys, time
from pathlib import Path
from glm46.files.lock import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire(0.0)
child = None
if sys.argv[2] == "fork":
    import os
    child = os.fork()
    if not child:
        time.sleep(600)
print(child or "held", flush=True)
time.sleep(600)
"""


def hold(path, how="alone"):
    """A process that holds the lock, and what it printed."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path), how], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_one_process_at_a_time_holds_it_and_is_named(tmp_path):
    process, _ = hold(tmp_path / "lock")
    lock = FileLock(tmp_path / "lock")
    try:
        assert not lock.acquire(0.2)
        assert f"process {process.pid} on " in lock.holder()
    finally:
        process.kill()
        process.wait()
    assert lock.acquire(300.0)
    lock.release()


def test_a_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path):
    process, child = hold(tmp_path / "lock", "fork")
    process.kill()
    process.wait()
    try:
        lock = FileLock(tmp_path / "lock")
        assert lock.acquire(300.0)
        lock.release()
    finally:
        os.kill(int(child), 9)


def test_a_process_that_waited_for_a_removed_file_locks_the_new_one(tmp_path):
    path = tmp_path / "lock"
    first = FileLock(path)
    assert first.acquire(0.0)
    program = _HOLD.replace("acquire(0.0)", 'acquire(0.0) or print("waits", flush=True) or lock.acquire(300.0)')
    waiting = subprocess.Popen([sys.executable, "-c", program, path, "alone"], stdout=subprocess.PIPE, text=True)
    assert waiting.stdout.readline() == "waits\n"
    first.release(remove=True)
    try:
        assert waiting.stdout.readline().strip() == "held"
        assert path.exists() and not FileLock(path).acquire(0.2)
    finally:
        waiting.kill()
        waiting.wait()


def test_only_its_owner_may_read_it(tmp_path):
    """Whoever can read a file can hold a shared lock on it, with which nobody gets the exclusive one."""
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(0.0)
    assert lock.path.stat().st_mode & 0o777 == 0o600
    lock.release()


@pytest.mark.parametrize("show, done, line", [
    (progress.bytes_progress, 3_000_000, "reading: 3 of 12 MB, 0.1 MB/s, 90 s left"),
    (progress.tokens_progress, 3_000_000, "reading: 3,000,000 of 12,000,000 tokens, 100,000 tokens/s, 90 s left"),
])  # fmt: skip
def test_a_line_each_fifteen_seconds_has_rate_and_time_left(show, done, line, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    lines, now = [], 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with show("reading", 12_000_000, lines.append) as advance:
        now = 110.0
        advance(1_000_000)
        assert lines == []
        now = 130.0
        advance(done - 1_000_000)
        now = 131.0
        advance(1)
    assert lines == [line]


def nest(folder, depth: int) -> None:
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    for number in range(depth):
        os.mkdir("d")
        os.close(os.open(f"file{number}", os.O_CREAT))
        os.chdir("d")
    os.fchdir(before)
    os.close(before)


def test_folders_nested_deeper_than_python_recurses_are_removed(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    nest(folder, 2500)
    remove_folder(str(folder))
    assert not folder.exists()


def test_folders_without_rights_are_removed_and_links_are_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "link").symlink_to(kept)
    (folder / "link").symlink_to(kept)
    os.mkfifo(folder / "fifo")
    for path in (folder / "a" / "b", folder / "a", folder):
        path.chmod(0)
    remove_folder(str(folder))
    assert not folder.exists()
    assert kept.stat().st_mode & 0o777 == 0o500


def test_what_is_not_there_or_no_folder_raises_nothing(tmp_path):
    (tmp_path / "file").touch()
    remove_folder(str(tmp_path / "file"))
    remove_folder(str(tmp_path / "nothing"))
    assert (tmp_path / "file").exists()


def test_a_removal_that_takes_long_continues_after_its_time(monkeypatch):
    may_end = threading.Event()
    has_ended = threading.Event()

    def slow(folder: str) -> None:
        may_end.wait()
        os.rmdir(folder)
        has_ended.set()

    monkeypatch.setattr(scratch, "remove_folder", slow)
    with scratch_folder(0.01) as folder:
        pass
    assert os.path.isdir(folder)
    may_end.set()
    assert has_ended.wait(60) and not os.path.exists(folder)


def test_the_event_loop_runs_while_a_folder_is_removed(monkeypatch):
    may_end = threading.Event()

    def slow(folder: str) -> None:
        assert may_end.wait(60), "the loop stands"
        os.rmdir(folder)

    async def use() -> str:
        asyncio.get_running_loop().call_later(0.01, may_end.set)
        async with async_scratch_folder() as folder:
            return folder

    monkeypatch.setattr(scratch, "remove_folder", slow)
    assert not os.path.exists(asyncio.run(use()))
