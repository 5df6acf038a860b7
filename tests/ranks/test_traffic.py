"""Tokens and keys that ranks exchange are those of routing and window; `test_planned_steps.py` has all else."""

import collections
import hashlib
import json
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import Process
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.context import take_part
from glm46.compute.parallelize.plan import parallelize
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.run.plan import resolve_plan
from tests.harness import measure_cases, run_ranks
from tests.ranks.sharded_layouts import loss_of_step

CHANGES = dict(
    num_hidden_layers=3, hidden_size=64, vocab_size=512, intermediate_size=96, moe_intermediate_size=32,
    n_routed_experts=8, num_experts_per_tok=2, num_nextn_predict_layers=1,
)  # fmt: skip
SHAPES = {flavor: PRESETS[flavor].model_copy(update=CHANGES) for flavor in ("debug", "debug-flash")}
ROWS, SEQ_LEN = 4, 32


class Case(NamedTuple):
    """One layout, and whether forward is computed again."""

    replicate: int = 1
    experts_over: int = 1
    context: int = 1
    tensor: int = 1
    checkpointing: str = "none"
    recompute: tuple[str, ...] = ()
    window: int | None = None
    ring: bool = False
    flavor: str = "debug"


RECOMPUTED = [("core_attn",), ("experts",), ("exchange",), ("core_attn", "experts", "exchange")]
CASES = {
    2: [
        Case(context=2, window=5), Case(context=2, window=5, checkpointing="full"),
        Case(context=2, window=5, flavor="debug-flash"),
        *(Case(context=2, checkpointing=mode, flavor="debug-flash") for mode in ("none", "full")),
        *(Case(experts_over=2, checkpointing=mode) for mode in ("none", "selective", "full")),
        *(Case(experts_over=2, checkpointing="selective", recompute=some) for some in RECOMPUTED),
    ],
    4: [
        Case(replicate=2, experts_over=2), Case(experts_over=4), Case(tensor=2, experts_over=4),
        Case(context=2, experts_over=2), Case(context=2, experts_over=2, checkpointing="selective"),
        Case(context=4, ring=True), Case(context=4, ring=True, checkpointing="full"),
    ],
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts collectives and their bytes by name.

    Bytes are those of the larger side: what a rank sends or receives, its own share included.
    """

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = collections.Counter()
        self.bytes: dict[str, int] = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        name = {
            "c10d::_allgather_base_": "all_gather",
            "c10d::_reduce_scatter_base_": "reduce_scatter",
            "c10d::allreduce_": "all_reduce",
            "c10d::alltoall_base_": "all_to_all",
            "c10d::send": "send",
            "_c10d_functional::all_reduce": "all_reduce",
            "_c10d_functional::all_to_all_single": "all_to_all",
        }.get(function.name().split(".")[0])
        if name is not None:
            whole, part = arguments[:2]
            if function.name().startswith("_c10d"):
                part = whole
            elif name in ("all_reduce", "send"):
                part = whole = whole[0]
            self.calls[name] += 1
            # An exchange sends `part` and receives `whole`; of the others one holds the other.
            sent = part if name == "all_to_all" else max(part, whole, key=Tensor.numel)
            self.bytes[name] += sent.numel() * sent.element_size()
        return out


def make_batch() -> dict[str, Tensor]:
    """Rows of two documents and some padding."""
    generator = torch.Generator().manual_seed(0)

    def tokens(*size: int) -> Tensor:
        return torch.randint(0, CHANGES["vocab_size"], size, generator=generator)

    document_ids = torch.tensor([0] * 12 + [1] * 16 + [-1] * 4, dtype=torch.int32).expand(ROWS, SEQ_LEN).contiguous()
    labels = tokens(ROWS, SEQ_LEN).masked_fill(document_ids < 0, -100)
    return {
        "input_ids": tokens(ROWS, SEQ_LEN),
        "positions": torch.tensor([*range(12), *range(16), *range(4)]).expand(ROWS, SEQ_LEN).contiguous(),
        "document_ids": document_ids,
        "labels": labels,
        "mtp_input_ids": tokens(ROWS, 1, SEQ_LEN),
        "mtp_labels": labels.unsqueeze(1),
    }


def measure(process: Process, case: Case) -> dict:
    """Traffic of one forward and backward pass."""
    config = RunConfig.model_validate_json(
        json.dumps(
            {
                "model": {"flavor": case.flavor},
                "training": {"mixed_precision_param": "float32"},
                "activation_checkpoint": {"mode": case.checkpointing, "recompute": case.recompute},
                "parallelism": {
                    "data_parallel_replicate_degree": case.replicate,
                    "expert_parallel_degree": case.experts_over,
                    "context_parallel_degree": case.context,
                    "tensor_parallel_degree": case.tensor,
                },
            }
        )
    )
    with torch.device("meta"):
        model = Transformer(SHAPES[case.flavor])
    plan = resolve_plan(config, process.world_size)
    cluster = build_cluster(plan, process)
    parallelize(model, plan, cluster)
    parameters = dict(model.named_parameters())
    batch = make_batch()
    loss_of = loss_of_step(batch)
    sharers = case.context * case.tensor
    per_reader = ROWS * sharers // process.world_size
    rows = slice(process.rank // sharers * per_reader, (process.rank // sharers + 1) * per_reader)
    batch = {name: tensor[rows] for name, tensor in batch.items()}
    document_ids = batch.pop("document_ids")
    rows = batch | {"is_real": document_ids >= 0}
    batch = take_part(rows, document_ids, case.window, cluster.meshes.sequence, ring=case.ring)
    exchange = getattr(batch.get("layout"), "exchange", None)
    with Traffic() as traffic:
        sums = model(**batch, options=RoutingOptions(balance_loss=True, z_loss=True))
        loss_of(sums).backward()
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        digest.update(name.encode() + whole.numpy().tobytes())
    all_bytes, all_keys = [None] * process.world_size, [None] * process.world_size
    dist.all_gather_object(all_bytes, dict(traffic.bytes))
    dist.all_gather_object(all_keys, sum(getattr(exchange, "send", [])))
    tokens_per_expert = sums.tokens_per_expert.clone()
    dist.all_reduce(tokens_per_expert)
    return {
        "case": case._asdict(),
        "shape": CHANGES,
        "rows": ROWS,
        "seq_len": SEQ_LEN,
        "real_tokens": int((make_batch()["document_ids"][0] >= 0).sum()),
        "calls": dict(traffic.calls),
        "bytes": all_bytes,
        "keys_sent": all_keys,
        "gradients": digest.hexdigest(),
        "assignments": tokens_per_expert.sum(1).tolist(),
    }


FP32, INT64 = 4, 8


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def figures(request) -> list[dict]:
    """The row of each case of a world size."""
    return [
        row | {"ranks": request.param}
        for row in run_ranks(measure_cases, request.param, measure, CASES[request.param])[0]
    ]


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
