"""One process: a checkpoint loads bit for bit, or is refused with the reason; saves in the background; retention.

Values read directly from a checkpoint's files equal those of DCP's reader.
"""

import enum
import io
import math
import os
import pickle
import resource
import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from glm46.commands.checkpoint import checkpoint_command
from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.errors import UserError
from glm46.storage.checkpoint import dcp, finite, save, stored_values
from glm46.storage.checkpoint.dcp import fill_tensors
from glm46.storage.checkpoint.finite import NotFiniteError, names_not_finite
from glm46.storage.checkpoint.integrity import complete_steps
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.publish import Retention, steps_to_remove
from glm46.storage.checkpoint.stored_values import StoredTensor
from glm46.tasks.weights.write_model import write_model
from tests.processes import wait_until

ROOT = Path(__file__).resolve().parents[4]


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(33, 7, generator=generator),
        "model.half": torch.randn(5, 4, generator=generator).to(torch.bfloat16),
        "model.scale": torch.randn((), generator=generator),
        "model.empty": torch.zeros(0, 3),
        "optimizer.counts": torch.randint(0, 9, (8,), generator=generator),
        "rng.rank0": torch.get_rng_state(),
    }


def save_steps(folder: Path, *steps: int, keep_latest_k: int = 0) -> CheckpointManager:
    manager = CheckpointManager(folder, keep_latest_k=keep_latest_k)
    for step in steps:
        manager.save(step, make_tensors(step), {"step": step, "loss": 1 / 3})
    return manager


def fresh(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, keep_latest_k=0)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected) and found.keys() == expected.keys()


def test_round_trip_is_bitwise_and_in_place(tmp_path):
    save_steps(tmp_path, 5)
    target = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(5).items()}
    address = target["model.weight"].data_ptr()
    meta = fresh(tmp_path).load(5, target)
    assert same_bits(target, make_tensors(5))
    assert target["model.weight"].data_ptr() == address
    assert meta == {"step": 5, "loss": 1 / 3}
    assert (tmp_path / "latest").read_text() == "step-000005\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_parameters_that_require_gradients_are_saved_and_filled(tmp_path):
    layer = torch.nn.Linear(4, 3)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    fresh(tmp_path).save(1, dict(layer.named_parameters()), {})
    torch.nn.init.zeros_(layer.weight)
    fresh(tmp_path).load(1, dict(layer.named_parameters()))
    assert same_bits({name: parameter.detach() for name, parameter in layer.named_parameters()}, before)


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    large = torch.arange(1_000_000)
    fresh(tmp_path).save(1, {"view": large[10:20], "across": large.view(1000, 1000)[:, 3]}, {})
    target = {"view": torch.zeros(10, dtype=torch.int64), "across": torch.zeros(1000, dtype=torch.int64)}
    fresh(tmp_path).load(1, target)
    assert torch.equal(target["view"], large[10:20]) and torch.equal(target["across"], large[3::1000])
    # 8 kB of values; the storage behind them has 8 MB
    assert (tmp_path / "step-000001" / "__0_0.distcp").stat().st_size < 20_000


