"""Predicts how long a layer waits for tokens on their way to experts and back, from the order of sends and products.

The order follows `compute/parallelize/exchange.py`; a test compares it with the log of real ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from glm46.operate.estimate.kernels import MicroBatch, work_beside_exchange
from glm46.operate.estimate.micro_batch_traffic import exchanges
from glm46.operate.estimate.roofline import Roofline
from glm46.operate.estimate.target_cluster import groups
from glm46.operate.estimate.traffic import Traffic
from glm46.run.plan import Plan

CONTENTION = 0.1
"""Slowdown of kernels, as a share of the time in which rows travel: copies use part of a GPU's processors and
memory."""
BESIDE_OTHERS = {"Interleaved1F1B": 0.37, "DualPipeV": 1.0}
"""Share of the wait for tokens that published training stacks overlap with another micro-batch, by schedule: 37 % of
the communication in Megatron's 1F1B overlap (Megatron-Bridge@067f987,
skills/nemo-mbridge-perf-expert-parallel-overlap), all of it in DualPipe (arXiv 2412.19437, section 3.2.1). Neither
recomputes complete layers."""


class Step(NamedTuple):
    """One action of a layer, which sends rows, waits for rows or computes."""

    kind: Literal["send", "wait", "shared", "gate_up", "down", "recomputation"]
    hop: tuple[int, bool] = (0, False)
    """For a send: the link (0 for the first hop to the experts, 1 for the second), and True on the way back."""
    number: int = 0
    """Number of a send, and of the wait for it."""


def forward_steps(chunks: int, hops: int, returns: bool = True) -> list[Step]:
    """List the steps of a layer's forward. ``returns``: False for a recomputation, which sends nothing back."""
    steps: list[Step] = []

    def send(link: int, is_back: bool = False) -> Step:
        """Add a send, and return the wait for it."""
        steps.append(Step("send", (link, is_back), sum(step.kind == "send" for step in steps)))
        return steps[-1]._replace(kind="wait")

    def change_link(waiting: list[Step], is_back: bool) -> None:
        """With two hops: wait for the last of these sends, and send its rows over the other link."""
        if waiting and hops == 2:
            steps.append(waiting[-1])
            waiting[-1] = send(0 if is_back else 1, is_back)

    outbound = [send(0) for _ in range(chunks)]
    returning = list[Step]()
    steps.append(Step("shared"))
    incoming = outbound[:1]
    change_link(incoming, False)
    for number in range(chunks):
        steps += [*incoming, Step("gate_up")]
        incoming = outbound[number + 1 : number + 2]
        change_link(incoming, False)
        change_link(returning, True)
        steps.append(Step("down"))
        returning += [send(hops - 1, True)] if returns else []
    change_link(returning, True)
    return steps + returning


def backward_steps(chunks: int, hops: int) -> list[Step]:
    """List the steps of a layer's backward, in reverse: gradients are sent where forward waited. The layer may be
    recomputed before the gradients of its experts."""
    swapped: dict[str, Any] = {"send": "wait", "wait": "send"}
    steps = [step._replace(kind=swapped.get(step.kind, step.kind)) for step in reversed(forward_steps(chunks, hops))]
    steps.insert(steps.index(Step("down")), Step("recomputation"))
    return steps


def exposed_seconds(
    steps: Sequence[Step], computed: Mapping[str, float], hops: Mapping[tuple[int, bool], float], slowed: float
) -> float:
    """Return the seconds of the exchanges that no kernel hides, plus the slowdown of kernels that overlap with the
    rest: play the steps on a clock, where each link carries one send at a time.

    Args:
        computed: seconds of each step that computes, by kind.
        hops: seconds of one send, by hop.
        slowed: slowdown of the kernels, as a share of the hidden seconds.
    """
    clock = 0.0
    link_free_at = [0.0, 0.0]
    received_at = dict[int, float]()
    for kind, hop, number in steps:
        if kind == "send":
            link, _ = hop
            link_free_at[link] = max(clock, link_free_at[link]) + hops[hop]
            received_at[number] = link_free_at[link]
        elif kind == "wait":
            clock = max(clock, received_at[number])
        else:
            clock += computed.get(kind, 0.0)
    sent = sum(hops[step.hop] for step in steps if step.kind == "send")
    exposed = clock - sum(computed.get(step.kind, 0.0) for step in steps)
    return exposed + slowed * max(sent - exposed, 0.0)


def waits_for_tokens(
    plan: Plan, roofline: Roofline, batch: MicroBatch, again: float, *, repeats: bool = False
) -> tuple[float, float]:
    """Return the seconds in which one layer waits for tokens in forward, and in backward with recomputation.

    Args:
        again: seconds of the recomputation.
        repeats: True if the recomputation repeats the exchange.
    """
    parallelism = plan.config.parallelism
    published = roofline.published_exchange
    hops = exchanges(plan, batch.shape, batch.tokens / batch.chunks)
    is_one_kernel = published or parallelism.expert_exchange == "deepep"
    ranks = {axis: size for axis, (_, size) in groups(plan).items()}

    def sends(first: int) -> dict[tuple[int, bool], float]:
        """Return the seconds of sends by hop: of `TOKENS` from ``first`` on to the experts, of rows back."""
        seconds: dict[tuple[int, bool], float] = {}
        for hop, (axis, *sizes) in enumerate(hops):
            calls = [roofline.traffic(Traffic(axis, "all_to_all", ranks[axis], 1, size, "")) for size in sizes]
            seconds |= {(hop, False): sum(calls[first:-1]), (hop, True): calls[-1]}
        if is_one_kernel:  # a single kernel forwards rows while others arrive
            return {(0, is_back): max(seconds[hop, is_back] for hop in range(len(hops))) for is_back in (False, True)}
        return seconds

    def computed(backward: bool) -> dict[str, float]:
        work = work_beside_exchange(batch, backward).items()
        seconds = {name: sum(map(roofline.kernel, items)) / batch.chunks for name, items in work}
        return seconds | {"shared": seconds["shared"] * batch.chunks, "recomputation": again}

    slowed = 1 - min(roofline.overlap, 1 - CONTENTION)
    forward = sends(0 if plan.expert_levels else 1)
    chunks = batch.chunks
    hop_count = 1 if is_one_kernel else len(hops)
    forward_work = computed(False)
    waits = exposed_seconds(forward_steps(chunks, hop_count), forward_work, forward, slowed)
    backward = exposed_seconds(backward_steps(chunks, hop_count), computed(True), sends(1), slowed)
    if repeats:
        backward += exposed_seconds(forward_steps(chunks, hop_count, returns=False), forward_work, forward, slowed)
    elif published and plan.layout.pp > 1:
        exposed_share = 1 - BESIDE_OTHERS.get(parallelism.pipeline_parallel_schedule, 0.0) * (1 - slowed)
        return exposed_share * waits, exposed_share * backward
    return waits, backward
