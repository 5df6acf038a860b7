"""Tokens and keys that ranks exchange are those of routing and window; `test_planned_steps.py` has all else."""

import pytest

from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS

FP32, INT64 = 4, 8


@pytest.fixture(scope="module", params=[2, 4])
def figures(server, request) -> list[dict]:
    """What each case of a world size prints."""
    return [row | {"ranks": request.param} for row in server.rows("traffic.main", ranks=request.param)]


def layers_of(row: dict) -> tuple[ModelShape, int, int]:
    """The shape of a case, and how many layers it has, and how many with experts."""
    shape = PRESETS[row["case"]["flavor"]].model_copy(update=row["shape"])
    layers = shape.num_hidden_layers + shape.num_nextn_predict_layers
    return shape, layers, layers - shape.first_k_dense_replace


def test_under_a_window_keys_travel_that_are_seen(figures):
    """Of keys and values, forward and backward; fewer than all."""
    windowed = [row for row in figures if row["case"]["window"]]
    assert windowed or figures[0]["ranks"] == 4
    for row in windowed:
        (shape, layers, _), forwards = layers_of(row), 1 if row["case"]["checkpointing"] == "none" else 2
        exchanges = (1 if shape.is_latent else 2) * layers * (forwards + 1)
        assert row["calls"]["all_to_all"] == exchanges
        key = (shape.latent_width or shape.num_key_value_heads * shape.head_dim) * FP32
        assert sum(rank["all_to_all"] for rank in row["bytes"]) == exchanges * sum(row["keys_sent"]) * key
        assert sum(row["keys_sent"]) < row["rows"] * row["seq_len"] * row["ranks"]


def test_tokens_travel_exactly_as_routing_requires(figures):
    """Every assignment goes to its expert and back, forward and backward, with its weight; padding stays at home."""
    for row in figures:
        (shape, _, moe_layers), case = layers_of(row), row["case"]
        if case["window"]:
            continue
        exchanged = sum(rank.get("all_to_all", 0) for rank in row["bytes"])
        if case["experts_over"] == 1:
            assert exchanged == 0
            continue
        real_tokens = row["rows"] * row["real_tokens"]
        assert row["assignments"] == [real_tokens * shape.num_experts_per_tok] * moe_layers
        routed, width = sum(row["assignments"]), shape.hidden_size * FP32
        sizes = row["ranks"] * moe_layers * shape.n_routed_experts * INT64
        again = routed * (width + FP32) + row["assignments"][-1] * width
        repeated = again if case["checkpointing"] == "full" else 0
        if "exchange" in case["recompute"]:  # not what a norm of a prediction layer reads
            repeated = routed * (width + FP32)
        assert exchanged == routed * (4 * width + 2 * FP32) + sizes + repeated, case


def test_selective_checkpointing_repeats_no_exchange_and_changes_no_bit(figures):
    kinds = {}
    for row in figures:
        case = dict(row["case"])
        kind = case.pop("checkpointing"), *case.pop("recompute")
        kinds.setdefault((*case.values(), row["ranks"]), {})[kind] = row
    compared = [modes for modes in kinds.values() if len(modes) > 1]
    assert compared
    for modes in compared:
        none = modes.pop(("none",))
        for (mode, *recomputed), row in modes.items():
            assert row["gradients"] == none["gradients"], row["case"]
            assert row["assignments"] == none["assignments"]
            if row["case"]["experts_over"] == 1:
                continue
            more = row["calls"]["all_to_all"] - none["calls"]["all_to_all"]
            layers = len(row["assignments"])
            # full: rows and weights of every layer; the way back only where a norm follows, in the MTP layer.
            of_selective = 2 * layers if "exchange" in recomputed else 0
            assert more == (of_selective if mode == "selective" else 2 * layers + 1), row["case"]
