"""Tokens that travel once to each host and there once to each rank give the gradients of one process, and those of the
all-to-all bit for bit, with the bytes that the routing requires.

Tokens that DeepEP sends give the result and gradients of the all-to-all, by calls that keep its contract: those of a
fake, which is strict. No GPU has run it.
"""

import collections
import contextlib
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from glm46 import compat
from glm46.compute.distributed.groups import group_of_partition
from glm46.compute.distributed.process import Process
from glm46.compute.model.dispatch import TokenDispatcher
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.parallelize import activation_checkpoint
from glm46.compute.parallelize.deepep import DeepEPDispatcher
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from glm46.compute.parallelize.two_level import TwoLevelDispatcher
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.plan_sizes import rows_of_hops
from glm46.run.plan import resolve_plan
from tests.builders import model_table
from tests.harness import measure_cases, run_ranks
from tests.ranks.fake_deep_ep import ElasticBuffer

EXPERTS, CHOSEN, WIDTH, TOKENS = 32, 8, 64, 96
CHANGES = dict(n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, hidden_size=WIDTH, moe_intermediate_size=32)
SHAPE = PRESETS["debug"].model_copy(update=CHANGES)


class Case(NamedTuple):
    """One division of the ranks into hosts, and what is special."""

    hosts: int
    of_host: int
    dtype: str = "float32"
    capacity: float | None = None
    favourites: int = 0
    """Experts that all tokens choose first; with 8 of them some ranks get nothing."""
    silent: bool = False
    """Every third rank has no real token, the one after it half of them."""
    multiple: int = 1
    checkpointing: str = "none"
    router: str = "choice"
    chunks: int = 1
    way: str = "two_level"


CASES = {
    4: [
        Case(2, 2), Case(4, 1), Case(1, 4), Case(2, 2, capacity=1.5), Case(2, 2, favourites=8, silent=True),
        Case(2, 2, dtype="bfloat16"), Case(1, 4, dtype="bfloat16"), Case(2, 2, multiple=16),
        Case(2, 2, checkpointing="full"), Case(2, 2, checkpointing="selective"), Case(1, 4, checkpointing="selective"),
        Case(4, 1, checkpointing="full", capacity=0.5), Case(1, 4, multiple=32, favourites=8, silent=True),
        Case(2, 2, router="routes"),
        *(Case(2, 2, checkpointing=mode, chunks=2) for mode in ("none", "selective", "full")),
        *(Case(1, 4, checkpointing=mode, chunks=2) for mode in ("none", "selective", "full")),
        *(Case(1, 4, checkpointing=mode, chunks=2, way="all_to_all") for mode in ("none", "selective", "full")),
        Case(4, 1, chunks=2, checkpointing="selective", capacity=1.5), Case(2, 2, chunks=2, multiple=16),
        Case(2, 2, chunks=2, favourites=8, silent=True, checkpointing="full"), Case(2, 2, chunks=2, router="routes"),
        Case(2, 2, dtype="bfloat16", chunks=2), Case(1, 4, dtype="bfloat16", chunks=2, way="all_to_all"),
    ],
    8: [
        Case(2, 4, chunks=2), Case(4, 2, chunks=2, checkpointing="selective"), Case(1, 8, chunks=2),
        Case(2, 4, chunks=2, checkpointing="full", favourites=8, silent=True),
        Case(2, 4), Case(4, 2), Case(1, 8), Case(2, 4, favourites=8, silent=True), Case(4, 2, dtype="bfloat16")],
}  # fmt: skip


