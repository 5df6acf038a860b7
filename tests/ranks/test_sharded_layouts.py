"""Every layout, with every pipeline schedule, computes what one process does: loss, gradients, counts, steps."""

import pytest
import torch
from torch.torch_version import TorchVersion

from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.planner.requirement import SPLIT_BACKWARD_TORCH
from tests.ranks.server import differences
from tests.ranks.sharded_layouts import LAYOUTS, Layout

SPLIT_BACKWARD = pytest.mark.skipif(
    TorchVersion(torch.__version__) < SPLIT_BACKWARD_TORCH, reason="the launcher refuses this schedule on this torch"
)
BOUNDS = {
    # FP32 sums in another order: some units of 2**-24 over sums of some hundred terms.
    "loss_error": 1e-6,
    "norm_error": 1e-6,
    "gradient_error": 1e-5,
    "token_error": 1e-6,
    "token_gradient_error": 1e-5,
    # AdamW's first steps divide a gradient by its own size, which amplifies rounding where a gradient is tiny.
    "update_error": 1e-3,
    # Of the weights themselves, without biases: these start at zero and are nothing but their update.
    "weight_error": 1e-5,
}


def test_no_two_layouts_have_one_name():
    assert {ranks: len(layouts) for ranks, layouts in LAYOUTS.items()} == {1: 5, 2: 37, 4: 33, 8: 10}


def layout_case(ranks: int, name: str, layout: Layout):
    marks = [SPLIT_BACKWARD] if layout.pipeline > 1 and PIPELINE_SCHEDULES[layout.schedule].splits_backward else []
    return pytest.param(ranks, name, id=f"{ranks}ranks-{name}", marks=marks)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [layout_case(ranks, *row) for ranks, layouts in LAYOUTS.items() for row in layouts.items()],
)
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row("sharded_layouts.main", ranks, case=case, seconds=900)
    assert not row["initial_weights_different"]
    assert not row["steps_of_different_counts"]  # tokens per expert
    assert differences(row, BOUNDS) == []
