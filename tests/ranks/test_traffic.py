"""What each layout sends is what docs/nccl.md says, call by call and byte by byte."""

import re

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.presets import PRESETS

FP32, FP64, INT64 = 4, 8, 8


@pytest.fixture(scope="module", params=[2, 4])
def figures(server, request) -> list[dict]:
    """What each case of a world size prints."""
    return [row | {"ranks": request.param} for row in server.rows("traffic.main", ranks=request.param)]


class Sizes:
    """Parameters of the model by FSDP unit, from its real shapes."""

    def __init__(self, row: dict, tensor: int):
        self.shape = PRESETS[row["case"]["flavor"]].model_copy(update=row["shape"])
        with torch.device("meta"):
            named = dict(Transformer(self.shape).named_parameters())
        experts = {name for name in named if ".mlp.experts." in name}
        # Norms, routers, projections to latents and what joins a prediction layer's inputs are whole on the ranks of
        # tensor parallelism.
        whole = re.compile("norm|router|eh_proj|q_a_proj|kv_a_proj")
        self.whole = [p.numel() for name, p in named.items() if whole.search(name)]
        layers = {name for name in named if name.startswith(("layers.", "mtp."))}
        self.experts = sum(named[name].numel() for name in experts)
        of_layers = sum(named[name].numel() for name in layers - experts)
        of_root = sum(named[name].numel() for name in named.keys() - layers)
        root_norm = named["norm.weight"].numel()
        self.layers = (of_layers - sum(self.whole) + root_norm) // tensor + sum(self.whole) - root_norm
        self.root = (of_root - root_norm) // tensor + root_norm
        self.num_layers = self.shape.num_hidden_layers + self.shape.num_nextn_predict_layers
        self.num_moe = self.num_layers - self.shape.first_k_dense_replace
        self.num_heads = 1 + self.shape.num_nextn_predict_layers


class Expected:
    """Calls and bytes per rank of all but the exchange of tokens; the table of docs/nccl.md."""

    def __init__(self, row: dict, size: Sizes):
        self.calls = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "send"), 0)
        self.bytes = dict(self.calls)
        self._row, self._size, self._case = row, size, row["case"]
        self._rows = row["rows"] * self._case["context"] * self._case["tensor"] // row["ranks"]
        self._forwards = 1 if self._case["checkpointing"] == "none" else 2
        self._shards()
        if self._case["context"] > 1:
            self._context()
        if self._case["tensor"] > 1:
            self._tensor()

    def _add(self, name: str, calls: int, sent: int) -> None:
        """So many calls of so many bytes in all."""
        self.calls[name] += calls
        self.bytes[name] += sent

    def _shards(self) -> None:
        case, size = self._case, self._size
        shards = self._row["ranks"] // case["replicate"] // case["tensor"]
        own_unit = case["experts_over"] * case["tensor"] > 1
        expert_shards = shards * case["tensor"] // case["experts_over"]
        # (units in layers, their parameters, parameters of the root, shards)
        dense = (size.num_layers, size.layers + (0 if own_unit else size.experts), size.root, shards)
        experts = (size.num_moe, size.experts // case["experts_over"], 0, expert_shards)
        for units, parameters, root, over in (dense, experts) if own_unit else (dense,):
            if over > 1:
                self._add("all_gather", 2 * units + bool(root), (2 * parameters + root) * FP32)
                self._add("reduce_scatter", units + bool(root), (parameters + root) * FP32)
            if case["replicate"] > 1:
                self._add("all_reduce", units + bool(root), (parameters + root) // over * FP32)

    def _context(self) -> None:
        size, tokens = self._size, self._rows * self._row["seq_len"]
        # Keys and values, whose heads tensor parallelism has split, or one row for all heads.
        of_token = size.shape.num_key_value_heads // self._case["tensor"] * size.shape.head_dim
        keys, sent = (size.shape.latent_width or of_token) * tokens * FP32, 1 if size.shape.is_latent else 2
        if self._case["ring"]:
            ranks = self._case["context"]
            sends = size.num_layers * ((ranks - 1) * (self._forwards + 1) + ranks)
            self._add("send", sends, sends * 2 * keys // ranks)
        elif self._case["window"] is None:
            gathers = sent * size.num_layers
            self._add("all_gather", gathers * self._forwards, gathers * self._forwards * keys)
            self._add("reduce_scatter", gathers, gathers * keys)
        self._balance()

    def _tensor(self) -> None:
        size, tokens = self._size, self._rows * self._row["seq_len"] // self._case["context"]
        around = 4 * size.num_layers + 2 * size.num_heads
        for name in ("all_gather", "reduce_scatter"):
            self._add(name, around, around * tokens * size.shape.hidden_size * FP32)
        # Of each token and head what every rank knows: largest logit, prediction, sum, the label's log-probability.
        known = tokens * 4 * FP64 * self._case["tensor"]
        self._add("all_gather", size.num_heads, size.num_heads * known)
        self._add("all_reduce", len(size.whole), sum(size.whole) * FP32)
        self._balance()

    def _balance(self) -> None:
        sums = self._size.num_moe * (self._forwards + 1)
        self._add("all_reduce", sums, sums * self._rows * (2 * self._size.shape.n_routed_experts + 1) * FP32)


def test_collectives_and_bytes_are_those_of_the_table(figures):
    for row in figures:
        expected = Expected(row, Sizes(row, row["case"]["tensor"]))
        for name in expected.calls:
            assert row["calls"].get(name, 0) == expected.calls[name], (name, row["case"])
            assert {rank.get(name, 0) for rank in row["bytes"]} == {expected.bytes[name]}, (name, row["case"])


def test_under_a_window_keys_travel_that_are_seen(figures):
    """Of keys and values, forward and backward; fewer than all."""
    windowed = [row for row in figures if row["case"]["window"]]
    assert windowed or figures[0]["ranks"] == 4
    for row in windowed:
        size, forwards = Sizes(row, 1), 1 if row["case"]["checkpointing"] == "none" else 2
        exchanges = (1 if size.shape.is_latent else 2) * size.num_layers * (forwards + 1)
        assert row["calls"]["all_to_all"] == exchanges
        key = (size.shape.latent_width or size.shape.num_key_value_heads * size.shape.head_dim) * FP32
        assert sum(rank["all_to_all"] for rank in row["bytes"]) == exchanges * sum(row["keys_sent"]) * key
        assert sum(row["keys_sent"]) < row["rows"] * row["seq_len"] * row["ranks"]


def test_tokens_travel_exactly_as_routing_requires(figures):
    """Every assignment goes to its expert and back, forward and backward, with its weight; padding stays at home."""
    for row in figures:
        size, case = Sizes(row, 1), row["case"]
        if case["window"]:
            continue
        exchanged = sum(rank.get("all_to_all", 0) for rank in row["bytes"])
        if case["experts_over"] == 1:
            assert exchanged == 0
            continue
        real_tokens = row["rows"] * row["real_tokens"]
        assert row["assignments"] == [real_tokens * size.shape.num_experts_per_tok] * size.num_moe
        routed, width = sum(row["assignments"]), size.shape.hidden_size * FP32
        sizes = row["ranks"] * size.num_moe * size.shape.n_routed_experts * INT64
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
