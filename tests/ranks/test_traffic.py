"""What each layout sends is what docs/parallelism.md says, call by call and byte by byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm46.config.presets import PRESETS
from glm46.model.transformer import Transformer

SCRIPT = Path(__file__).with_name("traffic.py")
FP32, INT32, INT64 = 4, 4, 8


@pytest.fixture(scope="module", params=[2, 4])
def figures(request) -> list[dict]:
    """What each case of a world size prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    root = SCRIPT.parents[2]
    done = subprocess.run(
        [*command, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) | {"ranks": request.param} for line in done.stdout.splitlines() if line.startswith("{")]


class Sizes:
    """Parameters of the model by FSDP unit, from its real shapes."""

    def __init__(self, shape: dict):
        self.shape = PRESETS["debug"].model_copy(update=shape)
        with torch.device("meta"):
            named = dict(Transformer(self.shape).named_parameters())
        experts = {name for name in named if ".mlp.experts." in name}
        layers = {name for name in named if name.startswith(("layers.", "mtp."))}
        self.experts = sum(named[name].numel() for name in experts)
        self.layers = sum(named[name].numel() for name in layers - experts)
        self.root = sum(named[name].numel() for name in named.keys() - layers)
        self.num_layers = self.shape.num_hidden_layers + self.shape.num_nextn_predict_layers
        self.num_moe = self.num_layers - self.shape.first_k_dense_replace


def expected(row: dict, size: Sizes) -> tuple[dict, dict]:
    """Calls and bytes per rank of all but the exchange of tokens; the table of docs/parallelism.md."""
    case, shape = row["case"], size.shape
    shards = row["ranks"] // case["replicate"]
    expert_shards = shards // case["experts_over"]
    calls, sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0), {}
    sent = dict(calls)
    own_unit = case["experts_over"] > 1
    # (units in layers, their parameters, parameters of the root, shards)
    dense = (size.num_layers, size.layers + (0 if own_unit else size.experts), size.root, shards)
    experts = (size.num_moe, size.experts // case["experts_over"], 0, expert_shards)
    for units, parameters, root, over in (dense, experts) if own_unit else (dense,):
        if over > 1:
            calls["all_gather"] += 2 * units + bool(root)
            sent["all_gather"] += (2 * parameters + root) * FP32
            calls["reduce_scatter"] += units + bool(root)
            sent["reduce_scatter"] += (parameters + root) * FP32
        if case["replicate"] > 1:
            calls["all_reduce"] += units + bool(root)
            sent["all_reduce"] += (parameters + root) // over * FP32
    if case["context"] > 1:
        rows = row["rows"] * case["context"] // row["ranks"]
        forwards = 1 if case["checkpointing"] == "none" else 2
        keys = shape.num_key_value_heads * shape.head_dim * rows * row["seq_len"] * FP32
        calls["all_gather"] += 2 * size.num_layers * forwards + 1
        sent["all_gather"] += 2 * size.num_layers * forwards * keys + rows * row["seq_len"] * 2 * INT32
        calls["reduce_scatter"] += 2 * size.num_layers
        sent["reduce_scatter"] += 2 * size.num_layers * keys
        sums = size.num_moe * (forwards + 1)
        calls["all_reduce"] += sums
        sent["all_reduce"] += sums * rows * (2 * shape.n_routed_experts + 1) * FP32
    return calls, sent


def test_collectives_and_bytes_are_those_of_the_table(figures):
    for row in figures:
        calls, sent = expected(row, Sizes(row["shape"]))
        for name in calls:
            assert row["calls"].get(name, 0) == calls[name], (name, row["case"])
            assert {rank.get(name, 0) for rank in row["bytes"]} == {sent[name]}, (name, row["case"])


def test_tokens_travel_exactly_as_routing_requires(figures):
    """Every assignment goes to its expert and back, forward and backward, with its weight; padding stays at home."""
    for row in figures:
        size, case = Sizes(row["shape"]), row["case"]
        exchanged = sum(rank.get("all_to_all", 0) for rank in row["bytes"])
        if case["experts_over"] == 1:
            assert exchanged == 0
            continue
        real_tokens = row["rows"] * row["real_tokens"]
        assert row["assignments"] == [real_tokens * size.shape.num_experts_per_tok] * size.num_moe
        routed, width = sum(row["assignments"]), size.shape.hidden_size * FP32
        sizes = row["ranks"] * size.num_moe * size.shape.n_routed_experts * INT64
        again = routed * (width + FP32) + sizes + row["assignments"][-1] * width
        repeated = again if case["checkpointing"] == "full" else 0
        assert exchanged == routed * (4 * width + 2 * FP32) + sizes + repeated, case


def test_selective_checkpointing_repeats_no_exchange_and_changes_no_bit(figures):
    kinds = {}
    for row in figures:
        layout = tuple(v for k, v in row["case"].items() if k != "checkpointing") + (row["ranks"],)
        kinds.setdefault(layout, {})[row["case"]["checkpointing"]] = row
    compared = [modes for modes in kinds.values() if len(modes) > 1]
    assert compared
    for modes in compared:
        none = modes.pop("none")
        for mode, row in modes.items():
            assert row["gradients"] == none["gradients"], row["case"]
            assert row["assignments"] == none["assignments"]
            more = row["calls"]["all_to_all"] - none["calls"]["all_to_all"]
            layers = len(row["assignments"])
            # full: sizes, rows and weights of every layer; the way back only where a norm follows, in the MTP layer.
            assert more == (0 if mode == "selective" else 3 * layers + 1), row["case"]
