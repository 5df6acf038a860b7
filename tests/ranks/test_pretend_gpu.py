"""What a GPU refuses, and what makes a host wait for one, on a device without hardware."""

import pytest

from tests.ranks.server import differences
from tests.ranks.test_sharded_layouts import BOUNDS

LAYOUTS = [
    (2, "tp2-ep2"), (2, "cp2-selective_ac-ring"), (2, "pp2-DualPipeV-micro4-offload"),
    (4, "cp2-ep4-experts12-full_ac-routes-hosts_of_2"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "case"), LAYOUTS)
def test_a_layout_with_its_tensors_on_a_device_equals_one_process(case_row, ranks, case):
    """No operator mixes tensors of the device with others; attention is the form for devices other than the CPU."""
    row = case_row("pretend_layouts.main", ranks, case=case)
    assert not row["initial_weights_different"]
    assert not row["steps_of_different_counts"]
    assert differences(row, BOUNDS) == []


def test_the_host_waits_once_per_step_and_once_per_layer_with_distributed_experts(server):
    """In BF16 with the flash kernel's operands. The layout with distributed experts has five such layers and two
    micro-batches."""
    one, distributed = server.rows("pretend_step.main")
    assert [*one["waits"].values()] == [1], one
    assert sorted(distributed["waits"].values()) == [1, 10], distributed
    for row in (one, distributed):
        assert len(row["waits_of_a_save"]) == 1, row
