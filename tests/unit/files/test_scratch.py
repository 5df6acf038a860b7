"""Scratch folders: no content makes their removal raise, recurse, follow a link or stop an event loop."""

import asyncio
import os
import threading

from glm46.files import scratch
from glm46.files.scratch import async_scratch_folder, remove_folder, scratch_folder


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
