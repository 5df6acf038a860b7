"""What one rank can run of the paths between ranks, in groups of itself alone: by NCCL on a GPU, by gloo without one.

Kernels, streams, autograd and the lifetimes of buffers are those of many ranks; that data reaches the right rank is for
`tests/ranks`. Blocking sends between stages of a pipeline have no form to oneself: NCCL would wait for its own kernel.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glm46.compute.distributed.collectives import (
    Exchange,
    exchange_rows,
    gather_sequence,
    scatter_sum,
    sum_over_ranks,
    whole_sequence,
)
from glm46.compute.distributed.groups import new_group
from glm46.compute.distributed.mesh import Cluster, Meshes
from glm46.compute.distributed.process import Process
from glm46.compute.distributed.ranks import Ranks
from glm46.compute.distributed.sequence import SequenceShard
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.dispatch import LocalDispatcher
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import OutputHead
from glm46.compute.optim.muon_exchange import BucketExchange, make_groups
from glm46.compute.optim.muon_plan import Bucket, Unit
from glm46.compute.optim.muon_update import Orthogonalizer, Piece, update_whole
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from glm46.compute.parallelize.ring import _Passing
from glm46.compute.parallelize.tensor import vocabulary_parallel_head, vocabulary_parallel_lookup
from glm46.compute.parallelize.two_level import TwoLevelDispatcher
from glm46.config.presets import PRESETS
from glm46.engine.reliability.hang_report import collectives_here
from glm46.engine.training.network import build_network
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.files.threads import in_thread
from glm46.run import context_keys
from glm46.run.plan import resolve_plan
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.tasks.pretrain.next_token import NextToken
from glm46.tasks.rl.rollout.weight_group import WeightGroup
from tests.ranks.sharded_layouts import Job, Layout, make_batch, make_config, micro_batches, whole

CLOSE = 1e-5
"""Relative: sums in FP32, perhaps in another order."""


def random(*size: int, device: torch.device) -> Tensor:
    """The same values on every device, with gradient."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device).requires_grad_()


def assert_close(found: Tensor, wanted: Tensor, name: str = "") -> None:
    """Within `CLOSE`, by the norm."""
    distance = torch.dist(found.detach().float(), wanted.detach().float())
    assert distance <= CLOSE * wanted.detach().float().norm() + 1e-12, (name, distance.item())


def still_work(process: Process) -> bool:
    """True if the group of all ranks sums a tensor of the device and one of the CPU, after whatever a case did."""
    tensors = torch.ones(2, device=process.device), torch.ones(2)
    for tensor in tensors:
        dist.all_reduce(tensor)
    return all(tensor.tolist() == [1, 1] for tensor in tensors)


def rows_come_back(process: Process) -> None:
    """`Exchange`, with work between its start and its end, and `exchange_rows`; also without rows."""
    for rows, part in ((1000, "rows"), (1000, "back"), (0, "rows"), (0, "back")):
        x = random(rows, 64, device=process.device)
        there = Exchange([rows], [rows], dist.group.WORLD, part)
        in_flight = there.start(x)
        beside = x.sin()
        back = exchange_rows(there.finish(in_flight) * 2, [rows], [rows], dist.group.WORLD)
        (back * 3 + beside).sum().backward()
        assert torch.equal(back, x * 2)
        assert_close(x.grad, 6 + x.cos())


def sequences_are_whole(process: Process) -> None:
    """Gathers and scattered sums over the ranks of a sequence, and their backward."""
    for collective in (gather_sequence, whole_sequence, scatter_sum, sum_over_ranks):
        x = random(2, 48, 8, device=process.device)
        y = collective(x, dist.group.WORLD)
        (y * y.detach()).sum().backward()
        assert torch.equal(y, x) and torch.equal(x.grad, x)
    shard = SequenceShard(dist.group.WORLD, 1, 0)
    places = shard.places(None, (2, 48), None)
    values = torch.arange(96.0, device=process.device).view(1, 2, 48)
    assert torch.equal(shard.restore(values, places), values)


