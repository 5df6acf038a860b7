"""An output head split over ranks gives what a whole one gives, in both forms: values, predictions, gradients."""

import pytest


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_head_equals_a_whole_one(server, ranks):
    rows = server.rows("vocabulary.main", ranks=ranks)
    assert len(rows) == 2 * 5 * 3
    for row in rows:
        assert row["predictions_equal"], row
        # The same logits on both sides: what differs is the order of FP32 sums. Between the ranks, the gradient of
        # hidden states is a sum of BF16 numbers, each rounded by 2**-8 of itself.
        assert row["value_error"] < 1e-6, row
        assert row["gradient_error"] < (2e-6 if row["dtype"] == "torch.float32" else 1e-2), row
