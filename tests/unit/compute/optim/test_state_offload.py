"""States in host memory or in a file: what a slot holds while it is worked on, and that every item comes back whole."""

import time

import pytest
import torch

from glm46.compute.optim.compact_state import Quantized
from glm46.compute.optim.muon import Muon
from glm46.compute.optim.state_file import StateFile, StateRing
from glm46.compute.optim.state_offload import StateStream
from glm46.config.errors import UserError
from glm46.files.local_disk import local_disk_fault
from glm46.run.sizes import OFFLOAD_SLOTS

CPU = torch.device("cpu")


@pytest.mark.parametrize("place", ["cpu", "disk", "slow disk"])
def test_every_item_comes_in_order_and_goes_back_where_it_was(place, tmp_path, monkeypatch):
    """Eleven items through three slots; some are scattered over rows of a matrix, as the up rows of fused experts are.
    A disk is read ahead and written behind."""
    if place == "slow disk":
        read, write = StateRing._read, StateRing._write
        monkeypatch.setattr(StateRing, "_read", lambda *a: (time.sleep(0.01), read(*a)))
        monkeypatch.setattr(StateRing, "_write", lambda *a: (time.sleep(0.01), write(*a)))
    file = StateFile(tmp_path)

    def zeros(*size, dtype=torch.float32):
        return torch.zeros(size, dtype=dtype) if place == "cpu" else file.zeros(torch.Size(size), dtype, torch.zeros(0))

    whole = [zeros(4, 6, 5) for _ in range(5)]
    for number, state in enumerate(whole):
        state.copy_(torch.arange(120.0).view(4, 6, 5) + 1000 * number)
    items = [part for state in whole for part in ([state[:2, :3]], [state[:2, 3:], state[2:]])]
    codes = zeros(3, 10, dtype=torch.uint8)
    items.append([Quantized(codes, zeros(3, 1), True)])
    expected = [state.clone() for state in whole]
    stream = StateStream(items, CPU, "cpu" if place == "cpu" else file)
    for step in range(3):
        stream.begin()
        for item in items:
            with stream.take() as states:
                for state, kept in zip(states, item, strict=True):
                    if isinstance(state, Quantized):
                        assert (state.codes == step).all() and (state.scales == step).all() and state.signed
                        state.codes.add_(1)
                        state.scales.add_(1.0)
                    else:
                        assert torch.equal(state, kept) and state.is_contiguous()
                        assert state.data_ptr() != kept.data_ptr()
                        state.mul_(2.0).add_(1.0)
        stream.end()
        expected = [2.0 * state + 1.0 for state in expected]
        assert all(torch.equal(*pair) for pair in zip(whole, expected, strict=True)) and (codes == step + 1).all()
    assert not list(tmp_path.iterdir())  # the file has no name


def test_an_item_may_be_empty():
    items = [[torch.ones(5)], [torch.ones(2, 4), torch.zeros(0, 4)]]
    stream = StateStream(items, CPU, "cpu")
    stream.begin()
    for item in items:
        with stream.take() as states:
            assert [state.shape for state in states] == [state.shape for state in item]
    stream.end()


def test_an_error_of_the_disk_ends_the_step(tmp_path, monkeypatch):
    file = StateFile(tmp_path)
    items = [[file.zeros(torch.Size((4,)), torch.float32, torch.zeros(0))] for _ in range(5)]
    stream = StateStream(items, CPU, file)

    def fail(*_arguments):
        raise OSError("the disk is gone")

    monkeypatch.setattr(StateRing, "_write", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        stream.begin()
        for _ in items:
            with stream.take():
                pass


def test_folders_that_cannot_have_the_file_are_refused(tmp_path, small_disk):
    with pytest.raises(UserError, match="optimizer.state_offload_folder = .*no such folder; name a folder on a local"):
        StateFile(tmp_path / "missing")
    file = StateFile(small_disk[0])
    with pytest.raises(UserError, match="no room for .* GiB of this rank: No space left on device; name a folder"):
        file.zeros(torch.Size((1 << 28,)), torch.float32, torch.zeros(0))
    mounts = tmp_path / "mounts"
    kinds = {"/": "ext4", tmp_path: "nfs4", tmp_path / "a": "xfs"}
    mounts.write_text("".join(f"device {folder} {kind} rw 0 0\n" for folder, kind in kinds.items()))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert local_disk_fault(tmp_path / "b", mounts) == "on a network file system (nfs4)"
    assert local_disk_fault(tmp_path / "a", mounts) is None


def test_device_memory_is_a_few_slots_of_the_largest_item():
    items = [[torch.zeros(1000)] for _ in range(50)]
    stream = StateStream(items, CPU, "cpu")
    stream.begin()
    seen = set()
    for _ in items:
        with stream.take() as states:
            seen.add(states[0].data_ptr())
    stream.end()
    assert len(seen) == OFFLOAD_SLOTS


def test_states_that_stay_are_not_copied():
    items = [[torch.zeros(3)], [torch.zeros(4)]]
    stream = StateStream(items, CPU, "none")
    stream.begin()
    for item in items:
        with stream.take() as states:
            assert states[0] is item[0]
    stream.end()


def test_step_that_leaves_an_item_out_is_a_fault_of_ours():
    stream = StateStream([[torch.zeros(3)]], CPU, "cpu")
    stream.begin()
    with pytest.raises(AssertionError, match="every item"):
        stream.end()


def test_muon_refuses_unknown_places_and_mixed_devices():
    matrix = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="state_offload"):
        Muon([matrix], state_offload="disk")
    with pytest.raises(ValueError, match="one device"):
        Muon([matrix, torch.nn.Parameter(torch.zeros(4, 4, device="meta"))], state_offload="cpu")
    with pytest.raises(ValueError, match="updates on meta of parameters elsewhere need state_offload"):
        Muon([matrix], device=torch.device("meta"))