class Links(TorchDispatchMode):
    """Bytes of rows, weights and numbers that this rank sends, by link; how often the host waits for sizes; and the
    order in which rows are sent and awaited and experts compute. A result that selective checkpointing has kept is not
    sent again: the kept operator is counted where it runs."""

    def __init__(self, of_host: int):
        super().__init__()
        self.sent, self.waits, self.order, self._of_host = collections.Counter(), 0, [], of_host
        self._names: dict[int, int] = {}
        self._alive: list[Tensor] = []
        start, wait, cpu, multiply = compat.start_exchange, compat.wait_for_exchange, Tensor.cpu, compat.grouped_mm

        def started(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup, is_kept: bool = True):
            arriving, work = start(rows, receive, send, group, is_kept)
            if not is_kept:
                self._count(rows, send, group, arriving)
            return arriving, work

        def awaited(rows: Tensor, work: dist.Work | None) -> Tensor:
            if (key := rows.untyped_storage()._cdata) in self._names:
                self.order.append(f"wait{self._names.pop(key)}")
            return wait(rows, work)

        def copied(tensor: Tensor) -> Tensor:
            self.waits += 1
            return cpu(tensor)

        def multiplied(*operands: Tensor) -> Tensor:
            self.order += ["experts"] if self.order[-1] != "experts" else []
            return multiply(*operands)

        self.patches = contextlib.ExitStack()
        for owner, name, new in (
            (compat, "start_exchange", started),
            (compat, "wait_for_exchange", awaited),
            (compat, "grouped_mm", multiplied),
            (Tensor, "cpu", copied),
        ):
            self.patches.enter_context(mock.patch.object(owner, name, new))

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        result = operator(*arguments, **(keywords or {}))
        if operator == compat.EXCHANGE_OPERATOR:
            rows, _, send, group = arguments
            self._count(rows, send, _resolve_process_group(group), result)
        return result

    def _count(self, rows: Tensor, send: list[int], group: dist.ProcessGroup, result: Tensor) -> None:
        me, width = dist.get_rank(), rows[:1].numel() * rows.element_size() if len(rows) else 0
        for rank, count in zip(dist.get_process_group_ranks(group), send, strict=True):
            link = "self" if rank == me else "host" if rank // self._of_host == me // self._of_host else "network"
            self.sent[link] += count * width
        if rows.shape[1:].numel() == WIDTH:
            number = sum(step.startswith("send") for step in self.order)
            self._names[result.untyped_storage()._cdata] = number
            self._alive.append(result)
            self.order.append(f"send{number}")


