"""Adapters in FP32 on a base in BF16: they begin as their base to the bit, and only they are reduced."""

import pytest

from tests.ranks.adapters_bf16 import LAYOUTS

FP32, MICRO_BATCHES = 4, 2


@pytest.fixture(scope="module")
def figures(server):
    return {row.pop("layout"): row for row in server.rows("adapters_bf16.main")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_adapters_change_no_bit_of_the_loss(figures, layout):
    """In BF16 and in FP32, on both ranks."""
    assert figures[layout]["equal"] == [[True, True], [True, True]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_fp32_but_for_the_rounding_of_the_base(figures, layout):
    row = figures[layout]
    assert row["types"] == ["torch.float32"] and row["frozen_types"] == ["torch.bfloat16"]
    assert 1e-3 < row["distance"] < 0.1  # some tokens go to another expert than in FP32


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "tensor" not in name])
def test_only_adapters_are_reduced(figures, layout):
    """In each micro-batch; those of experts that a rank holds whole are not."""
    row = figures[layout]
    assert row["reduce_scatter"] == MICRO_BATCHES * FP32 * row["padded_adapters"]
    assert 0 < row["padded_adapters"] < row["base"]
