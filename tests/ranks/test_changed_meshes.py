"""The short form of changed_meshes.py, which says how to start the long one."""


def test_a_run_goes_on_on_another_mesh_with_equal_bits_and_equal_losses(server):
    saving = ["FSDP", "TP and EP", "PP and TP"]
    rows = server.rows("changed_meshes.main", *saving, seconds=400)
    assert len({(row["saved on"], row["went on with"]) for row in rows}) == 12
    assert {row["saved on"] for row in rows} == set(saving)
    for row in rows:
        assert row["saved on"] != row["went on with"]
        assert row["different"] == [] and row["states"] > 200, row
        assert len(row["loss errors"]) == 2 and max(row["loss errors"]) < 1e-6, row  # FP32 sums in another order
