"""The time in which a layer waits for tokens on their way to experts and back, from the order of sends and products.

The order is that of `compute/parallelize/exchange.py`; a test holds it equal to what real ranks log.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from glm46.operate.estimate.kernels import MicroBatch, work_beside_exchange
from glm46.operate.estimate.micro_batch_traffic import exchanges
from glm46.operate.estimate.roofline import Roofline
from glm46.operate.estimate.target_cluster import groups
from glm46.operate.estimate.traffic import Traffic
from glm46.run.plan import Plan

CONTENTION = 0.1
"""Of the time in which rows travel beside kernels: copies take part of a GPU's processors and memory."""
BESIDE_OTHERS = {"Interleaved1F1B": 0.37, "DualPipeV": 1.0}
"""Of what a layer waits for tokens, the share that published training stacks run beside kernels of another micro-batch,
by schedule: Megatron's 1F1B overlap (Megatron-Bridge@067f987, skills/nemo-mbridge-perf-expert-parallel-overlap: 37 % of
the communication) and DualPipe (arXiv 2412.19437, section 3.2.1: all of it). Neither recomputes whole layers."""


class Step(NamedTuple):
    """One step of a layer, which sends rows, waits for them or computes."""

    kind: Literal["send", "wait", "shared", "gate_up", "down", "recomputation"]
    hop: tuple[int, bool] = (0, False)
    """Of a send: link, 0 of the first hop to the experts and 1 of the second; True on the way back."""
    number: int = 0
    """Of a send, and of the wait for it."""


def forward_steps(chunks: int, hops: int, returns: bool = True) -> list[Step]:
    """The forward of a layer. ``returns``: a recomputation sends nothing back."""
    steps: list[Step] = []

    def send(link: int, is_back: bool = False) -> Step:
        steps.append(Step("send", (link, is_back), sum(step.kind == "send" for step in steps)))
        return steps[-1]._replace(kind="wait")

    def change_link(waiting: list[Step], is_back: bool) -> None:
        if waiting and hops == 2:
            steps.append(waiting[-1])
            waiting[-1] = send(0 if is_back else 1, is_back)

    there, back = [send(0) for _ in range(chunks)], list[Step]()
    steps.append(Step("shared"))
    arriving = there[:1]
    change_link(arriving, False)
    for number in range(chunks):
        steps += [*arriving, Step("gate_up")]
        arriving = there[number + 1 : number + 2]
        change_link(arriving, False)
        change_link(back, True)
        steps.append(Step("down"))
        back += [send(hops - 1, True)] if returns else []
    change_link(back, True)
    return steps + back


def backward_steps(chunks: int, hops: int) -> list[Step]:
    """The same in reverse: gradients are sent where forward waited. The layer may be computed again before the
    gradients of its experts."""
    swapped: dict = {"send": "wait", "wait": "send"}
    steps = [step._replace(kind=swapped.get(step.kind, step.kind)) for step in reversed(forward_steps(chunks, hops))]
    steps.insert(steps.index(Step("down")), Step("recomputation"))
    return steps


def exposed_seconds(
    steps: Sequence[Step], computed: Mapping[str, float], hops: Mapping[tuple[int, bool], float], slowed: float
) -> float:
    """Seconds of the exchanges of these steps that no kernel hides, with what kernels beside the others lose.

    Args:
        computed: seconds of each step that computes, by kind.
        hops: seconds of one send, by hop.
        slowed: share of the hidden seconds that the kernels lose.
    """
    clock, free, arrived = 0.0, [0.0, 0.0], dict[int, float]()
    for kind, hop, number in steps:
        if kind == "send":
            arrived[number] = free[hop[0]] = max(clock, free[hop[0]]) + hops[hop]
        else:
            clock = max(clock, arrived[number]) if kind == "wait" else clock + computed.get(kind, 0.0)
    sent = sum(hops[step.hop] for step in steps if step.kind == "send")
    exposed = clock - sum(computed.get(step.kind, 0.0) for step in steps)
    return exposed + slowed * max(sent - exposed, 0.0)


def waits_for_tokens(
    plan: Plan, roofline: Roofline, batch: MicroBatch, again: float, *, repeats: bool = False
) -> tuple[float, float]:
    """Seconds in which one layer waits for tokens in forward, and in backward with its recomputation of ``again``
    seconds, which sends rows again if it ``repeats`` the exchange."""
    parallelism, published = plan.config.parallelism, roofline.published_exchange
    found = exchanges(plan, batch.shape, batch.tokens / batch.chunks)
    is_one_kernel = published or parallelism.expert_exchange == "deepep"
    ranks = {axis: size for axis, (_, size) in groups(plan).items()}

    def sends(first: int) -> dict[tuple[int, bool], float]:
        """Seconds of sends by hop; those there are of `TOKENS` from ``first`` on, those back of rows."""
        seconds: dict[tuple[int, bool], float] = {}
        for hop, (axis, *sizes) in enumerate(found):
            calls = [roofline.traffic(Traffic(axis, "all_to_all", ranks[axis], 1, size, "")) for size in sizes]
            seconds |= {(hop, False): sum(calls[first:-1]), (hop, True): calls[-1]}
        if is_one_kernel:  # which forwards rows while others arrive
            return {(0, is_back): max(seconds[hop, is_back] for hop in range(len(found))) for is_back in (False, True)}
        return seconds

    def computed(backward: bool) -> dict[str, float]:
        work = work_beside_exchange(batch, backward).items()
        seconds = {name: sum(map(roofline.kernel, each)) / batch.chunks for name, each in work}
        return seconds | {"shared": seconds["shared"] * batch.chunks, "recomputation": again}

    slowed, forward = 1 - min(roofline.overlap, 1 - CONTENTION), sends(0 if plan.expert_levels else 1)
    order, of_forward = (batch.chunks, 1 if is_one_kernel else len(found)), computed(False)
    waits = exposed_seconds(forward_steps(*order), of_forward, forward, slowed)
    backward = exposed_seconds(backward_steps(*order), computed(True), sends(1), slowed)
    if repeats:
        backward += exposed_seconds(forward_steps(*order, returns=False), of_forward, forward, slowed)
    elif published and plan.layout.pp > 1:
        left = 1 - BESIDE_OTHERS.get(parallelism.pipeline_parallel_schedule, 0.0) * (1 - slowed)
        return left * waits, left * backward
    return waits, backward