def tokens_reach_experts(process: Process) -> None:
    """An MoE layer whose tokens are exchanged is the local layer: padded groups, padding and a capacity too."""
    is_real = (torch.arange(96) < 80).view(2, 48).to(process.device)
    world = dist.group.WORLD
    ways = (
        LocalDispatcher(), AllToAllDispatcher(world), TwoLevelDispatcher(world, world, world),
        TwoLevelDispatcher(world, None, world), TwoLevelDispatcher(world, world, world, 2),
        AllToAllDispatcher(world, 2),
    )  # fmt: skip
    for multiple, options in ((1, RoutingOptions()), (16, RoutingOptions(capacity_factor=1.25))):
        results = []
        for way in ways:
            layer = MoE(PRESETS["debug"]).to(process.device)
            torch.manual_seed(0)
            for parameter in layer.parameters():
                parameter.data = torch.nn.init.normal_(torch.empty(parameter.shape), std=0.05).to(process.device)
            layer.router.e_score_correction_bias.zero_()
            layer.dispatcher, way.multiple = way, multiple
            x = random(2, 48, PRESETS["debug"].hidden_size, device=process.device)
            y, statistics = layer(x, is_real, options)
            (y * y.detach()).sum().backward()
            gradients = [parameter.grad for parameter in layer.parameters()]
            results.append([y, x.grad, statistics.tokens_per_expert, *gradients])
        for exchanged in results[1:]:
            for found, wanted in zip(exchanged, results[0], strict=True):
                assert_close(found, wanted)


def the_vocabulary_is_split(process: Process) -> None:
    """Embedding and head that hold a part of the vocabulary, which is all of it."""
    shape, group = PRESETS["debug"], dist.group.WORLD
    size = shape.vocab_size, shape.hidden_size
    with process.device:
        embedding, head = nn.Embedding(*size), OutputHead(*size)
        ids = torch.arange(96).view(2, 48)
        torch.nn.init.normal_(head.weight, std=0.1)
    assert torch.equal(vocabulary_parallel_lookup(embedding, group)(ids), embedding(ids))
    hidden = random(2, 48, shape.hidden_size, device=process.device)
    form = partial(token_logprobs, entropy=True)
    results = []
    for forward in (head.forward, vocabulary_parallel_head(head, group)):
        output = forward(hidden, ids, form)
        found = torch.autograd.grad((output.logprobs + output.entropy).sum(), [hidden, head.weight])
        results.append([output.logprobs, output.entropy, *found])
    for found, wanted in zip(*reversed(results), strict=True):
        assert_close(found, wanted)


def keys_pass_to_the_next_rank(process: Process) -> None:
    """Two at once, as a ring passes keys and their gradients, to this rank itself."""
    if process.device.type == "cpu":
        return  # gloo has no messages to oneself
    sent = [torch.randn(1 << 20, device=process.device) for _ in range(2)]
    passing = [_Passing(x, dist.group.WORLD) for x in sent]
    for one, x in zip(passing, sent, strict=True):
        assert torch.equal(one.wait(), x)


def muon_exchanges(process: Process) -> None:
    """A bucket of two matrices, whose parts and updates stay here: empty exchanges, which every rank without a part
    has too."""
    shapes = ((48, 64), (64, 32))
    units = tuple(
        Unit(i, f"matrix {i}", 0, (0, rows), columns, (((0, rows), (0, columns)),), 0, owner=0)
        for i, (rows, columns) in enumerate(shapes)
    )
    group = {"momentum": 0.95, "lr": 0.1, "weight_decay": 0.1, "adjust_lr": "original"}
    settings, results = Orthogonalizer(5, torch.float32), []
    for is_exchanged in (False, True):
        weights = [random(1, *shape, device=process.device).detach() for shape in shapes]
        pieces = {
            unit: Piece(group, weight, weight.sin(), torch.zeros_like(weight), *shape)
            for unit, weight, shape in zip(units, weights, shapes, strict=True)
        }
        if is_exchanged:
            groups = make_groups([(0,)], [])
            exchange = BucketExchange(Bucket((0,), units), groups[(0,)], settings, process.device)
            exchange.gather(pieces)
            exchange.orthogonalize()
            exchange.finish()
        else:
            for piece in pieces.values():
                update_whole([piece], settings)
        results.append(weights)
    for found, wanted in zip(*reversed(results), strict=True):
        assert_close(found, wanted)


