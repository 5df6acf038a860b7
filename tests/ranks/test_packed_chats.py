"""Packing does not leak: loss and gradients of packed rows of chats are sums over documents, on every axis."""

import pytest

from tests.ranks.packed_chats import LAYOUTS
from tests.ranks.server import differences


@pytest.mark.parametrize(("ranks", "case"), [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts])
def test_packed_rows_equal_their_documents_alone(case_row, ranks, case):
    row = case_row("packed_chats.main", ranks, case=case)
    assert row["targets_equal"]
    assert differences(row, {"loss_error": 1e-6, "gradient_error": 1e-5}) == []