def test_stock_dcp_tools_read_the_folder(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save_steps(tmp_path, 2)
    dcp_to_torch_save(tmp_path / "step-000002", tmp_path / "one.pt")
    assert same_bits(torch.load(tmp_path / "one.pt", weights_only=True), make_tensors(2))


def test_newest_is_none_without_checkpoints(tmp_path):
    assert fresh(tmp_path / "absent").newest() is None
    (tmp_path / "step-000007.tmp").mkdir()  # left by a killed first save
    (tmp_path / "my-step-000009").mkdir()
    (tmp_path / "step-9").mkdir()
    assert fresh(tmp_path).newest() is None


def flip(path: Path, position: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1
    path.write_bytes(content)


# Random changes of each file are in test_checkpoint_damage.py.
DAMAGES = {
    "flipped byte in tensors": lambda step: flip(step / "__0_0.distcp"),
    "flipped byte in manifest": lambda step: flip(step / "manifest.json"),
    "space added to manifest": lambda step: (step / "manifest.json").open("a").write(" "),
    "missing manifest": lambda step: (step / "manifest.json").unlink(),
    "tensors of another step": lambda step: (step / "__0_0.distcp").write_bytes(
        (step.parent / "step-000010" / "__0_0.distcp").read_bytes()
    ),
    "manifest of another step": lambda step: (step / "manifest.json").write_bytes(
        (step.parent / "step-000010" / "manifest.json").read_bytes()
    ),
    "symbolic link": lambda step: (
        (step / "meta.json").rename(step.parent / "moved"),
        (step / "meta.json").symlink_to(step.parent / "moved"),
    ),
    "empty folder": lambda step: [path.unlink() for path in step.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_previous_step_is_used(tmp_path, caplog, damage):
    save_steps(tmp_path, 10, 20)
    DAMAGES[damage](tmp_path / "step-000020")
    manager = fresh(tmp_path)
    assert manager.newest() == 10
    assert "step-000020" in caplog.text
    target = make_tensors(99)
    with pytest.raises(UserError, match="step-000020"):
        manager.load(20, target)
    assert same_bits(target, make_tensors(99))
    manager.load(10, target)
    assert same_bits(target, make_tensors(10))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_step_0(tmp_path):
    save_steps(tmp_path, 10, 20)
    for step in ("step-000010", "step-000020"):
        flip(tmp_path / step / "__0_0.distcp")
    with pytest.raises(UserError, match="move the folder away") as caught:
        fresh(tmp_path).newest()
    assert len(caught.value.faults) == 3


def test_an_absent_step_is_named_with_the_present_ones(tmp_path):
    save_steps(tmp_path, 10, 20)
    with pytest.raises(UserError, match="step-000015: no such checkpoint.*10, 20"):
        fresh(tmp_path).load(15, {})


def test_names_shapes_and_dtypes_are_strict_and_all_faults_are_reported_at_once(tmp_path):
    save_steps(tmp_path, 1)
    target = make_tensors(3)
    target["model.weight"] = torch.zeros(7, 33)
    target["model.half"] = torch.zeros(5, 4)  # DCP would cast without an error
    target["model.new"] = torch.zeros(2)
    with pytest.raises(UserError) as caught:
        fresh(tmp_path).load(1, target)
    text = str(caught.value)
    assert len(caught.value.faults) == 3
    assert "model.weight has shape (33, 7), this run needs (7, 33)" in text
    assert "model.half is torch.bfloat16, this run needs torch.float32" in text
    assert "lacks model.new (2,)" in text
    assert torch.equal(target["model.scale"], make_tensors(3)["model.scale"])


def test_a_name_that_no_rank_requests_is_a_fault_unless_ignored(tmp_path):
    save_steps(tmp_path, 1)
    weights = {name: torch.zeros_like(t) for name, t in make_tensors(1).items() if name.startswith("model.")}
    with pytest.raises(UserError) as caught:
        fresh(tmp_path).load(1, weights)
    assert len(caught.value.faults) == 2
    fresh(tmp_path).load(1, weights, ignored=["optimizer.", "rng."])
    assert torch.equal(weights["model.weight"], make_tensors(1)["model.weight"])
    fresh(tmp_path).load(tmp_path / "step-000001", weights, ignored=[""])


def test_optional_names_may_be_missing_and_keep_their_value(tmp_path):
    save_steps(tmp_path, 1)
    target = {**make_tensors(2), "rng.rank1": torch.full((3,), 7)}
    fresh(tmp_path).load(1, target, optional=["rng."])
    assert target["rng.rank1"].tolist() == [7, 7, 7]
    assert torch.equal(target["model.weight"], make_tensors(1)["model.weight"])


def test_retention_keeps_the_newest_and_the_one_in_use(tmp_path):
    manager = save_steps(tmp_path, 1, 2, 3)
    manager = CheckpointManager(tmp_path, keep_latest_k=2)
    manager.load(3, make_tensors(0))
    manager.save(5, make_tensors(5), {})
    (tmp_path / "step-000004").mkdir()  # published name, no content: neither counted nor removed
    for step in (6, 7):
        manager.save(step, make_tensors(step), {})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-00000{step}" for step in (3, 4, 6, 7)]
    assert manager.newest() == 7


def test_a_stale_draft_is_replaced(tmp_path):
    draft = tmp_path / "step-000003.tmp"
    draft.mkdir()
    (draft / "__0_0.distcp").write_bytes(b"torn")
    (draft / "manifest.json").write_bytes(b"{}")
    manager = save_steps(tmp_path, 3)
    assert manager.newest() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]


def test_saving_a_step_again_replaces_it_and_an_interrupted_exchange_is_undone(tmp_path):
    save_steps(tmp_path, 3)
    fresh(tmp_path).save(3, make_tensors(33), {"again": True})
    target = make_tensors(0)
    assert fresh(tmp_path).load(3, target) == {"again": True}
    assert same_bits(target, make_tensors(33))
    (tmp_path / "step-000003").rename(tmp_path / "step-000003.old")  # killed between the two renames
    assert fresh(tmp_path).newest() == 3


def test_loading_an_earlier_step_abandons_the_later_branch(tmp_path, caplog):
    save_steps(tmp_path, 10, 20, 30)
    manager = fresh(tmp_path)
    manager.load(10, make_tensors(0))
    assert fresh(tmp_path).newest() == 30  # reading a checkpoint changes nothing
    manager.save(15, make_tensors(15), {})
    assert fresh(tmp_path).newest() == 15  # not 30, which this run never reached
    assert "step-000030.abandoned: " in caplog.text
    manager.save(20, make_tensors(20), {})
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000010", "step-000015", "step-000020", "step-000020.abandoned", "step-000030.abandoned"]


class Payload:
    """A pickle that calls a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def reseal(step: Path) -> None:
    """Write a manifest that matches the hostile file, as an attacker can."""
    from glm46.files.durable import hash_file
    from glm46.storage.checkpoint.integrity import MANIFEST, read_manifest, records_of, write_manifest

    body, _ = read_manifest(step, None)
    (step / MANIFEST).unlink()
    write_manifest(step, body["step"], {name: hash_file(step / name) for name in records_of(body)}, {})


@pytest.mark.parametrize(("call", "said"), [
    ((os.mkdir, "pwned"), "posix.mkdir"), ((getattr, Metadata, "__init__"), "member of an enum"),
])  # fmt: skip
def test_a_hostile_pickle_in_metadata_is_not_run(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_steps(tmp_path, 1)
    step = tmp_path / "step-000001"
    (step / ".metadata").write_bytes(pickle.dumps(Payload(*call)))
    reseal(step)
    with pytest.raises(UserError, match=f"refused: .*{said}"):
        fresh(tmp_path).load(1, make_tensors(1))
    assert not (tmp_path / "pwned").exists()


class PicklerOfPython3112(pickle._Pickler):
    """Writes members of an enum as that release does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_of_a_python_that_names_getattr_is_read(tmp_path):
    save_steps(tmp_path, 1)
    step = tmp_path / "step-000001"
    metadata = pickle.loads((step / ".metadata").read_bytes())
    with (step / ".metadata").open("wb") as file:
        PicklerOfPython3112(file).dump(metadata)
    assert b"getattr" in (step / ".metadata").read_bytes()
    reseal(step)
    fresh(tmp_path).load(1, make_tensors(1))


def edit_metadata(step: Path, change) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(step)


def leave_the_folder(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../outside"


def drop_a_record(metadata):
    metadata.storage_data.pop(next(index for index in metadata.storage_data if index.fqn == "model.weight"))


def drop_half_a_tensor(metadata):
    chunk = metadata.state_dict_metadata["model.weight"].chunks[0]
    chunk.sizes = torch.Size([16, 7])


@pytest.mark.parametrize("change", [leave_the_folder, drop_a_record, drop_half_a_tensor])
def test_metadata_through_which_dcp_would_load_wrong_values_is_refused(tmp_path, change):
    save_steps(tmp_path, 1)
    edit_metadata(tmp_path / "step-000001", change)
    target = make_tensors(4)
    with pytest.raises(UserError, match="step-000001"):
        fresh(tmp_path).load(1, target)
    assert same_bits(target, make_tensors(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_one_bad_value_is_found_in_every_type(dtype):
    tensors = {"good": torch.zeros(3, 7, dtype=dtype), "empty": torch.zeros(0, dtype=dtype), "whole": torch.arange(5)}
    tensors["large"] = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
    assert names_not_finite(tensors) == []
    for number, bad in enumerate([float("nan"), *([] if dtype.itemsize == 1 else [float("inf"), -float("inf")])]):
        tensors[f"bad{number}"] = torch.zeros(9).index_fill(0, torch.tensor([4]), bad).to(dtype)
    assert names_not_finite(tensors) == [name for name in tensors if name.startswith("bad")]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_with_a_bad_value_publishes_nothing_and_names_the_tensor(tmp_path, in_background):
    manager, tensor = CheckpointManager(tmp_path, keep_latest_k=1), torch.ones(4)
    manager.save(1, {"model.w": tensor}, {})
    tensor[2] = float("inf")
    with pytest.raises(NotFiniteError, match=r"model\.w holds values that are not finite"):
        if in_background:
            manager.save_in_background(2, {"model.w": tensor}, {})
            manager.close()
        else:
            manager.save(2, {"model.w": tensor}, {})
    assert manager.newest() == 1 and [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]


def test_an_existing_checkpoint_with_bad_values_is_not_verified_and_not_used(tmp_path, monkeypatch, capsys):
    manager, tensor = CheckpointManager(tmp_path, keep_latest_k=0), torch.ones(40, 3)
    manager.save(1, {"model.w": tensor}, {})
    tensor[39, 2] = float("nan")
    monkeypatch.setattr(finite, "_PIECE_BYTES", 100)
    with monkeypatch.context() as patch:  # as an earlier version, which checked no values
        patch.setattr(save, "refuse_not_finite", lambda tensors, ranks: None)
        patch.setattr(save.Snapshot, "facts", lambda self, size, **_: {"saved_at": 0.0, "validation_loss": None})
        manager.save(2, {"model.w": tensor}, {})
    assert checkpoint_command(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED" in said and "step-000002: model.w holds values that are not finite" in said
    fresh = CheckpointManager(tmp_path, keep_latest_k=0)
    assert fresh.newest() == 1
    with pytest.raises(UserError, match="not finite"):
        fresh.load(2, {"model.w": tensor})


def test_weights_of_a_conversion_are_checked_when_a_run_starts_from_them(tmp_path):
    nan = lambda name, tensor: tensor.fill_(float("nan"))  # noqa: E731
    step = write_model(tmp_path, {"w": ((2, 2), torch.float32)}, nan, {})
    with pytest.raises(UserError, match=r"model\.w holds values that are not finite"):
        CheckpointManager(tmp_path / "run", keep_latest_k=0).load(step, {"model.w": torch.ones(2, 2)})


def filled(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((300, 1000), float(value)),
        "half": torch.full((3, 5), value, dtype=torch.bfloat16),
        "count": torch.tensor(int(value)),
        "empty": torch.zeros(0, 2),
    }


def take(manager: CheckpointManager) -> list:
    return wait_until(manager.poll, "no save ended")


def test_a_background_save_holds_the_values_of_its_call(tmp_path):
    manager, tensors, meta = fresh(tmp_path), filled(1), {"clock": 1}
    for step in (1, 2, 3):
        assert manager.save_in_background(step, tensors, meta)
        for tensor in tensors.values():
            tensor.fill_(step + 1)
        meta["clock"] = step + 1
        (outcome,) = take(manager)
        assert outcome.step == step
        # 1.2 MB of values; records of DCP add about 1.4 kB for each of four tensors, metadata and manifest the rest
        assert 1_200_000 < outcome.bytes < 1_212_000
    for step in (1, 2, 3):
        target = filled(0)
        assert manager.load(step, target) == {"clock": step}
        assert all((tensor == step).all() for tensor in target.values())
    manager.close()


def test_storage_that_hangs_costs_checkpoints_but_no_training_time(tmp_path, monkeypatch):
    manager, gate = fresh(tmp_path), threading.Event()
    monkeypatch.setattr(dcp, "fsync", lambda descriptor: gate.wait(600))
    assert manager.save_in_background(1, filled(1), {})
    started = time.monotonic()
    assert not manager.save_in_background(2, filled(2), {})
    assert manager.poll() == []
    assert time.monotonic() - started < 60  # the disk would have taken ten minutes
    gate.set()
    assert [outcome.step for outcome in take(manager)] == [1]
    assert manager.save_in_background(3, filled(3), {})
    assert [outcome.step for outcome in manager.close()] == [3]
    assert manager.newest() == 3


def test_a_step_is_published_after_what_has_to_be_written_before(tmp_path):
    manager, published = fresh(tmp_path), []
    manager.before_publishing = lambda: published.append(complete_steps(tmp_path))
    manager.save(1, filled(1), {})
    assert manager.save_in_background(2, filled(2), {})
    take(manager)
    assert published == [[], [1]]


@pytest.fixture
def small_disk():
    """Writes fail beyond a file size, as on a full disk; a call lifts the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_the_next_save_works(tmp_path, small_disk):
    manager = fresh(tmp_path)
    manager.save(1, {"small": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match="rank 0, writing tensors: OSError"):
        manager.save(2, filled(2), {})
    assert manager.save_in_background(3, filled(3), {})
    with pytest.raises(CheckpointError, match="rank 0, writing tensors: OSError"):
        take(manager)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert manager.newest() == 1
    small_disk()
    assert manager.save_in_background(4, filled(4), {})
    assert [outcome.step for outcome in manager.close()] == [4]
    assert manager.newest() == 4


def test_a_failed_background_save_is_not_lost_when_another_save_comes_first(tmp_path, monkeypatch):
    def broken_once(descriptor):
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    manager = fresh(tmp_path)
    monkeypatch.setattr(dcp, "fsync", broken_once)
    assert manager.save_in_background(1, filled(1), {})
    manager.save(2, filled(2), {})
    with pytest.raises(CheckpointError, match="rank 0, writing tensors: OSError: .*Input/output error"):
        manager.poll()
    assert manager.poll() == [] and manager.newest() == 2


def test_meta_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    manager = fresh(tmp_path / "run")
    for write in (manager.save, manager.save_in_background):
        with pytest.raises(CheckpointError, match="TypeError"):
            write(1, filled(1), {"tensor": torch.ones(1)})
    assert not (tmp_path / "run").exists()


def test_best_checkpoints_stay_and_staging_is_kept_while_shapes_stay(tmp_path):
    manager = CheckpointManager(tmp_path, keep_latest_k=1, keep_best_k=1, keep_every=40)
    for step, loss in ((10, 3.0), (20, 1.5), (30, 2.5), (40, None), (50, float("nan")), (60, 2.0)):
        assert manager.save_in_background(step, filled(step), {}, validation_loss=loss)
        take(manager)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000020", "step-000040", "step-000060"]
    other = {"weight": torch.ones(7), "new": torch.ones(2)}
    assert manager.save_in_background(70, other, {})
    manager.close()
    assert manager.load(70, {name: torch.zeros_like(tensor) for name, tensor in other.items()}) == {}


def test_nothing_is_removed_until_the_new_checkpoint_was_read_back(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep_latest_k=1)
    manager.save(1, filled(1), {})

    def lying_disk(descriptor):
        monkeypatch.undo()
        os.pwrite(descriptor, b"\xff", 100_000)  # after the bytes were hashed and written

    monkeypatch.setattr(dcp, "fsync", lying_disk)
    with pytest.raises(CheckpointError, match="step-000002/__0_0.distcp: SHA-256"):
        manager.save(2, filled(2), {})
    assert manager.newest() == 1
    manager.save(3, filled(3), {})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003"]


LOSS = st.none() | st.floats(0, 10) | st.just(math.nan)


def test_each_rule_keeps_its_steps():
    losses = {100: 3.0, 200: 1.0, 300: math.nan, 400: 2.0, 500: None, 600: 2.5, 700: 2.9}
    assert steps_to_remove(losses, Retention(keep_latest_k=0)) == []
    assert steps_to_remove(losses, Retention(keep_latest_k=2)) == [100, 200, 300, 400, 500]
    assert steps_to_remove(losses, Retention(keep_latest_k=1, keep_best_k=2)) == [100, 300, 500, 600]
    assert steps_to_remove(losses, Retention(keep_latest_k=1, keep_every=300)) == [100, 200, 400, 500]
    assert steps_to_remove(losses, Retention(keep_latest_k=1), in_use={200}) == [100, 300, 400, 500, 600]
    # Checkpoints of a row of skipped steps never displace the newest one before it.
    assert steps_to_remove(losses, Retention(keep_latest_k=2), doubtful={600, 700}) == [100, 200, 300, 400]
    assert steps_to_remove({1: 2.0, 2: 2.0, 3: 5.0}, Retention(keep_latest_k=1, keep_best_k=1)) == [1]


def test_losses_of_unknown_steps_compete_only_among_themselves():
    losses = {100: 1.0, 200: 0.5, 300: 4.0, 400: 3.0, 500: 5.0}
    rule = Retention(keep_latest_k=1, keep_best_k=1)
    assert steps_to_remove(losses, rule, undated={100, 200}) == [100, 300]
    assert steps_to_remove(losses, Retention(keep_latest_k=1), undated={100, 200}) == [100, 200, 300, 400]


@settings(max_examples=2000)
@given(
    st.dictionaries(st.integers(0, 60), LOSS, max_size=20),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 4),
    st.sets(st.integers(0, 60), max_size=2),
    st.sets(st.integers(0, 60)),
)
@pytest.mark.slow
def test_the_steps_of_the_rules_are_kept_and_no_others(losses, latest, every, best, in_use, doubtful):
    removed = steps_to_remove(losses, Retention(latest, every, best), in_use, doubtful)
    kept = set(losses) - set(removed)
    newest = set(sorted(losses)[-latest:]) | set(sorted(losses.keys() - doubtful)[-1:])
    multiples = {step for step in losses if every and step % every == 0}
    numbers = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
    assert newest | multiples | (in_use & set(losses)) <= kept
    assert removed == sorted(set(removed)) and set(removed) <= set(losses)
    best_kept = kept - newest - multiples - in_use
    assert len(best_kept) <= best
    # Every removed step that has a loss is no better than the worst of those kept as best.
    ranked = sorted(numbers.values())[:best]
    assert all(numbers[step] >= ranked[-1] for step in removed if step in numbers and ranked)
    assert len([step for step in kept if step in numbers]) >= min(best, len(numbers))


FILE = "__0_0.distcp"


def stored(folder: Path, whole: torch.Tensor, starts: list[tuple[int, ...]], sizes: list[tuple[int, ...]], save=None):
    """A tensor in chunks: records in one file, with other bytes between them."""
    content, data = b"", {}
    for start, size in zip(starts, sizes, strict=True):
        record = io.BytesIO()
        part = whole[tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))]
        torch.save(part.clone() if save is None else save(part), record)
        content += bytes(7)
        data[MetadataIndex("w", torch.Size(start))] = _StorageInfo(FILE, len(content), len(record.getvalue()))
        content += record.getvalue()
    (folder / FILE).write_bytes(content)
    chunks = [
        ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in zip(starts, sizes, strict=True)
    ]
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    return Metadata(state_dict_metadata={"w": entry}, storage_data=data)


def both_read(folder, metadata, whole) -> bool:
    """Our reader and DCP's give the same values: the whole tensor, and every box of two indices a side."""
    by_dcp, stored = torch.full_like(whole, 8), StoredTensor(folder, metadata, "w")
    fill_tensors(folder, metadata, {"w": by_dcp}, is_first=True)
    boxes = product(*([slice(None), *(slice(i, i + 2) for i in range(0, size, 2))] for size in whole.shape))
    return torch.equal(by_dcp, whole) and all(torch.equal(stored[box], whole[box]) for box in boxes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("starts, sizes", [
    ([(0, 0)], [(6, 10)]), ([(0, 0), (2, 0)], [(2, 10), (4, 10)]), ([(0, 0), (0, 3)], [(6, 3), (6, 7)]),
    ([(0, 0), (0, 3), (5, 0)], [(5, 3), (5, 7), (1, 10)]),
])  # fmt: skip
def test_chunks_equal_what_dcp_reads(dtype, starts, sizes, tmp_path, monkeypatch):
    whole = torch.randn(6, 10).mul(100).to(dtype)
    metadata = stored(tmp_path, whole, starts, sizes)
    assert both_read(tmp_path, metadata, whole)
    monkeypatch.setattr(stored_values, "fill_tensors", None)  # none of these records needs DCP
    assert torch.equal(StoredTensor(tmp_path, metadata, "w")[2, 1:], whole[2, 1:])


@pytest.mark.parametrize("whole", [torch.tensor(3.5), torch.empty(0, 4), torch.randn(1)])
def test_scalars_and_empty_tensors(whole, tmp_path):
    assert both_read(tmp_path, stored(tmp_path, whole, [(0,) * whole.dim()], [tuple(whole.shape)]), whole)


@pytest.mark.parametrize(
    "save",
    [
        lambda part: part.t().contiguous().t(),  # columns are contiguous
        lambda part: torch.cat([torch.zeros(1, part.shape[1]), part])[1:],  # values begin inside their storage
        lambda part: torch.nn.Parameter(part.clone()),
    ],
)
def test_records_of_another_form_are_read_too(save, tmp_path):
    whole = torch.randn(4, 5)
    assert both_read(tmp_path, stored(tmp_path, whole, [(0, 0)], [(4, 5)], save), whole)


def test_a_truncated_file_is_an_error(tmp_path):
    whole = torch.randn(40, 50)
    metadata = stored(tmp_path, whole, [(0, 0)], [(40, 50)])
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises((OSError, RuntimeError, ValueError)):
        StoredTensor(tmp_path, metadata, "w")[:, :]
