"""Inductor's cache after a process was killed while it compiled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm46 import compat
from glm46.compute.parallelize.compiled_code import is_damaged, remove_damaged, repair_compiled_code

ROOT = Path(__file__).parents[4]
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler on this machine")
PROGRAM = """
import sys
import torch
from glm46.compute.parallelize.compiled_code import repair_compiled_code
repair_compiled_code()
torch.set_num_threads(1)
factor = float(sys.argv[1])
function = torch.compile(lambda x: (x.sin() * factor + x.cos()).sum())
x = torch.ones(64)
torch.testing.assert_close(function(x), (x.sin() * factor + x.cos()).sum())
print("compiled", flush=True)
"""


@pytest.fixture
def library(tmp_path) -> Path:
    """A whole shared library, that of a module of Python's or numpy's."""
    import numpy._core._multiarray_umath as module

    return Path(shutil.copy(module.__file__, tmp_path / "whole.so"))


def test_empty_and_truncated_libraries_are_removed(library, tmp_path):
    content = library.read_bytes()
    sizes = {"empty": 0, "header": 40, "half": len(content) // 2}
    for name, size in sizes.items():
        (tmp_path / f"{name}.so").write_bytes(content[:size])
    (tmp_path / "empty.cpp").touch()
    (tmp_path / "key.lock").touch()
    removed = remove_damaged(tmp_path)
    assert sorted(file.name for file in removed) == ["empty.cpp", "empty.so", "half.so", "header.so"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["key.lock", "whole.so"]


def test_file_that_a_live_process_writes_stays(tmp_path):
    with (tmp_path / "main.so").open("wb"):
        assert remove_damaged(tmp_path) == []
    assert remove_damaged(tmp_path) == [tmp_path / "main.so"]


def test_cache_whose_lock_cannot_be_opened_is_repaired(tmp_path, monkeypatch):
    """As in a shared cache, where the lock file belongs to another user. A folder in its place fails for root too."""
    monkeypatch.setattr(compat, "compiled_code_folders", lambda: {tmp_path})
    monkeypatch.setattr(compat, "publish_compiled_files_whole", lambda: None)
    (tmp_path / "glm46_repair.lock").mkdir()
    (tmp_path / "main.so").touch()
    repair_compiled_code()
    assert not (tmp_path / "main.so").exists()


def environment(cache: Path) -> dict[str, str]:
    """Variables with a cache of its own; the default cache, which holds headers, lies in TMPDIR."""
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    changes = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(cache / "code"), "TMPDIR": str(cache / "tmp")}
    return os.environ | changes


def start(cache: Path, factor: int, **options) -> subprocess.Popen:
    """The program; each factor is compiled anew."""
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(factor)], env=environment(cache), text=True, **options)


def compile_once(cache: Path, factor: int = 2) -> None:
    process = start(cache, factor, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "compiled" in output


@NEEDS_COMPILER
@pytest.mark.slow
def test_program_starts_with_a_planted_empty_library(tmp_path):
    compile_once(tmp_path)
    libraries = list(tmp_path.rglob("*.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(b"")
    compile_once(tmp_path)
    assert all(library.stat().st_size for library in libraries)
    assert not any(is_damaged(file) for file in tmp_path.rglob("*.so"))
    assert not list(tmp_path.rglob("*.partial"))


@NEEDS_COMPILER
@pytest.mark.long
def test_program_continues_after_kill_at_20_moments(tmp_path):
    """The moments cover the start in which the headers are compiled too, and later ones with the headers in the
    cache."""
    for cache, moments in ((tmp_path / "new", 6), (tmp_path / "used", 14)):
        if cache.name == "used":
            compile_once(cache)
        began = time.monotonic()
        compile_once(cache if cache.name == "used" else tmp_path / "timed", factor=3)
        seconds = time.monotonic() - began
        for moment in range(moments):
            place = cache / str(moment) if cache.name == "new" else cache
            process = start(place, 10 + moment, start_new_session=True, stdout=subprocess.DEVNULL)
            time.sleep(seconds * (0.3 + 0.7 * moment / moments))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            compile_once(place, 10 + moment)
    assert not [file for file in tmp_path.rglob("*.so") if is_damaged(file)]
