"""On each rank: one MoE layer whose tokens travel in two levels, beside the all-to-all and beside one process.

Prints one JSON object per case: the largest errors, whether gradients are equal bit for bit, and the bytes by link.
"""

import collections
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from glm46 import compat
from glm46.compute.distributed import collectives
from glm46.compute.distributed.groups import group_of_partition
from glm46.compute.distributed.process import Process
from glm46.compute.model.dispatch import TokenDispatcher
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.parallelize import activation_checkpoint
from glm46.compute.parallelize.expert import AllToAllDispatcher
from glm46.compute.parallelize.two_level import TwoLevelDispatcher
from glm46.config.presets import PRESETS
from tests.ranks.forked_ranks import print_figures

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


CASES = {
    4: [
        Case(2, 2), Case(4, 1), Case(1, 4), Case(2, 2, capacity=1.5), Case(2, 2, favourites=8, silent=True),
        Case(2, 2, dtype="bfloat16"), Case(1, 4, dtype="bfloat16"), Case(2, 2, multiple=16),
        Case(2, 2, checkpointing="full"), Case(2, 2, checkpointing="selective"), Case(1, 4, checkpointing="selective"),
        Case(4, 1, checkpointing="full", capacity=0.5), Case(1, 4, multiple=32, favourites=8, silent=True),
        Case(2, 2, router="routes"),
    ],
    8: [Case(2, 4), Case(4, 2), Case(1, 8), Case(2, 4, favourites=8, silent=True), Case(4, 2, dtype="bfloat16")],
}  # fmt: skip


class Links:
    """Bytes of rows, weights and numbers that this rank sends, by link, and how often the host waits for sizes."""

    def __init__(self, of_host: int):
        self.sent, self.waits, self._of_host = collections.Counter(), 0, of_host
        start, send_all, cpu = compat.start_exchange, collectives._all_to_all, Tensor.cpu

        def started(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
            self._count(rows, send, group)
            return start(rows, receive, send, group)

        def blocking(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
            self._count(rows, send, group)
            return send_all(rows, send, receive, group)

        def copied(tensor: Tensor) -> Tensor:
            self.waits += 1
            return cpu(tensor)

        self.patches = (
            mock.patch.object(compat, "start_exchange", started),
            mock.patch.object(collectives, "_all_to_all", blocking),
            mock.patch.object(Tensor, "cpu", copied),
        )

    def _count(self, rows: Tensor, send: list[int], group: dist.ProcessGroup) -> None:
        me, width = dist.get_rank(), rows[:1].numel() * rows.element_size() if len(rows) else 0
        for rank, count in zip(dist.get_process_group_ranks(group), send, strict=True):
            if rows.dtype != torch.int64:  # those are counts
                link = "self" if rank == me else "host" if rank // self._of_host == me // self._of_host else "network"
                self.sent[link] += count * width


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
    # Rows there and back and their gradients; weights with their gradients, and the numbers of experts once.
    of_row = 4 * SHAPE.hidden_size * width + ((8 * CHOSEN + 4 * CHOSEN) if is_two_level else 8)
    return {link: count * of_row for link, count in rows.items()}


def run(moe: MoE, case: Case, x: Tensor, up: Tensor, is_real: Tensor, routes: Tensor | None) -> tuple:
    """Result, gradient of the input and those of the parameters."""
    x = x.clone().requires_grad_()
    options, forward = RoutingOptions(capacity_factor=case.capacity), moe.forward
    if case.checkpointing != "none":
        keywords = {}
        if case.checkpointing == "selective":
            keywords["context_fn"] = partial(create_selective_checkpoint_contexts, activation_checkpoint._policy)
        forward = partial(checkpoint, moe.forward, use_reentrant=False, preserve_rng_state=False, **keywords)
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


def measure(process: Process, case: Case) -> dict:
    """One case on all ranks."""
    ranks, rank, dtype = process.world_size, process.rank, getattr(torch, case.dtype)
    everyone = torch.arange(ranks).view(case.hosts, case.of_host)
    between = group_of_partition(everyone.t()) if case.hosts > 1 else None
    in_host = group_of_partition(everyone)
    generator = torch.Generator().manual_seed(0)
    whole = MoE(SHAPE).to(dtype)
    for p in whole.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    whole.router.e_score_correction_bias[: case.favourites] = 100.0
    xs, ups = torch.randn(2, ranks, 1, TOKENS, WIDTH, generator=generator).to(dtype)
    share = torch.arange(ranks)[:, None, None] % 3 * 0.5 if case.silent else torch.tensor(0.9)
    real = torch.rand(ranks, 1, TOKENS, generator=generator) < share
    routes = [None] * ranks
    if case.router == "routes":
        routes = torch.rand(ranks, 1, TOKENS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.uint8)
    links, found = {}, {}
    for name in ("all_to_all", "two_level"):
        group = dist.group.WORLD
        of_kind = AllToAllDispatcher(group) if name == "all_to_all" else TwoLevelDispatcher(group, between, in_host)
        of_kind.multiple, links[name] = case.multiple, Links(case.of_host)
        moe = split(whole, of_kind, rank, ranks, dtype)
        with links[name].patches[0], links[name].patches[1], links[name].patches[2]:
            found[name] = run(moe, case, xs[rank], ups[rank], real[rank], routes[rank])
    ys, grads = [], []
    options = RoutingOptions(capacity_factor=case.capacity)
    with torch.no_grad():
        chosen = [whole.router(xs[r], real[r], options, routes[r]) for r in range(ranks)]
    for r in range(ranks):
        y, grad, of_parameters = run(whole, case._replace(checkpointing="none"), xs[r], ups[r], real[r], routes[r])
        ys.append(y)
        grads.append(grad)
    y, grad, of_parameters = found["two_level"]
    errors = {"y": error(y, ys[rank]), "x": error(grad, grads[rank])}
    for name, p in whole.named_parameters():
        if name.startswith("experts."):
            errors[name] = error(of_parameters[name], p.grad.chunk(ranks)[rank])
        else:
            total = of_parameters[name].double()
            dist.all_reduce(total)
            errors[name] = error(total, p.grad)
    of_all_to_all = found["all_to_all"][2]
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
        "sent": {
            name: dict(sum((collections.Counter(each[2][name]) for each in everything), collections.Counter()))
            for name in links
        },
        "expected": {
            name: expected_bytes(weights, experts, case, dtype.itemsize, name == "two_level") for name in links
        },
    }


def main() -> None:
    """Measure all cases of this world size."""
    print_figures(CASES, measure)