def expected_bytes(weights: Tensor, experts: Tensor, case: Case, width: int, is_two_level: bool) -> dict[str, int]:
    """Of all ranks: what rows with their weights and experts are, forward and backward, from the routing alone.

    Args:
        weights: [ranks, T, A], 0 for dropped assignments; ``experts`` alike.
    """
    ranks, of_host = case.hosts * case.of_host, case.of_host
    rows: dict[str, int] = collections.Counter()
    for source in range(ranks):
        for chosen in experts[source].masked_fill(weights[source] <= 0, EXPERTS):
            targets = [int(e) // (EXPERTS // ranks) for e in chosen if e < EXPERTS]
            if not is_two_level:
                hops = [(source, target) for target in targets]
            else:
                there = {target // of_host * of_host + source % of_host for target in targets}
                hops = [(source, first) for first in there] if case.hosts > 1 else []
                if of_host > 1:
                    hops += [(t // of_host * of_host + source % of_host, t) for t in set(targets)]
            for a, b in hops:
                rows["self" if a == b else "host" if a // of_host == b // of_host else "network"] += 1
    # Rows there and back and their gradients; weights with their gradients, and the numbers of experts once. Full
    # recomputation sends there again.
    times, of_each = 1 + (case.checkpointing == "full"), CHOSEN if is_two_level else 1
    of_row = (3 + times) * SHAPE.hidden_size * width + (1 + times) * 4 * of_each + times * 4 * CHOSEN * is_two_level
    return {link: count * of_row for link, count in rows.items()}


def run(moe: MoE, case: Case, x: Tensor, up: Tensor, is_real: Tensor, routes: Tensor | None) -> tuple:
    """Result, gradient of the input and those of the parameters."""
    x = x.clone().requires_grad_()
    options, forward = RoutingOptions(capacity_factor=case.capacity), moe.forward
    if case.checkpointing != "none":
        contexts = partial(activation_checkpoint.recomputation_contexts, case.checkpointing, reads_result=False)
        keywords = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        forward = partial(checkpoint, moe.forward, **keywords)
    y, _ = forward(x, is_real, options, routes)
    y.backward(up)
    return y.detach(), x.grad, {name: p.grad for name, p in moe.named_parameters()}


def split(whole: MoE, dispatcher: TokenDispatcher, rank: int, ranks: int, dtype: torch.dtype) -> MoE:
    """A copy of the layer with this rank's experts."""
    moe = MoE(SHAPE).to(dtype)
    moe.load_state_dict(whole.state_dict())
    for name, p in list(moe.experts.named_parameters()):
        moe.experts.register_parameter(name, nn.Parameter(p.data.chunk(ranks)[rank].clone()))
    moe.dispatcher = dispatcher
    return moe


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


def example(case: Case, ranks: int) -> tuple[MoE, Tensor, Tensor, Tensor, Tensor | list[None]]:
    """The layer of one process; and of each rank rows, gradients of their results, which are real, and routes."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    whole = MoE(SHAPE).to(dtype)
    for p in whole.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    whole.router.e_score_correction_bias[: case.favourites] = 100.0
    xs, ups = torch.randn(2, ranks, 1, TOKENS, WIDTH, generator=generator).to(dtype)
    share = torch.arange(ranks)[:, None, None] % min(ranks, 3) * 0.5 if case.silent else torch.tensor(0.9)
    real = torch.rand(ranks, 1, TOKENS, generator=generator) < share
    routes = [None] * ranks
    if case.router == "routes":
        routes = torch.rand(ranks, 1, TOKENS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.uint8)
    return whole, xs, ups, real, routes


def measure(process: Process, case: Case) -> dict:
    """One case on all ranks."""
    ranks, rank, dtype = process.world_size, process.rank, getattr(torch, case.dtype)
    everyone = torch.arange(ranks).view(case.hosts, case.of_host)
    between = group_of_partition(everyone.t()) if case.hosts > 1 else None
    in_host = group_of_partition(everyone)
    whole, xs, ups, real, routes = example(case, ranks)
    links, found = {}, {}
    group = dist.group.WORLD
    ways = {
        "reference": AllToAllDispatcher(group),
        "all_to_all": AllToAllDispatcher(group, case.chunks),
        "two_level": TwoLevelDispatcher(group, between, in_host, case.chunks),
    }
    for name in ("reference", case.way):
        ways[name].multiple = case.multiple
        moe, links[name] = split(whole, ways[name], rank, ranks, dtype), Links(case.of_host)
        with links[name].patches, links[name]:
            found[name] = run(moe, case, xs[rank], ups[rank], real[rank], routes[rank])
    ys, grads = [], []
    options = RoutingOptions(capacity_factor=case.capacity)
    with torch.no_grad():
        chosen = [whole.router(xs[r], real[r], options, routes[r]) for r in range(ranks)]
    for r in range(ranks):
        y, grad, of_parameters = run(whole, case._replace(checkpointing="none"), xs[r], ups[r], real[r], routes[r])
        ys.append(y)
        grads.append(grad)
    y, grad, of_parameters = found[case.way]
    errors = {"y": error(y, ys[rank]), "x": error(grad, grads[rank])}
    for name, p in whole.named_parameters():
        if name.startswith("experts."):
            errors[name] = error(of_parameters[name], p.grad.chunk(ranks)[rank])
        else:
            total = of_parameters[name].double()
            dist.all_reduce(total)
            errors[name] = error(total, p.grad)
    of_all_to_all = found["reference"][2]
    same = {n: torch.equal(of_all_to_all[n], g) for n, g in of_parameters.items() if "shared" not in n}
    everything: list = [None] * ranks
    dist.all_gather_object(everything, (errors, same, {n: dict(x.sent) for n, x in links.items()}))
    weights, experts = torch.stack([c.weights for c in chosen]), torch.stack([c.experts for c in chosen])
    return {
        "case": case._asdict(),
        "errors": {name: max(each[0][name] for each in everything) for name in errors},
        "differ": sorted({name for each in everything for name, is_same in each[1].items() if not is_same}),
        "real_tokens": int(real.sum()),
        "waits": [x.waits for x in links.values()],
        "order": " ".join(links[case.way].order),
        "sent": {
            name: dict(sum((collections.Counter(each[2][name]) for each in everything), collections.Counter()))
            for name in links
        },
        "expected": {
            name: expected_bytes(weights, experts, case, dtype.itemsize, name == "two_level") for name in links
        },
    }


THOROUGH_4, THOROUGH_8 = (pytest.param(ranks, marks=pytest.mark.thorough) for ranks in (4, 8))
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Of the norm. FP32: sums in another order, as in all layouts. BF16: a sum over experts is rounded up to three times
instead of once, each time by at most 2**-9 of a term."""


@pytest.fixture(scope="module", params=[4, THOROUGH_8])
def figures(request) -> list[dict]:
    """The row of each case of a world size."""
    rows = run_ranks(measure_cases, request.param, measure, CASES[request.param])[0]
    assert len(rows) == len(CASES[request.param])
    return rows


def test_gradients_are_those_of_one_process(figures):
    for row in figures:
        wrong = {name: error for name, error in row["errors"].items() if not error < BOUNDS[row["case"]["dtype"]]}
        assert not wrong, row["case"]


def test_experts_and_router_get_the_bits_of_the_all_to_all(figures):
    for row in figures:
        if row["case"]["dtype"] == "float32" and row["case"]["chunks"] == 1:
            assert row["differ"] == [], row["case"]


def test_bytes_by_link_are_those_of_the_routing(figures):
    for row in figures:
        for name, sent in row["sent"].items():
            assert {k: v for k, v in sent.items() if v} == row["expected"][name], (name, row["case"])


def test_the_plan_counts_the_rows_of_even_routes(figures):
    """Of experts that are chosen at random: what `Plan.hops` counts, within the noise of 346 tokens."""
    for row in figures:
        case = row["case"]
        if case["router"] == "routes":
            parallelism = {"expert_parallel_degree": 4, "expert_exchange": "two_level"}
            model = model_table(flavor="debug", **CHANGES)
            config = RunConfig.model_validate({"model": model, "parallelism": parallelism})
            hops = rows_of_hops(resolve_plan(config, 4, host_ranks=case["of_host"]), SHAPE)
            of_row = 4 * WIDTH * 4 + 12 * CHOSEN
            planned = row["real_tokens"] * sum(hops) * of_row
            assert sum(row["sent"]["two_level"].values()) == pytest.approx(planned, rel=0.03)


def test_the_host_waits_once(figures):
    """For all chunks, and not in a recomputation."""
    for row in figures:
        assert row["waits"] == [1, 1], row["case"]


ORDERS = {
    # Ways there of both chunks; then each change of link waits between two products of the other chunk. Backward
    # mirrors.
    (2, "none"): "send0 send1 wait0 send2 wait2 experts wait1 send3 experts send4 wait3 experts wait4 send5 experts "
    "send6 wait6 send7 wait5 wait7 "
    "send8 send9 wait8 send10 wait10 experts wait9 send11 experts send12 wait11 experts wait12 send13 experts "
    "send14 wait14 send15 wait13 wait15",
    # The gradient of the first chunk travels while the layer is computed again, which sends the ways there and nothing
    # back, and computes the first product of each chunk, whose second one nobody reads.
    (2, "full"): "send0 send1 wait0 send2 wait2 experts wait1 send3 experts send4 wait3 experts wait4 send5 experts "
    "send6 wait6 send7 wait5 wait7 "
    "send8 send9 wait8 send10 wait10 send11 send12 wait11 send13 wait13 experts wait12 send14 wait14 experts "
    "wait9 send15 experts send16 wait15 experts wait16 send17 experts send18 wait18 send19 wait17 wait19",
    (1, "none"): "send0 send1 wait0 experts send2 wait1 experts send3 wait2 wait3 "
    "send4 send5 wait4 experts send6 wait5 experts send7 wait6 wait7",
    (1, "full"): "send0 send1 wait0 experts send2 wait1 experts send3 wait2 wait3 "
    "send4 send5 wait4 send6 send7 wait6 experts wait7 experts send8 wait5 experts send9 wait8 wait9",
}
"""By hosts and checkpointing, of rows and their gradients in two chunks."""


def test_a_chunk_travels_while_experts_compute_the_other(figures):
    found = {}
    for row in figures:
        case = row["case"]
        if case["chunks"] == 2:
            found[case["hosts"], case["checkpointing"]] = row["order"]
            assert row["order"] == ORDERS.get((case["hosts"], case["checkpointing"]), row["order"]), case
            # What selective checkpointing keeps is not sent again.
            sends = row["order"].count("send")
            levels = 1 if "all_to_all" in row["sent"] or 1 in (case["hosts"], case["of_host"]) else 2
            assert sends == levels * 2 * (5 if case["checkpointing"] == "full" else 4), case
    assert found.keys() & ORDERS.keys()


def test_fewer_bytes_travel(figures):
    """Between hosts at most half, inside one host a quarter less."""
    for row in figures:
        case, (before, after) = row["case"], row["sent"].values()
        if case["hosts"] == 2 and case["dtype"] == "float32" and case["of_host"] > 1 and not case["favourites"]:
            assert after["network"] < before["network"] / 2, case


def deepep_cases(ranks: int) -> list[Case]:
    """The cases of this number of ranks, in BF16."""
    special = [
        {}, {"checkpointing": "full"}, {"checkpointing": "selective"}, {"capacity": 0.5, "checkpointing": "full"},
        {"favourites": 8, "silent": True, "checkpointing": "selective"}, {"multiple": 16}, {"router": "routes"},
        {"multiple": 32, "favourites": 8, "silent": True, "capacity": 1.5},
    ]  # fmt: skip
    return [Case(1, ranks, dtype="bfloat16", way="deepep", **each) for each in special]


DEEPEP_CASES = {ranks: deepep_cases(ranks) for ranks in (2, 4)}


def measure_deepep(process: Process, case: Case) -> dict:
    """One case on all ranks."""
    ranks, rank, dtype = process.world_size, process.rank, torch.bfloat16
    whole, xs, ups, real, routes = example(case, ranks)
    buffer = ElasticBuffer(dist.group.WORLD, None, 0, TOKENS, WIDTH, CHOSEN, deterministic=True)
    found = []
    for dispatcher in (AllToAllDispatcher(dist.group.WORLD), DeepEPDispatcher(dist.group.WORLD, buffer)):
        dispatcher.multiple = case.multiple
        moe = split(whole, dispatcher, rank, ranks, dtype)
        with only_arrived(moe):
            found.append(run(moe, case, xs[rank], ups[rank], real[rank], routes[rank]))
    (y, x, of_parameters), (y_here, x_here, of_parameters_here) = found
    errors = {"y": error(y_here, y), "x": error(x_here, x)}
    errors |= {name: error(grad, of_parameters[name]) for name, grad in of_parameters_here.items()}
    equal = {name: torch.equal(grad, of_parameters[name]) for name, grad in of_parameters_here.items()}
    everything: list = [None] * ranks
    dist.all_gather_object(everything, (errors, equal, buffer.calls))
    return {
        "case": case._asdict(),
        "errors": {name: max(each[0][name] for each in everything) for name in errors},
        "differ": sorted({name for each in everything for name, is_same in each[1].items() if not is_same}),
        "calls": sorted({" ".join(each[2]) for each in everything}),
    }


def only_arrived(moe: MoE) -> contextlib.AbstractContextManager:
    """Where experts read what has not arrived, this finds it: their rows and weights are finite."""
    forward = moe.experts.forward

    def checked(x: Tensor, weights: Tensor, *others) -> Tensor:
        assert x.isfinite().all() and weights.isfinite().all(), "rows that have not arrived"
        return forward(x, weights, *others)

    return mock.patch.object(moe.experts, "forward", checked)


CALLS = {
    "none": "dispatch+ combine cached combine+",
    # A recomputation sends tokens by the handle of the first run, and no results.
    "full": "dispatch+ combine cached cached combine+",
    # It has kept the rows.
    "selective": "dispatch+ combine cached combine+",
}
"""By checkpointing: a forward and a backward of a layer."""


@pytest.fixture(scope="module", params=[2, THOROUGH_4])
def deepep_figures(request) -> list[dict]:
    """The row of each case of a world size."""
    rows = run_ranks(measure_cases, request.param, measure_deepep, DEEPEP_CASES[request.param])[0]
    assert len(rows) == len(DEEPEP_CASES[request.param])
    return rows


def test_deepep_gives_results_and_gradients_of_the_all_to_all(deepep_figures):
    """A rank rounds the sum of what its experts compute of a token to BF16, and then the sum of all ranks."""
    for row in deepep_figures:
        wrong = {name: error for name, error in row["errors"].items() if not error < BOUNDS["bfloat16"]}
        assert not wrong, row["case"]


def test_deepep_gives_experts_and_router_the_bits_of_the_all_to_all(deepep_figures):
    for row in deepep_figures:
        assert row["differ"] == [], row["case"]


def test_a_recomputation_sends_by_deepep_only_what_it_must(deepep_figures):
    for row in deepep_figures:
        assert row["calls"] == [CALLS[row["case"]["checkpointing"]]], row["case"]
