"""A prepared source of a few thousand tokens and a model of a few thousand parameters: a run takes a second.

The fixtures are imported by the conftest.py of tests/unit and of tests/ranks. There is none above these two, so that
tests/architecture loads nothing of the package.
"""

import ctypes
import fcntl
import json
import os
import pty
import struct
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm46.config.model import ModelShape
from glm46.config.run_config import RunConfig
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.prepare.sharding import SplitWriter, save_manifest
from tests.processes import wait_until

TINY = dict(
    flavor="debug", num_hidden_layers=2, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)  # fmt: skip


def model_table(**keys) -> dict[str, Any]:
    """[model] with these keys; the keys of the shape are in [model.shape]."""
    shape = {key: keys.pop(key) for key in ModelShape.model_fields if key in keys}
    return keys | {"shape": keys.get("shape", {}) | shape}


def with_shape(config: RunConfig, **keys) -> RunConfig:
    """A run with other keys of the shape."""
    shape = config.model.shape.model_copy(update=keys)
    return config.model_copy(update={"model": config.model.model_copy(update={"shape": shape})})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The shipped vocabulary."""
    return load_tokenizer("builtin")


def call_here(workers, start, arguments, function, items):
    """In place of `call_in_workers`, in this process."""
    start(*arguments)
    yield from ((number, function(*item)) for number, item in enumerate(items))


@pytest.fixture(scope="session")
def source_folder(tokenizer, tmp_path_factory) -> Path:
    """Repeating sentences, cut into documents, a few of them held out."""
    return write_source(tmp_path_factory.mktemp("source"), tokenizer)


def write_source(folder: Path, tokenizer: Tokenizer, *, documents: int = 60, factor: int = 1) -> Path:
    """The prepared source of `source_folder`, also for programs outside pytest, or one of more or longer documents."""
    splits = {}
    for name, count in (("train", documents), ("validation", 6)):
        metadata = {"tokenizer": tokenizer.fingerprint, "eos_id": str(tokenizer.eos_id)}
        writer = SplitWriter(folder, name, metadata)
        for number in range(count):
            text = f"def function_{number}(value):\n    return value + {number}\n" * factor * (3 + number % 5)
            tokens = np.append(tokenizer.encode(text), tokenizer.eos_id).astype(np.uint32)
            piece = {
                "tokens": tokens,
                "doc_ends": np.array([len(tokens)]),
                "text_bytes": np.array([len(text.encode())]),
            }
            writer.add(piece, np.array([True]))
        splits[name] = writer.finish()
    save_manifest(Manifest(folder, "test", tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id, splits))
    return folder


@contextmanager
def folder_with_source() -> Iterator[tuple[Path, Path]]:
    """A temporary folder, and the source of `write_source` in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "source"
        folder.mkdir()
        yield Path(name), write_source(folder, load_tokenizer("builtin"))


def small_config(source: Path, dump_folder: Path, **tables) -> RunConfig:
    """A small run; keyword arguments are whole or partial tables of the TOML; keys of the shape are in
    ``model`` itself."""
    content = {
        "job": {"dump_folder": str(dump_folder)},
        "model": TINY,
        "data": {"document_mask": True, "sources": [{"name": "test", "path": str(source)}]},
        "training": {"local_batch_size": 2, "seq_len": 16, "steps": 4, "mixed_precision_param": "float32"},
        "optimizer": {"name": "AdamW", "lr": 1e-2},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
    }
    for table, keys in tables.items():
        content[table] = {**content.get(table, {}), **keys}
    content["model"] = model_table(**content["model"])
    return RunConfig.model_validate_json(json.dumps(content))


@pytest.fixture
def make_config(source_folder, tmp_path):
    """A function that makes a small run; keyword arguments are whole or partial tables of the TOML."""

    def make(**tables) -> RunConfig:
        return small_config(source_folder, tmp_path / "out", **tables)

    return make


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Standard output is a terminal inside of this context; the function returns what it has shown so far."""
    screen, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    shown, output = bytearray(), os.fdopen(slave, "w")

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while content := os.read(screen, 65536):
                shown.extend(content)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def text() -> str:
        before = shown.count(0)
        output.write("\0")  # has come out when all before it has
        output.flush()
        wait_until(lambda: shown.count(0) > before)
        return shown.decode(errors="replace").replace("\0", "").replace("\r\n", "\n")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "200")  # rich asks file descriptor 1 for the width, which is not this terminal
        patch.setattr("sys.stdout", output)
        yield text
    output.close()
    reader.join(5)
    os.close(screen)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB, and a function that gives it another size, where this process may mount one."""
    mount, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    mount.mkdir()
    if libc.mount(b"none", bytes(mount), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    remount = 32  # MS_REMOUNT
    yield mount, lambda size: libc.mount(b"none", bytes(mount), b"tmpfs", remount, f"size={size}".encode())
    libc.umount2(bytes(mount), 2)
