"""A run continues on another mesh with equal bits and equal losses.

The short form of changed_meshes.py, which says how to start the long one.
"""

import pytest

from tests.ranks.changed_meshes import MESHES, SHORT_PAIRS


def test_every_mesh_loads_what_another_one_saved():
    pairs = [pair.split("-to-") for pair in SHORT_PAIRS]
    assert sorted(name for _, name in pairs) == sorted(MESHES)
    assert len({saved for saved, _ in pairs}) == 3
    assert [pair for pair in pairs if pair[0] == pair[1]] == []


@pytest.mark.parametrize("case", SHORT_PAIRS)
def test_a_run_continues_on_another_mesh(case_row, case):
    row = case_row("changed_meshes.main", case=case)
    assert row["different"] == []
    assert row["states"] > 200  # of the optimizer: those of an empty one would be equal too
    # FP32 sums in another order.
    assert len(row["loss errors"]) == 2 and max(row["loss errors"]) < 1e-6
