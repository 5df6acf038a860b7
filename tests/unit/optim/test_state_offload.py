"""States in host memory: what a slot holds while it is worked on, and that every item comes back whole."""

import pytest
import torch

from glm46.optim.compact_state import Quantized
from glm46.optim.muon import Muon
from glm46.optim.state_offload import SLOTS, StateStream

CPU = torch.device("cpu")


def quantized(rows):
    return Quantized(torch.arange(rows * 10, dtype=torch.uint8).view(rows, 10), torch.ones(rows, 1), True)


def test_items_come_in_order_and_go_back_where_they_were():
    whole = torch.arange(48.0).view(2, 6, 4)
    # The second item is scattered over two matrices, as the up rows of fused experts are.
    items = [[whole[:, :3]], [whole[:, 3:], torch.zeros(0, 4)], [torch.ones(5)], [torch.ones(7), quantized(3)]]
    expected = whole + 1.0
    stream = StateStream(items, CPU, is_offloaded=True)
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


def test_device_memory_is_a_few_slots_of_the_largest_item():
    items = [[torch.zeros(1000)] for _ in range(50)]
    stream = StateStream(items, CPU, is_offloaded=True)
    stream.begin()
    seen = set()
    for _ in items:
        with stream.take() as states:
            seen.add(states[0].data_ptr())
    stream.end()
    assert len(seen) == SLOTS


def test_states_that_stay_are_not_copied():
    items = [[torch.zeros(3)], [torch.zeros(4)]]
    stream = StateStream(items, CPU, is_offloaded=False)
    stream.begin()
    for item in items:
        with stream.take() as states:
            assert states[0] is item[0]
    stream.end()


def test_step_that_leaves_an_item_out_is_a_fault_of_ours():
    stream = StateStream([[torch.zeros(3)]], CPU, is_offloaded=True)
    stream.begin()
    with pytest.raises(AssertionError, match="every item"):
        stream.end()


def test_muon_refuses_unknown_places_and_mixed_devices():
    matrix = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="state_offload"):
        Muon([matrix], state_offload="disk")
    with pytest.raises(ValueError, match="one device"):
        Muon([matrix, torch.nn.Parameter(torch.zeros(4, 4, device="meta"))], state_offload="cpu")
