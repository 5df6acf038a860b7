"""A power cut at any moment of a save: the old or the new checkpoint loads, never neither, never a mixture.

Each change of the file system that a save makes is a moment to cut. At each one three disks are rebuilt: all that was
written arrived (a kill); only what was synced arrived, names and contents; all names arrived but only synced contents.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from glm46.storage.checkpoint import dcp
from glm46.storage.checkpoint.manager import CheckpointManager

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"}


Tree = dict[str, bytes | None]
"""Contents of files by path; None for a folder."""


def read_tree(root: Path) -> Tree:
    """What is in a folder."""
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def write_tree(root: Path, tree: Tree) -> None:
    """Make a folder with this in it."""
    root.mkdir()
    for name, content in sorted(tree.items()):  # folders before what is in them
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


class Disk:
    """What of a tree would survive a cut now. Inodes are kept open, so that none is used twice."""

    def __init__(self, root: Path):
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}
        self.held: list[int] = []
        self.sync(os.open(root, os.O_RDONLY))

    def sync(self, descriptor: int) -> None:
        self.held.append(os.dup(descriptor))
        status, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            with os.scandir(path) as entries:
                self.names[status.st_ino] = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
        else:
            self.contents[status.st_ino] = path.read_bytes()

    def synced(self, inode: int | None = None, folder: str = "") -> Tree:
        """Names and contents that were synced."""
        tree: Tree = {}
        inode = self.root.stat().st_ino if inode is None else inode
        for name, (child, is_folder) in self.names.get(inode, {}).items():
            tree[folder + name] = None if is_folder else self.contents.get(child, b"")
            if is_folder:
                tree |= self.synced(child, f"{folder}{name}/")
        return tree

    def named(self) -> Tree:
        """All names, and contents that were synced."""
        return {
            str(path.relative_to(self.root)): None if path.is_dir() else self.contents.get(path.stat().st_ino, b"")
            for path in self.root.rglob("*")
        }


class Cutter:
    """Calls ``check(event, arguments)`` before each change under ``root`` while it is on; an audit hook cannot be
    removed."""

    def __init__(self, root: Path, check):
        self.root, self.check, self.is_on = str(root), check, False
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple) -> None:
        if self.is_on and event in CHANGES and self.root in str(arguments[0]):
            self.is_on = False
            self.check(event, arguments)
            self.is_on = True


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((50, 40), value), "bias": torch.full((40,), value)}


def value_on(disk: Path) -> float | None:
    """The checkpoint that a run on this disk would load; its parts must belong together."""
    manager = CheckpointManager(disk / "run" / "checkpoint", keep_latest_k=0)
    step = manager.newest()
    if step is None:
        return None
    target = tensors(-1.0)
    meta = manager.load(step, target)
    assert {value.item() for tensor in target.values() for value in tensor.flatten()} == {meta["value"]}
    return meta["value"]


@pytest.mark.slow
def test_the_old_or_the_new_checkpoint_survives_a_cut_at_any_moment(tmp_path, monkeypatch):
    root = tmp_path / "disk"
    root.mkdir()
    disk, allowed, moments = Disk(root), {None}, []
    values: dict[frozenset, float | None] = {}

    def value_in(tree: Tree) -> float | None:
        """The checkpoint that a run on a disk with this tree would load; equal disks are tried once."""
        key = frozenset(tree.items())
        if key not in values:
            copy = tmp_path / "copy"
            write_tree(copy, tree)
            values[key] = value_on(copy)
            shutil.rmtree(copy)
        return values[key]

    def check(event: str = "", arguments: tuple = ()) -> None:
        seen = set()
        for name, tree in (("killed", read_tree(root)), ("synced", disk.synced()), ("names", disk.named())):
            value = value_in(tree)
            assert value in allowed, f"moment {len(moments)}, {name}: {value}, expected one of {allowed}"
            seen.add(value)
            # `latest` never names a step that a cut could lose: it is replaced when the new name is on the disk.
            if name == "synced" and event == "os.rename" and str(arguments[1]).endswith("/latest"):
                assert value == new
        moments.append(seen)

    def sync(descriptor: int, original=os.fsync) -> None:
        original(descriptor)
        if not cutter.is_on:
            return  # a rebuilt disk
        check_paused()
        disk.sync(descriptor)
        check_paused()

    def check_paused() -> None:
        cutter.is_on = False
        check()
        cutter.is_on = True

    cutter = Cutter(root, check)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(dcp, "fsync", sync)
    manager = CheckpointManager(root / "run" / "checkpoint", keep_latest_k=1)
    value = None
    # The third save is of the same step again; each removes the one before.
    for step, new in ((1, 10.0), (2, 20.0), (2, 21.0), (3, 30.0)):
        allowed = {value, new}
        cutter.is_on = True
        manager.save(step, tensors(new), {"value": new})
        cutter.is_on = False
        value, allowed = new, {new}
        check()
        assert disk.synced()["run/checkpoint/latest"] == f"step-{step:06d}\n".encode()
    assert [path.name for path in (root / "run" / "checkpoint").glob("step-*")] == ["step-000003"]
    # Each save makes dozens of changes, and at some of them the three disks differ.
    assert len(moments) > 100 and any(len(seen) > 1 for seen in moments)
    for descriptor in disk.held:
        os.close(descriptor)
