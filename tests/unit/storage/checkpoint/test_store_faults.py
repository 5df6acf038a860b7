"""Faults on the wire between a run and an S3 server: each is repeated or named, and no other byte is used."""

import logging
import os
import random
from pathlib import Path

import pytest
import torch

from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.errors import UserError
from glm46.files import store as store_module
from glm46.files.store import Store
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.faulty_wire import FaultyWire
from tests.unit.storage.checkpoint.test_checkpoint_manager import same_bits
from tests.unit.storage.checkpoint.test_store_s3 import SECRET, VARIABLES

s3fs = pytest.importorskip("s3fs", reason="not installed; pip install '.[cloud]'")
moto_server = pytest.importorskip("moto.server", reason="not installed; pip install '.[test]'")
KINDS = ("503", "cut", "flip", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("500", "reset", "hang")))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def wire(server, monkeypatch):
    """A wire without faults yet, to a bucket; requests fail after a second, and pauses take no time."""
    wire = FaultyWire(server, lambda _number, _line: None)
    for name, value in zip(VARIABLES, ("key", SECRET, "us-east-1", f"http://127.0.0.1:{wire.port}"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    options = '{"config_kwargs": {"read_timeout": 1, "connect_timeout": 1}, "skip_instance_cache": true}'
    monkeypatch.setenv("FSSPEC_S3", options)
    apply_config()
    monkeypatch.setattr(store_module, "_PAUSES", (0.0,) * 6)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # else it repeats each attempt five times, with pauses
    store = Store("s3://faults")
    if not store._files.exists("faults"):
        store._files.mkdir("faults")
    yield wire
    wire.close()
    monkeypatch.undo()
    apply_config()


def apply_config() -> None:
    """Read the variables of fsspec again."""
    from fsspec.config import conf, set_conf_env

    conf.clear()
    set_conf_env(conf, os.environ)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """More than a mebibyte in one tensor, so that ranges of it can be read."""
    return {"model.a": torch.full((1100, 256), float(step)), "model.b": torch.full((7,), float(step))}


def manager_of(folder: Path, url: str) -> CheckpointManager:
    return CheckpointManager(folder / "mirror", keep_latest_k=2, node_local_folder=folder / "staging", store_url=url)


def is_loaded(manager: CheckpointManager, step: int) -> bool:
    tensors = tensors_of(0)
    return manager.load(step, tensors) == {"step": step} and same_bits(tensors, tensors_of(step))


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_one_kind_are_repeated(kind, wire, tmp_path):
    chance = random.Random(kind)

    def fault(_number: int, line: bytes) -> str | None:
        # Changed bytes are found in what has a hash or a digest; the answer to a list or a lease has none.
        is_possible = kind != "flip" or (line.startswith(b"GET") and b"distcp" in line)
        return kind if is_possible and chance.random() < (0.03 if kind == "hang" else 0.1) else None

    url = f"s3://faults/{kind}"
    manager = manager_of(tmp_path / "a", url)
    wire.fault = fault
    for step in (1, 2, 3):
        manager.save(step, tensors_of(step), {"step": step})
    manager.release()
    other = manager_of(tmp_path / "b", url)
    assert other.newest(tensors=tensors_of(0)) == 3
    assert is_loaded(other, 3)
    other.release()
    assert wire.faults > 0, "the wire had faults of this kind"


@pytest.mark.parametrize("kind", ["503", "cut", "flip"])
def test_a_fault_that_stays_is_named_and_the_checkpoint_before_stays_the_newest(kind, wire, tmp_path):
    url = f"s3://faults/stays-{kind}"
    manager = manager_of(tmp_path / "a", url)
    manager.save(1, tensors_of(1), {"step": 1})
    wire.fault = lambda _number, line: kind if b"step-000002/__0_0.distcp" in line else None
    with pytest.raises(CheckpointError) as raised:
        manager.save(2, tensors_of(2), {"step": 2})
    assert "step-000002" in str(raised.value) and SECRET not in str(raised.value)
    manager.release()
    other = manager_of(tmp_path / "b", url)
    assert other.newest(tensors=tensors_of(0)) == 1
    assert is_loaded(other, 1)
    other.release()
    wire.fault = lambda _number, line: kind if b"step-000001/__0_0.distcp" in line and b"GET" in line else None
    last = manager_of(tmp_path / "c", url)
    with pytest.raises(UserError) as refused:
        last.newest(tensors=tensors_of(0))
    assert "step-000001" in str(refused.value) and SECRET not in str(refused.value)
    last.release()
