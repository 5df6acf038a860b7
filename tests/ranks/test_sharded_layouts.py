"""Every layout, with every pipeline schedule, computes what one process does: loss, gradients, counts, steps."""

import pytest


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_layout_equals_one_process(server, ranks):
    figures = server.rows("sharded_layouts.main", ranks, seconds=900)
    assert len(figures) == {1: 4, 2: 28, 4: 27, 8: 10}[ranks]
    for row in figures:
        assert row["initial_weights_equal"], row
        assert row["counts_equal"], row
        # FP32 sums in another order: some units of 2**-24 over sums of some hundred terms.
        assert row["loss_error"] < 1e-6, row
        assert row["norm_error"] < 1e-6, row
        assert row["gradient_error"][0] < 1e-5, row
        assert row["token_error"] < 1e-6, row
        assert row["token_gradient_error"][0] < 1e-5, row
        # AdamW's first steps divide a gradient by its own size, which amplifies rounding where a gradient is tiny.
        assert row["update_error"][0] < 1e-3, row
        # Of the weights themselves; biases start at zero, so that they are nothing but their update.
        assert row["weight_error"][0] < 1e-5, row