def a_server_gets_weights(process: Process) -> None:
    """A group of the trainer for a server without workers: it is made, takes buckets and ends, three times."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    try:
        for version in range(3):
            backend = "gloo" if process.device.type == "cpu" else "nccl"
            group = WeightGroup(f"http://127.0.0.1:{server.server_port}", 0, backend, 30.0)
            group.join(version, lambda _: in_thread(lambda: time.sleep(0.5) or "loaded"))
            for size in (0, 1 << 20):
                group.end(group.begin(torch.ones(size, device=process.device)), time.monotonic())
                assert group.fault is None
            assert group.result(30.0) == "loaded"
    finally:
        server.server_close()


def ranks_agree(process: Process) -> None:
    """The objects, flags and stages that ranks exchange over gloo, beside tensors of the device."""
    ranks = Ranks.of_this_run()
    assert ranks.all_gather({"a": 1}) == [{"a": 1}] and ranks.any([True, False]) == [True, False]
    assert ranks.of_first("x") == "x" and ranks.gather(2) == [2] and ranks.scatter([3]) == 3
    for to in ("all", "first", "each"):
        with ranks.stage("testing", to) as stage:
            stage.value = [4] if to == "each" else 4
        assert stage.value == 4 if to == "each" else stage.values == [4]
    counts = torch.tensor([1, 2])
    dist.all_reduce(counts)
    on_device = torch.ones(4, device=process.device)
    dist.all_reduce(on_device, dist.ReduceOp.MAX)
    assert counts.tolist() == [1, 2] and on_device.tolist() == [1] * 4


def a_hang_report_sees_collectives(process: Process) -> None:
    """The recorder of the backend knows a group that was split off, by its number and the name of its last
    collective."""
    group = new_group([0])
    x = torch.ones(4, device=process.device)
    for _ in range(500):  # more than a group of an earlier test had, whose name it may have
        dist.all_reduce(x, group=group)
    if x.is_cuda:
        torch.cuda.synchronize()
    found, text = collectives_here()
    last = [position for position in found["collectives"].values() if "reduce" in position[1]]
    assert last and max(position[0] for position in last) >= 500, found
    assert text.startswith('{"gloo"')
    if not x.is_cuda:
        return
    number = max(position[0] for position in last) + 1

    def completed() -> int:
        return max(position[2] for position in collectives_here()[0]["collectives"].values() if "reduce" in position[1])

    torch.cuda._sleep(4_000_000_000)  # a kernel that is stuck for two seconds, before the next collective on the stream
    dist.all_reduce(x, group=group)
    assert completed() < number
    torch.cuda.synchronize()
    end = time.monotonic() + 60
    while completed() < number and time.monotonic() < end:  # its watchdog looks from time to time
        time.sleep(0.05)
    assert completed() == number


def build(process: Process, axes: tuple[str, ...], **degrees: str) -> Job:
    """A job whose meshes have an axis of one rank for each of ``axes``."""

    def mesh(*names: str) -> DeviceMesh:
        return init_device_mesh(process.device.type, (1,) * len(names), mesh_dim_names=names)

    replicas = ("dp_replicate",) if "dp_replicate" in axes else ()
    ranks = mesh(*replicas, "shard", *(("tp",) if "tp" in axes else ()))
    dense = expert_shard = ranks[(*replicas, "shard")]
    expert = None
    if "ep" in axes:
        sparse = mesh(*replicas, "efsdp", "ep")
        expert_shard, expert = sparse[(*replicas, "efsdp")], sparse["ep"]
    meshes = Meshes(
        dense=dense,
        expert_shard=expert_shard,
        expert=expert,
        expert_hosts=(dist.group.WORLD, dist.group.WORLD) if "hosts" in axes else None,
        sequence=SequenceShard(dist.group.WORLD, 1, 0) if "cp" in axes else None,
        tensor=ranks["tp"] if "tp" in axes else None,
        pipeline=dist.group.WORLD if "pp" in axes else None,
    )
    plan = resolve_plan(make_config(Layout(**degrees)), 1)
    network = build_network(plan, Cluster(process, plan.layout, meshes))
    return Job(plan, network.cluster, {"model": network}, {"model": NextToken(network)})


def trained(job: Job) -> dict[str, Tensor]:
    """Loss, norm, gradients and weights after two steps of training."""
    found = {}
    for step in range(2):
        totals = count_step(job, [make_batch(step)])
        outcome = train_step(job, micro_batches(job, step, 2), totals, step, 1.0).main
        found |= {f"loss {step}": outcome.objective["loss"], f"norm {step}": outcome.grad_norm}
    for name, parameter in job.network.parameters.items():
        found |= {f"gradient of {name}": whole(parameter.grad).cpu(), name: whole(parameter).cpu()}
    return found


def train_on(process: Process, axes: tuple[str, ...], gathered: int | None = None, **degrees: str) -> None:
    """Two steps with these axes give what steps without them give."""
    wanted = trained(build(process, ()))
    most = context_keys.MOST_GATHERED_BYTES if gathered is None else gathered
    with mock.patch.object(context_keys, "MOST_GATHERED_BYTES", most):
        found = trained(build(process, axes, **degrees))
    scale = wanted["norm 1"].item()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Gradients that are zero in exact arithmetic are rounding: as in the matrix of layouts, a floor for all.
        assert torch.dist(found[name], tensor) < 1e-4 * (tensor.norm() + 1e-4 * scale), name


def a_checkpoint_keeps_every_bit(process: Process) -> None:
    """Of a job with replicas, experts and tensor parallelism: saved in the background, changed meanwhile, loaded."""
    job = build(process, ("dp_replicate", "ep", "tp"))
    trained(job)
    state = job.network.state_tensors()
    before = {name: whole(tensor).clone() for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(folder, keep_latest_k=0)
        assert manager.save_in_background(1, state, {"kept": True})
        with torch.no_grad():
            for tensor in state.values():
                tensor.zero_()
        assert [outcome.step for outcome in manager.close()] == [1]
        manager = CheckpointManager(folder, keep_latest_k=0)
        manager.load(1, state)
    assert all(torch.equal(whole(tensor), before[name]) for name, tensor in state.items())


CASES: dict[str, Callable[[Process], None]] = {
    "exchange": rows_come_back,
    "sequences": sequences_are_whole,
    "experts": tokens_reach_experts,
    "vocabulary": the_vocabulary_is_split,
    "passing": keys_pass_to_the_next_rank,
    "muon": muon_exchanges,
    "weight group": a_server_gets_weights,
    "agreement": ranks_agree,
    "flight recorder": a_hang_report_sees_collectives,
    "checkpoint": a_checkpoint_keeps_every_bit,
    "fsdp": partial(train_on, axes=()),
    "hsdp": partial(train_on, axes=("dp_replicate",)),
    "hsdp-ep": partial(train_on, axes=("dp_replicate", "ep")),
    "ep-hosts": partial(train_on, axes=("ep", "hosts")),
    "cp": partial(train_on, axes=("cp",)),
    "cp-ring": partial(train_on, axes=("cp",), gathered=0),
    "tp": partial(train_on, axes=("tp",)),
    "pp-1F1B": partial(train_on, axes=("pp",), schedule="1F1B"),
    "all": partial(train_on, axes=("dp_replicate", "ep", "cp", "tp", "pp")),
}
