"""Muon on every mesh equals one process, moves the bytes it plans and no more, and resumes on another mesh."""

import pytest

from tests.ranks.muon_meshes import case_names

# The specification's bound. Most cases give 0.0: the same kernels see the same matrices; where many matrices share a
# stack, a batched product may sum in another order.
EXACT = 1e-6


@pytest.fixture(scope="module")
def printed() -> dict[int, list[dict]]:
    """Rows by world size: the program runs once for each, in whatever order the tests come."""
    return {}


@pytest.fixture(params=[2, 4])
def figures(server, request, printed) -> list[dict]:
    """The rows that the program prints for a world size."""
    if request.param not in printed:
        printed[request.param] = server.rows("muon_meshes.main", ranks=request.param)
    assert len(printed[request.param]) == {2: 10, 4: 26}[request.param]
    return printed[request.param]


BY_CASE = pytest.mark.parametrize(
    ("figures", "case"),
    [pytest.param(world, name, id=f"{world}ranks-{name}") for world in (2, 4) for name in case_names(world)],
    indirect=["figures"],
)


def row_of(figures: list[dict], case: str) -> dict:
    """The one row of a case."""
    (row,) = (row for row in figures if row.get("case") == case)
    return row


def select(figures: list[dict], key: str) -> list[dict]:
    return [row for row in figures if key in row]


@BY_CASE
def test_a_mesh_equals_one_process(figures, case):
    row = row_of(figures, case)
    assert row["error"] <= EXACT
    assert row["oracle_error"] <= 1e-12  # torch.optim.Muon, in FP64
    assert row["state_placed"]


@BY_CASE
def test_bytes_equal_the_plan_and_the_bound(figures, case):
    row = row_of(figures, case)
    assert row["bytes_equal_plan"] == 1.0
    if row["traffic"] is not None:
        assert row["bytes"] == row["traffic"] * row["matrix_bytes"]
    elif "hsdp" not in case:
        # Each matrix but what its owner holds anyway, there and back.
        assert row["bytes"] == row["bytes_formula"]


@pytest.mark.parametrize("key", ["mixed", "stages"])
def test_many_cases_at_once_equal_one_process(figures, key):
    assert select(figures, key)
    for row in select(figures, key):
        assert row[key] <= EXACT, row


def test_many_buckets_were_in_flight(figures):
    assert select(figures, "mixed")[0]["buckets"] >= 5


def test_offloaded_states_give_the_same_bits(figures):
    plain, offloaded, filed = select(figures, "mixed")[:3]
    assert offloaded["state_offload"] == "cpu" and "StateFile" in filed["state_offload"]
    # The sum over all weights in FP64: equal bits for certain, as any other weight would change it.
    assert offloaded["bits"] == filed["bits"] == plain["bits"]


def test_real_model_under_tensor_parallelism_and_fsdp(figures):
    for row in select(figures, "model"):
        assert row["placements"] == ["_StridedShard", "Shard"]
        # The gradients themselves are summed over ranks in another order.
        assert row["model"] <= 2e-5, row


def test_states_move_between_meshes(figures):
    for row in select(figures, "resume"):
        assert len(row["resume"]) == 9
        assert max(row["resume"].values()) <= EXACT, row


def test_planners_blind_to_strided_shards_are_found_out(figures):
    for row in select(figures, "blind"):
        # One is refused, the other gives wrong numbers: far above EXACT.
        assert "not placement" in row["blind"]["is_shard"], row
        assert row["blind"]["plain"] > 0.1, row
