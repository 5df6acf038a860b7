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


def quantized(rows):
    return Quantized(torch.arange(rows * 10, dtype=torch.uint8).view(rows, 10), torch.ones(rows, 1), True)


def test_items_come_in_order_and_go_back_where_they_were():
    whole = torch.arange(48.0).view(2, 6, 4)
    # The second item is scattered over two matrices, as the up rows of fused experts are.
    items = [[whole[:, :3]], [whole[:, 3:], torch.zeros(0, 4)], [torch.ones(5)], [torch.ones(7), quantized(3)]]
    expected = whole + 1.0
    stream = StateStream(items, CPU, "cpu")
    for _ in range(2):
        stream.begin()
        for item in items:
            with stream.take() as states:
                for state, host in zip(states, item, strict=True):
                    if isinstance(state, Quantized):
                        assert torch.equal(state.codes, host.codes) and state.signed == host.signed
                        state.scales.add_(1.0)
                    else:
                        assert torch.equal(state, host) and state.is_contiguous()
                        assert not state.numel() or state.data_ptr() != host.data_ptr()
                        state.add_(1.0)
        stream.end()
    assert torch.equal(whole, expected + 1.0)
    assert torch.equal(items[2][0], torch.full((5,), 3.0))
    assert torch.equal(items[3][1].scales, torch.full((3, 1), 3.0))


@pytest.mark.parametrize("seconds", [0.0, 0.01], ids=["disk", "slow disk"])
def test_a_file_gives_every_item_back_as_it_was_left(tmp_path, monkeypatch, seconds):
    """Eleven items through three slots, read ahead and written behind; some are scattered over rows of a matrix."""
    if seconds:
        read, write = StateRing._read, StateRing._write
        monkeypatch.setattr(StateRing, "_read", lambda *a: (time.sleep(seconds), read(*a)))
        monkeypatch.setattr(StateRing, "_write", lambda *a: (time.sleep(seconds), write(*a)))
    file = StateFile(tmp_path)
    whole = [file.zeros(torch.Size((4, 6, 5)), torch.float32, torch.zeros(0)) for _ in range(5)]
    for number, state in enumerate(whole):
        state.copy_(torch.arange(120.0).view(4, 6, 5) + 1000 * number)
    items = [part for state in whole for part in ([state[:2, :3]], [state[:2, 3:], state[2:]])]
    codes = file.zeros(torch.Size((3, 10)), torch.uint8, torch.zeros(0))
    items.append([Quantized(codes, file.zeros(torch.Size((3, 1)), torch.float32, torch.zeros(0)), True)])
    expected = [state.clone() for state in whole]
    stream = StateStream(items, CPU, file)
    for step in range(3):
        stream.begin()
        for item in items:
            with stream.take() as states:
                for state, kept in zip(states, item, strict=True):
                    if isinstance(state, Quantized):
                        assert (state.codes == step).all()
                        state.codes.add_(1)
                    else:
                        assert torch.equal(state, kept)
                        state.mul_(2.0).add_(1.0)
        stream.end()
        expected = [2.0 * state + 1.0 for state in expected]
        assert all(torch.equal(*pair) for pair in zip(whole, expected, strict=True)) and (codes == step + 1).all()
    assert not list(tmp_path.iterdir())  # the file has no name


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
