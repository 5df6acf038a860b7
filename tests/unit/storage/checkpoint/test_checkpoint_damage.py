"""Random damages and hostile metadata are found, and change nothing."""

import os
import pickle
import random
import resource
import shutil
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from glm46.compute.distributed.ranks import CheckpointError
from glm46.operate.models.checkpoint_steps import summarise
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import METADATA, read_metadata
from tests.unit.storage.checkpoint.test_checkpoint_manager import Payload


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((60, 50), value), "half": torch.full((70, 10), value, dtype=torch.bfloat16)}


def damage(step: Path, other: Path, chance: random.Random) -> str:
    """Damage a step folder at random; returns a description."""
    path = chance.choice(sorted(step.iterdir()))
    content = bytearray(path.read_bytes())
    is_same = (other / path.name).read_bytes() == content  # the index of two steps may be equal: a swap is no damage
    kind = chance.choice(
        ["flip", "truncate", "zero page", "extend", "remove", "extra", "rename"] + ["swap"] * (not is_same)
    )
    if kind == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del content[chance.randrange(len(content)) :]
    elif kind == "zero page":
        start = chance.randrange(len(content))
        piece = content[start : start + 4096]
        content[start : start + 4096] = bytes(len(piece)) if any(piece) else bytes([1]) * len(piece)
    elif kind == "extend":
        content += bytes(chance.randint(1, 5000))
    elif kind == "swap":
        content = bytearray((other / path.name).read_bytes())
    if kind == "remove":
        path.unlink()
    elif kind == "rename":
        path.rename(step / (path.name + "x"))
    elif kind == "extra":
        (step / "__7_0.distcp").write_bytes(bytes(10))
    else:
        path.write_bytes(content)
    return f"{kind} of {path.name}"


@pytest.mark.parametrize("file", ["manifest.json", "meta.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content, words", [
    (b"version https://git-lfs.invalid/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
    (b"<html>Sign in</html>", "answer of a web server"),
])  # fmt: skip
def test_what_stands_in_place_of_a_file_is_named(content, words, file, tmp_path):
    CheckpointManager(tmp_path, keep_latest_k=0).save(1, tensors(1), {})
    (tmp_path / "step-000001" / file).write_bytes(content)
    (summary,) = summarise(tmp_path, read_contents=False)
    assert len(summary.faults) == 1 and f"{file}: is " in summary.faults[0] and words in summary.faults[0]


@pytest.mark.slow
def test_a_thousand_random_damages_are_all_found(tmp_path):
    manager, chance = CheckpointManager(tmp_path / "run", keep_latest_k=0), random.Random(7)
    for step in (1, 2):
        manager.save(step, tensors(step), {"step": step})
    good, other = tmp_path / "run" / "step-000002", tmp_path / "run" / "step-000001"
    shutil.copytree(good, tmp_path / "good")
    for number in range(1000):
        kind = damage(good, other, chance)
        (summary,) = summarise(good, read_contents=True)
        assert summary.faults, f"{number}: {kind}"
        if number % 100 == 0:
            assert CheckpointManager(tmp_path / "run", keep_latest_k=0).newest() == 1
        shutil.rmtree(good)
        shutil.copytree(tmp_path / "good", good)
    assert CheckpointManager(tmp_path / "run", keep_latest_k=0).newest() == 2


def stock_save(folder: Path, state: dict[str, torch.Tensor]) -> None:
    stock.save(state, storage_writer=stock.FileSystemWriter(folder), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pickled_object_among_the_tensors_is_refused_and_not_loaded(tmp_path):
    stock_save(tmp_path / "stock", {"w": torch.ones(3), "object": Payload(os.mkdir, str(tmp_path / "ran"))})
    from glm46.files.durable import hash_file
    from glm46.storage.checkpoint.metadata import check_metadata, read_metadata

    metadata, faults = read_metadata(tmp_path / "stock")
    if metadata is not None:
        faults = check_metadata(
            tmp_path / "stock", metadata, {"__0_0.distcp": hash_file(tmp_path / "stock/__0_0.distcp")}
        )
    assert faults and not (tmp_path / "ran").exists()


def test_a_writer_that_loses_records_does_not_publish_a_checkpoint(tmp_path, monkeypatch):
    """With two threads DCP 2.13 swallows an I/O error and reports the records of the other thread only."""

    def lose_one(self, plan, planner, original=stock.FileSystemWriter.write_data):
        done = torch.futures.Future()
        done.set_result(original(self, plan, planner).value()[:-1])
        return done

    manager = CheckpointManager(tmp_path, keep_latest_k=0)
    monkeypatch.setattr(stock.FileSystemWriter, "write_data", lose_one)
    with pytest.raises(CheckpointError, match="no stored record"):
        manager.save(1, tensors(1.0), {})
    assert list(tmp_path.iterdir()) == []


DCP = "torch.distributed.checkpoint.metadata"


def named(module: str, name: str) -> bytes:
    """The opcodes that push a global."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


PATH = named("pathlib", "PurePosixPath")
HOSTILE = {
    "an attribute of a class of Python": PATH + b"N}\x8c\x0b__truediv__" + PATH + b"s\x86b.",
    "an attribute of a class of torch": named(DCP, "MetadataIndex") + b"N}\x8c\x08__hash__" + PATH + b"s\x86b.",
    "a field of a function": named("torch.serialization", "_get_layout") + b"}\x8c\x01a" + PATH + b"sb.",
    "a field of a member of an enum": (
        named("builtins", "getattr") + named(DCP, "_MEM_FORMAT_ENCODING") + b"\x8c\x12TORCH_CHANNELS_LAST\x86R"
        b"}\x8c\x07_value_K\x07sb."
    ),
    "an object by an old opcode": b"(ios\nsystem\n.",
    "an object of an earlier extension": b"\x82\x01.",
    "a persistent object": b"Pname\n.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_that_changes_something_is_refused_and_changes_nothing(kind, tmp_path):
    classes = (PurePosixPath, MetadataIndex, TensorProperties)
    before = [dict(vars(owner)) for owner in classes]
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + HOSTILE[kind])
    metadata, faults = read_metadata(tmp_path)
    assert metadata is None
    assert "refused" in faults[0]
    assert [dict(vars(owner)) for owner in classes] == before
    assert str(Path("/run") / "checkpoint") == "/run/checkpoint"


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param(b"Nr\xff\xff\xff\x7f.", id="place 2^31 of the memo"),
        pytest.param(b"\x96" + (2**36).to_bytes(8, "little") + b".", id="array of 64 GiB"),
        pytest.param(b"\x8e" + (2**36).to_bytes(8, "little") + b".", id="bytes of 64 GiB"),
    ],
)
def test_a_few_bytes_reserve_no_memory(operations, tmp_path):
    (tmp_path / METADATA).write_bytes(b"\x80\x05" + operations)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_metadata(tmp_path)[0] is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_every_protocol_is_read(protocol, tmp_path):
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    properties = TensorProperties(dtype=torch.bfloat16)
    entry = TensorStorageMetadata(properties, torch.Size([2, 3]), [chunk])
    written = Metadata({"a": entry}, {}, {MetadataIndex("a", chunk.offsets): PurePosixPath("x")})
    (tmp_path / METADATA).write_bytes(pickle.dumps(written, protocol))
    assert read_metadata(tmp_path) == (written, [])
