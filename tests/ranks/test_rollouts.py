"""Samples and their log-probabilities are the same on every layout, and those of the trainer."""

# FP32, logits of order 1 in sums of another order; log-probabilities are about -6.
BOUND = 1e-5


def test_every_layout_draws_what_one_rank_draws_with_the_trainers_logprobs(server):
    rows = server.rows("rollouts.main")
    alone = {row["name"].split(" ", 1)[1]: row for row in rows if row["name"].startswith("1 ")}
    assert len(rows) == 20 and len(alone) == 6
    for row in rows:
        assert row["error"] < BOUND, row["name"]
        # Tensor, expert and pipeline parallel groups, fewer rows and drafts of the prediction layers change nothing.
        assert row["engines_agree"] == row["routes_agree"] == [True, True], row["name"]
        kind = next((key for key in ("dora", "lora") if key in row["name"]), "")
        kinds = [kind, "experts12-keys1" if "keys1" in row["name"] else "", "latent" if "latent" in row["name"] else ""]
        wanted = alone["-".join(filter(None, ["fsdp", *kinds]))]
        assert row["generated"] == wanted["generated"], row["name"]
        assert all(len(experts[0]) == 4 and len(experts[0][0]) == 2 for experts in row["generated"][0]["experts"])
        assert row["generated"][0] != row["generated"][1]
        # Sums of an adapter and its base in FP32, of weights of order 1.
        assert ("merged_error" in row) == bool(kind in ("lora", "dora")) and row.get("merged_error", 0.0) < 1e-6
        # The same experts as the engine's; other selection biases change the choice, and nothing with given experts.
        (same, other), (moved, unrouted) = row["replayed"]["shares"], row["replayed"]["moved"]
        assert same == 0.0 and other > 0.2 and moved < BOUND < unrouted, (row["name"], row["replayed"])
        assert row["fp8_fault"] == "", row["name"]
        finishes = row["generated"][0]["finishes"]
        assert {"stop", "length"} == set(finishes), finishes
    held = {row["name"]: row["held"] for row in rows}
    assert held["1 fsdp"][0] == [16, 24, [1, 1, 1], 0], "nothing is copied"
    assert held["2 fsdp"][0][-1] > 0 and held["4 fsdp-experts12-keys1"][1][2] == [2, 4, 1]
